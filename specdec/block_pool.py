"""BlockPool: ids of KV blocks, reference counts and prefix hashes. It never touches a tensor."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

ROOT = b""  # the parent hash of a sequence's first block


class BlockPool:
    """Block ids 0 .. num_blocks - 1, shared by all models.

    A block is in one of three states:

        in use    ref_count > 0; held by one sequence, or by several that share a prefix
        cached    ref_count = 0, its hash registered; kept for later hits, evicted least
                  recently used first
        free      ref_count = 0, no hash; its content is worthless
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # popped from the end: low ids first
        self._cached: OrderedDict[int, None] = OrderedDict()  # unreferenced, oldest first
        self._hash_of: dict[int, bytes] = {}  # chained hash of a full, registered block
        self._block_of: dict[bytes, int] = {}  # the block that a hit on this hash gets

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, unreferenced cached ones included."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, evicting the least recently used cached ones; None (and no change)
        if too few.
        """
        if count > self.num_free:
            return None
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each. The last blocks of a sequence become evictable before the
        first ones.
        """
        for block in reversed(blocks):
            assert self._ref_counts[block] > 0, f"block {block} freed twice"
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            digest = self._hash_of.get(block)
            if digest is not None and self._block_of.get(digest) == block:
                self._cached[block] = None
            else:
                self._hash_of.pop(block, None)
                self._free.append(block)

    def match_prefix(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Acquire the longest run of cached blocks whose tokens lead `token_ids`, at most
        max_tokens tokens.
        """
        blocks: list[int] = []
        if not self.enable_prefix_caching:
            return blocks
        digest = ROOT
        for start in range(0, max_tokens - self.block_size + 1, self.block_size):
            digest = self._chain(digest, token_ids[start : start + self.block_size])
            block = self._block_of.get(digest)
            if block is None:
                break
            if self._ref_counts[block] == 0:
                del self._cached[block]
            self._ref_counts[block] += 1
            blocks.append(block)
        return blocks

    def register(
        self, block_table: Sequence[int], token_ids: Sequence[int], num_tokens: int
    ) -> None:
        """Make the full blocks of the first `num_tokens` committed tokens available to later hits.

        The caller passes only tokens whose KV is valid in every model and will not be written
        again.
        """
        if not self.enable_prefix_caching:
            return
        num_full = num_tokens // self.block_size
        first = num_full
        while first > 0 and block_table[first - 1] not in self._hash_of:
            first -= 1
        for i in range(first, num_full):
            parent = self._hash_of[block_table[i - 1]] if i else ROOT
            start = i * self.block_size
            digest = self._chain(parent, token_ids[start : start + self.block_size])
            self._hash_of[block_table[i]] = digest
            self._block_of.setdefault(digest, block_table[i])

    def forget(self, blocks: Sequence[int]) -> None:
        """Drop the hashes of blocks whose content must not be used again (a failed request's)."""
        for block in blocks:
            digest = self._hash_of.pop(block, None)
            if digest is not None and self._block_of.get(digest) == block:
                del self._block_of[digest]
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def shared(self, block: int) -> bool:
        """Whether more than one sequence holds the block."""
        return self._ref_counts[block] > 1

    def check_integrity(self) -> None:
        """Assert that each block is in exactly one state and that both hash maps agree."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free) and not free & cached
        for block, count in enumerate(self._ref_counts):
            assert count >= 0
            assert (count == 0) == (block in free or block in cached), f"block {block} is lost"
        for block in cached:
            assert self._block_of[self._hash_of[block]] == block
        for digest, block in self._block_of.items():
            assert self._hash_of[block] == digest and block not in free

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        return block

    def _chain(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """Hash of a block given its parent's: equal only for equal tokens from the sequence's
        start.
        """
        return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()
