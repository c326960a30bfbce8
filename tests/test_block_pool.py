"""BlockPool: a state machine against a model that knows which tokens each block holds."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specdec.block_pool import BlockPool

BLOCK = 4
NUM_BLOCKS = 9


class PoolMachine(RuleBasedStateMachine):
    """Sequences over two token ids take, share, register and give back blocks.

    The model holds each block's tokens as they were written; a hit must find exactly the tokens it
    was asked for, whatever was evicted or forgotten in between.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK)
        self.content: dict[int, tuple[int, ...]] = {}  # what the KV of a block was written for
        self.held: list[tuple[list[int], list[int]]] = []  # (block table, token ids)

    @rule(
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=26), lookahead=st.integers(0, 6)
    )
    def admit(self, token_ids: list[int], lookahead: int) -> None:
        before = self.pool.num_free
        hits = self.pool.match_prefix(token_ids, len(token_ids) - 2)
        assert len(hits) * BLOCK <= max(len(token_ids) - 2, 0)
        prefix: tuple[int, ...] = ()
        for i, block in enumerate(hits):
            prefix += tuple(token_ids[i * BLOCK : (i + 1) * BLOCK])
            assert self.content[block] == prefix, "a hit on other tokens"
        needed = -(-(len(token_ids) + lookahead) // BLOCK)
        free = self.pool.num_free
        blocks = self.pool.allocate(needed - len(hits))
        if blocks is None:
            assert needed - len(hits) > free
            self.pool.free(hits)
            assert self.pool.num_free == before
            return
        assert not set(blocks) & {b for table, _ in self.held for b in table}, "handed out twice"
        assert not set(blocks) & set(hits)
        table = hits + blocks
        for i in range(len(hits), len(table)):
            self.content[table[i]] = tuple(token_ids[: (i + 1) * BLOCK])
        self.held.append((table, token_ids))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        table, token_ids = data.draw(st.sampled_from(self.held))
        num_tokens = data.draw(st.integers(-2, len(token_ids)))
        self.pool.register(table, token_ids, num_tokens)
        if num_tokens >= BLOCK:
            found = self.pool.match_prefix(token_ids, num_tokens)
            assert len(found) == num_tokens // BLOCK, "registered blocks are found"
            self.pool.free(found)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        table, token_ids = self.held[index]
        blocks = self.pool.allocate(1)
        if blocks is None:
            return
        added = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=BLOCK))
        shared = {b for t, _ in self.held for b in t}
        assert blocks[0] not in shared
        table += blocks
        token_ids = [*token_ids, *added]
        for i in range(len(token_ids) // BLOCK):
            chunk = tuple(token_ids[: (i + 1) * BLOCK])
            if i < len(table) and len(self.content.get(table[i], ())) < len(chunk):
                self.content[table[i]] = chunk
        self.content[blocks[0]] = tuple(token_ids[: len(table) * BLOCK])
        self.held[index] = (table, token_ids)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.free(table)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """A failed sequence's own blocks are forgotten, then freed: never found again."""
        table, token_ids = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        own = [block for block in table if not self.pool.shared(block)]
        self.pool.forget(own)
        self.pool.free(table)
        hits = self.pool.match_prefix(token_ids, len(token_ids))
        assert not set(hits) & set(own), "a forgotten block was found"
        self.pool.free(hits)

    @invariant()
    def sound(self) -> None:
        self.pool.check_integrity()
        in_use = {block for table, _ in self.held for block in table}
        assert self.pool.num_free == NUM_BLOCKS - len(in_use)
        for block in in_use:
            count = sum(block in table for table, _ in self.held)
            assert self.pool.shared(block) == (count > 1)

    def teardown(self) -> None:
        for table, _ in self.held:
            self.pool.free(table)
        assert self.pool.num_free == NUM_BLOCKS


PoolMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
test_pool_machine = PoolMachine.TestCase


def chain(*starts: int) -> list[int]:
    """Tokens of whole blocks, each named by one number."""
    return [start for start in starts for _ in range(BLOCK)]


def fill(pool: BlockPool, token_ids: list[int]) -> list[int]:
    """A sequence comes, registers all its blocks and goes."""
    blocks = pool.allocate(len(token_ids) // BLOCK)
    assert blocks is not None
    pool.register(blocks, token_ids, len(token_ids))
    pool.free(blocks)
    return blocks


def found(pool: BlockPool, token_ids: list[int]) -> int:
    """Blocks that a prompt of these tokens would hit."""
    hits = pool.match_prefix(token_ids, len(token_ids))
    pool.free(hits)
    return len(hits)


def test_eviction_is_least_recently_used() -> None:
    """A full pool gives up the prefix that was used longest ago; a hit counts as use."""
    pool = BlockPool(3, BLOCK)
    for name in (1, 2, 3):
        fill(pool, chain(name))
    assert found(pool, chain(1)) == 1  # 2 is the oldest now
    (taken,) = pool.allocate(1) or []
    assert [found(pool, chain(name)) for name in (1, 2, 3)] == [1, 0, 1]
    pool.free([taken])
    pool.check_integrity()


def test_a_sequences_tail_is_evicted_before_its_head() -> None:
    """A chain is only of use from its start, so its last block must go first."""
    pool = BlockPool(3, BLOCK)
    fill(pool, chain(1, 2, 3))
    for left in (2, 1, 0):
        blocks = pool.allocate(3 - left)
        assert blocks is not None
        assert found(pool, chain(1, 2, 3)) == left
        pool.free(blocks)
        pool.check_integrity()


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(4, BLOCK)
    fill(pool, chain(1, 2))
    blocks = pool.allocate(2)
    assert blocks is not None and found(pool, chain(1, 2)) == 2


def test_too_few_blocks_change_nothing() -> None:
    pool = BlockPool(3, BLOCK)
    fill(pool, chain(1, 2))
    assert pool.allocate(4) is None and pool.num_free == 3
    assert found(pool, chain(1, 2)) == 2
    assert pool.allocate(0) == []


def test_shared_blocks_stay_until_the_last_holder_goes() -> None:
    pool = BlockPool(2, BLOCK)
    fill(pool, chain(1))
    first, second = (pool.match_prefix(chain(1, 2), 8) for _ in range(2))
    assert first == second and pool.shared(first[0])
    pool.free(first)
    assert not pool.shared(second[0]) and pool.num_free == 1
    assert pool.allocate(2) is None
    pool.free(second)
    assert pool.num_free == 2


def test_the_same_tokens_behind_another_prefix_do_not_hit() -> None:
    """The hash is chained: KV depends on everything before the block."""
    pool = BlockPool(4, BLOCK)
    fill(pool, chain(1, 2))
    assert found(pool, chain(1, 2)) == 2  # positive control
    assert found(pool, chain(2)) == 0 and found(pool, chain(3, 2)) == 0
    assert found(pool, [1, 1, 1, 0, 2, 2, 2, 2]) == 0


def test_two_sequences_that_compute_the_same_block() -> None:
    """The second keeps its own block; only one of the two is offered, the other becomes free."""
    pool = BlockPool(3, BLOCK)
    first, second = pool.allocate(1), pool.allocate(1)
    assert first and second
    for blocks in (first, second):
        pool.register(blocks, chain(1), BLOCK)
    pool.free(second)
    pool.check_integrity()
    assert pool.match_prefix(chain(1), BLOCK) == first
    pool.free(first)
    pool.forget(first)
    pool.free(first)
    pool.check_integrity()
    assert found(pool, chain(1)) == 0 and pool.num_free == 3


def test_without_prefix_caching_nothing_is_kept() -> None:
    pool = BlockPool(2, BLOCK, enable_prefix_caching=False)
    fill(pool, chain(1, 2))
    assert found(pool, chain(1, 2)) == 0 and pool.num_free == 2
    pool.check_integrity()


def test_freeing_twice_is_noticed() -> None:
    pool = BlockPool(2, BLOCK)
    blocks = pool.allocate(1)
    assert blocks
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)
