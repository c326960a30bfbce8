"""Triton kernels of paged attention. Importing this module needs the package triton.

FlashAttention-2 (arXiv 2307.08691): online softmax over tiles of keys; in base 2, so that scores
carry a factor log2(e). Flash-Decoding: the keys of a query tile are shared out over splits, whose
partial results a second kernel adds up. Grouped-query heads are packed: packed row r of a sequence
is query r // group in head kv_head * group + r % group, so that keys are read once per K/V head.

What a program reads of a row with `start` cached tokens and q_len new ones:

        keys:    0 ............ start - 1 | start ....... start + q_len - 1
        source:  the cache (block_table)  | the inputs k, v (contiguous)

Programs write the new keys into the cache and none reads them from there, so no order between
programs is needed.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(base, rows, stride, seen, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[N, BLOCK_D]: base + rows [N] int64 * stride. 0 where not seen [N], and past HEAD_DIM."""
    dims = tl.arange(0, BLOCK_D)[None, :]
    inside = seen[:, None] & (dims < HEAD_DIM)
    return tl.load(base + rows[:, None] * stride + dims, mask=inside, other=0.0)


@triton.jit
def store_rows(base, rows, stride, values, seen, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The inverse of load_rows; rows that are not seen stay untouched."""
    dims = tl.arange(0, BLOCK_D)[None, :]
    inside = seen[:, None] & (dims < HEAD_DIM)
    tl.store(base + rows[:, None] * stride + dims, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def append(
    k, v, k_stride, v_stride, k_cache, v_cache, cache_stride, slot_mapping, tokens, mine,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write k, v of tokens [N] int64, where mine [N], at their slots; slot -1 writes nowhere."""
    slots = tl.load(slot_mapping + tokens, mask=mine, other=-1)
    keep = slots >= 0
    keys = load_rows(k, tokens, k_stride, keep, HEAD_DIM, BLOCK_D)
    store_rows(k_cache, slots, cache_stride, keys, keep, HEAD_DIM, BLOCK_D)
    values = load_rows(v, tokens, v_stride, keep, HEAD_DIM, BLOCK_D)
    store_rows(v_cache, slots, cache_stride, values, keep, HEAD_DIM, BLOCK_D)


@triton.jit
def online_softmax(acc, peak, total, q, keys, values, seen, scale, SOFTCAP: tl.constexpr):
    """Take one tile of keys into the running sums.

    Args:
        acc: [M, D] fp32, sum of weights * values, relative to 2 ** peak; total [M]: of weights.
        peak: [M] fp32, the largest score so far, in base 2; -inf at first.
        q: [M, D]; keys, values: [N, D], 0 where hidden from all; seen: [M, N].
        scale: softmax_scale * log2(e), or softmax_scale / SOFTCAP if there is a cap.
    """
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    if SOFTCAP > 0:  # tanh(x) = 1 - 2 / (1 + exp(2 x))
        scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (2 * LOG2_E)))
        scores *= SOFTCAP * LOG2_E
    scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # -inf - -inf is NaN
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return acc, new_peak, total


@triton.jit
def blocks_of(table, tile, start, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The int64 blocks of a tile's keys, one or [BLOCK_N]; 0 behind the `start` cached keys.

    Looked up one tile ahead: loads whose address is another load's result would be pipelined half
    as deep.
    """
    if BLOCK_N <= PAGE:  # the tile lies in one block
        first = tile * BLOCK_N
        return tl.load(table + first // PAGE, mask=first < start, other=0).to(tl.int64)
    else:
        positions = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        return tl.load(table + positions // PAGE, mask=positions < start, other=0).to(tl.int64)


@triton.jit
def attend_cached(
    acc, peak, total, q, at, first_tile, last_tile, start, low, k_cache, v_cache, cache_stride,
    table, scale, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Tiles [first_tile, last_tile) of the `start` cached keys. All of them are before every query
    at [M], so only the window hides any; keys below `low` are hidden from the whole tile.
    """
    block = blocks_of(table, first_tile, start, PAGE, BLOCK_N)
    for tile in range(first_tile, last_tile):
        positions = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        live = (positions < start) & (positions >= low)
        slots = block * PAGE + positions % PAGE
        block = blocks_of(table, tile + 1, start, PAGE, BLOCK_N)
        keys = load_rows(k_cache, slots, cache_stride, live, HEAD_DIM, BLOCK_D)
        values = load_rows(v_cache, slots, cache_stride, live, HEAD_DIM, BLOCK_D)
        seen = live[None, :]
        if WINDOW > 0:
            seen = seen & (positions[None, :] > start + at[:, None] - WINDOW)
        acc, peak, total = online_softmax(acc, peak, total, q, keys, values, seen, scale, SOFTCAP)
    return acc, peak, total


@triton.jit
def attend_new(
    acc, peak, total, q, at, first_tile, last_tile, q_len, first_token, k, v, k_stride, v_stride,
    scale, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    GUARD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Tiles [first_tile, last_tile) of the new keys, from the inputs; query at [M] sees keys up to
    its own.

    GUARD: a value that is not finite (a refused draft's) must not reach queries that do not see it,
    and 0 times it is NaN: it becomes 0, and its key NaN, which reaches those that do. Costs a trip
    through registers; a prompt's tokens are all real.
    """
    for tile in range(first_tile, last_tile):
        places = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        live = places < q_len
        keys = load_rows(k, first_token + places, k_stride, live, HEAD_DIM, BLOCK_D)
        values = load_rows(v, first_token + places, v_stride, live, HEAD_DIM, BLOCK_D)
        if GUARD:
            exact = values.to(tl.float32)
            finite = tl.abs(exact) < float("inf")
            broken = tl.max(tl.where(finite, 0, 1), 1) > 0
            keys = tl.where(broken[:, None], float("nan"), keys.to(tl.float32)).to(keys.dtype)
            values = tl.where(finite, exact, 0.0).to(values.dtype)
        seen = live[None, :] & (places[None, :] <= at[:, None])
        if WINDOW > 0:
            seen = seen & (places[None, :] > at[:, None] - WINDOW)
        acc, peak, total = online_softmax(acc, peak, total, q, keys, values, seen, scale, SOFTCAP)
    return acc, peak, total


@triton.jit
def share_of_split(
    first, q_len, start, split, num_splits,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_NEW: tl.constexpr,
):  # fmt: skip
    """Which tiles a split takes: (low, first and last cached tile, first and last new tile).

    The tiles that the packed rows [first, first + BLOCK_M) can see, the cached ones (of BLOCK_N
    keys) before the new ones (of BLOCK_NEW), are cut into num_splits equal runs; the last ones may
    be empty.
    """
    low = 0
    first_new = 0
    if WINDOW > 0:
        low = tl.maximum(start + first // GROUP - WINDOW + 1, 0)
        first_new = tl.maximum(first // GROUP - WINDOW + 1, 0) // BLOCK_NEW
    last_query = tl.minimum((first + BLOCK_M - 1) // GROUP, q_len - 1)
    first_cached = low // BLOCK_N
    num_cached = tl.maximum(tl.cdiv(start, BLOCK_N) - first_cached, 0)
    num_tiles = num_cached + last_query // BLOCK_NEW + 1 - first_new
    per_split = tl.cdiv(num_tiles, num_splits)
    begin = split * per_split
    end = tl.minimum(begin + per_split, num_tiles)
    cached = first_cached + tl.minimum(begin, num_cached)
    cached_end = first_cached + tl.minimum(end, num_cached)
    new = first_new + tl.maximum(begin - num_cached, 0)
    new_end = first_new + tl.maximum(end - num_cached, 0)
    return low, cached, cached_end, new, new_end


@triton.jit
def query_tile(tiles, tiles_per_row, HAS_TILES: tl.constexpr, BLOCK_M: tl.constexpr):
    """Row and first packed row of this program: from tiles [num_tiles, 2] int32 if HAS_TILES, else
    each row has tiles_per_row tiles.
    """
    tile = tl.program_id(0)
    if HAS_TILES:
        row = tl.load(tiles + 2 * tile)
        first = tl.load(tiles + 2 * tile + 1)
    else:
        row = tile // tiles_per_row
        first = tile % tiles_per_row * BLOCK_M
    return row, first


@triton.jit(do_not_specialize=["table_stride", "tiles_per_row", "num_tokens"])
def attend_kernel(
    q, k, v, k_cache, v_cache, out, lse, slot_mapping, cu_seqlens_q, cache_seqlens, block_table,
    tiles, q_token, q_head, k_token, k_head, v_token, v_head, table_stride, tiles_per_row,
    num_tokens, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SPLIT: tl.constexpr, HAS_TILES: tl.constexpr, GUARD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_NEW: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Append and attend; grid (query tile, K/V head, split).

    Args:
        q [tokens, heads, HEAD_DIM]; k, v [tokens, kv_heads, HEAD_DIM], strides in elements.
        k_cache, v_cache: [blocks, PAGE, kv_heads, HEAD_DIM], contiguous; split 0 writes k, v there.
        out: [tokens, heads, HEAD_DIM]; if SPLIT [splits, tokens, heads, HEAD_DIM] fp32.
        lse: [splits, tokens, heads] fp32, base 2; written if SPLIT, -inf where a split has no key.
        slot_mapping [tokens] int64; cu_seqlens_q [rows + 1], cache_seqlens [rows] int32;
            block_table [rows, table_stride] int32.
        tiles, tiles_per_row: see query_tile.
        WINDOW, SOFTCAP: 0 = none. GUARD: see attend_new; scale: see online_softmax.
    """
    row, first = query_tile(tiles, tiles_per_row, HAS_TILES, BLOCK_M)
    head, split, kv_heads = tl.program_id(1), tl.program_id(2), tl.num_programs(1)
    first_token = tl.load(cu_seqlens_q + row).to(tl.int64)
    q_len = (tl.load(cu_seqlens_q + row + 1) - first_token).to(tl.int32)
    start = tl.load(cache_seqlens + row)
    packed = first + tl.arange(0, BLOCK_M)
    at = packed // GROUP
    mine = at < q_len
    tokens, q_heads = first_token + at, head * GROUP + packed % GROUP
    k, v, cache_stride = k + head * k_head, v + head * v_head, kv_heads * HEAD_DIM
    k_cache, v_cache = k_cache + head * HEAD_DIM, v_cache + head * HEAD_DIM
    if split == 0:
        owner = mine & (packed % GROUP == 0)
        append(k, v, k_token, v_token, k_cache, v_cache, cache_stride, slot_mapping, tokens, owner,
               HEAD_DIM, BLOCK_D)  # fmt: skip
    queries = load_rows(q, tokens * q_token + q_heads * q_head, 1, mine, HEAD_DIM, BLOCK_D)
    num_splits = tl.num_programs(2)
    low, cached, cached_end, new, new_end = share_of_split(
        first, q_len, start, split, num_splits, GROUP, WINDOW, BLOCK_M, BLOCK_N, BLOCK_NEW
    )
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc, peak, total = attend_cached(
        acc, peak, total, queries, at, cached, cached_end, start, low, k_cache, v_cache,
        cache_stride, block_table + row.to(tl.int64) * table_stride, scale,
        HEAD_DIM, PAGE, WINDOW, SOFTCAP, BLOCK_N, BLOCK_D)  # fmt: skip
    acc, peak, total = attend_new(
        acc, peak, total, queries, at, new, new_end, q_len, first_token, k, v, k_token, v_token,
        scale, HEAD_DIM, WINDOW, SOFTCAP, GUARD, BLOCK_NEW, BLOCK_D)  # fmt: skip
    total = tl.where(total == 0, 1.0, total)  # no key: acc is 0 and peak -inf. NaN stays NaN
    rows = tokens * kv_heads * GROUP + q_heads
    if SPLIT:
        rows += split.to(tl.int64) * num_tokens * kv_heads * GROUP
        tl.store(lse + rows, peak + tl.log2(total), mask=mine)
    store_rows(out, rows, HEAD_DIM, acc / total[:, None], mine, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    partial, lse, out, num_splits,
    HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add up the splits of one (token, head); grid (tokens * heads).

    partial [splits, tokens * heads, HEAD_DIM] fp32, lse [splits, tokens * heads] fp32 in base 2 ->
    out [tokens * heads, HEAD_DIM]. BLOCK_S >= num_splits.
    """
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, BLOCK_S)
    rows = splits.to(tl.int64) * tl.num_programs(0) + row
    lses = tl.load(lse + rows, mask=splits < num_splits, other=float("-inf"))
    weights = tl.exp2(lses - tl.max(lses, 0))  # some split has the query's own key
    parts = load_rows(partial, rows, HEAD_DIM, lses != float("-inf"), HEAD_DIM, BLOCK_D)
    mixed = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    dims = tl.arange(0, BLOCK_D)
    tl.store(out + row * HEAD_DIM + dims, mixed.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit(do_not_specialize=["q_len"])
def merge_window_kernel(
    q, k, v, k_cache, v_cache, prefix, prefix_lse, out, slot_mapping, cache_seqlens,
    q_token, q_head, k_token, k_head, v_token, v_head, q_len, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Append, and take the causal part over the q_len new tokens into attention over the cached
    ones; grid (query tile, K/V head, row), rows of equal q_len.

    Args:
        q, k, v, k_cache, v_cache, slot_mapping, cache_seqlens, out: as in attend_kernel.
        prefix: [rows, q_len * GROUP, kv_heads, HEAD_DIM], attention over the cached keys alone.
        prefix_lse: [rows, kv_heads, q_len * GROUP] fp32, its log-sum-exp, natural. Of a row without
            cached keys both are arbitrary.
        scale: softmax_scale * log2(e).
    """
    first, head, row = tl.program_id(0) * BLOCK_M, tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    packed = first + tl.arange(0, BLOCK_M)
    at = packed // GROUP
    mine = at < q_len
    first_token = row.to(tl.int64) * q_len
    tokens, q_heads = first_token + at, head * GROUP + packed % GROUP
    k, v, cache_stride = k + head * k_head, v + head * v_head, kv_heads * HEAD_DIM
    append(k, v, k_token, v_token, k_cache + head * HEAD_DIM, v_cache + head * HEAD_DIM,
           cache_stride, slot_mapping, tokens, mine & (packed % GROUP == 0),
           HEAD_DIM, BLOCK_D)  # fmt: skip
    queries = load_rows(q, tokens * q_token + q_heads * q_head, 1, mine, HEAD_DIM, BLOCK_D)
    known = mine & (tl.load(cache_seqlens + row) > 0)
    folded = row.to(tl.int64) * q_len * GROUP  # packed rows before this sequence's
    lse = tl.load(
        prefix_lse + folded * kv_heads + head * q_len * GROUP + packed,
        mask=known, other=float("-inf"))  # fmt: skip
    acc = load_rows(prefix, (folded + packed) * kv_heads + head, HEAD_DIM, known,
                    HEAD_DIM, BLOCK_D).to(tl.float32)  # fmt: skip
    last_query = tl.minimum((first + BLOCK_M - 1) // GROUP, q_len - 1)
    acc, _, total = attend_new(
        acc, lse * LOG2_E, tl.where(known, 1.0, 0.0), queries, at, 0, last_query // BLOCK_N + 1,
        q_len, first_token, k, v, k_token, v_token, scale,
        HEAD_DIM, 0, 0, True, BLOCK_N, BLOCK_D)  # fmt: skip
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    store_rows(out, tokens * kv_heads * GROUP + q_heads, HEAD_DIM, acc, mine, HEAD_DIM, BLOCK_D)
