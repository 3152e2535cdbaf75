"""Exact support as two Triton kernels: a scan of the keys, and a selection that reads few scores.

The scan multiplies a tile of keys with all the queries that share a key-value head, and writes the
scores and the largest score of every block of `block_tokens` keys.

The selection rests on this: ranked by largest score, ties to the lower block, the first K blocks
hold the K best keys. (Let a key lie in another block. Each of the K blocks has a key that scores
higher, or that scores the same and comes earlier.) So the K-th largest of the blocks' largest
scores is a certified lower bound of the K-th score; only K blocks are read again, the keys in them
that reach the bound are few, and an exact selection among those is cheap. Nothing is sorted.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.select.triton import pad_support
from pallas_kernels.triton_lib import (
    LAST,
    NOTHING,
    Array,
    Ref,
    barrier,
    call,
    check,
    count_pair,
    finite_scores,
    key_score,
    largest_threshold,
    load_at,
    order_key,
    pick,
    round_up,
    store_at,
)

_MOST_BLOCKS = 8192
_CHUNK = 2048
_FILTERED = 8192


def block_tokens(stored: int) -> int:
    """Keys of a block, a power of two: few blocks, and few keys in K of them."""
    return max(8, round_up(-(-stored // _MOST_BLOCKS)))


def spare_blocks(budget: int) -> int:
    """How many more than K blocks a selection may read again, to end its search sooner."""
    return max(1, budget // 8)


class Scan(NamedTuple):
    """How a scan is split over programs.

    Attributes:
        tile: keys that a program multiplies at a time.
        tiles: tiles of a program.
        programs: programs of a key-value head.
        warps: of a program.
        stages: of the pipeline that loads tiles.
    """

    tile: int
    tiles: int
    programs: int
    warps: int
    stages: int

    @classmethod
    def of(cls, groups: int, each: int, stored: int, dim: int, dtype: jnp.dtype) -> "Scan":
        """Enough programs to fill a GPU several times, if the keys are enough.

        Args:
            groups: key-value heads of all rows.
            each: queries of a key-value head.
            stored: S.
            dim: D.
            dtype: of the keys.
        """
        held = 32768 // (round_up(dim) * dtype.itemsize)
        tile = max(block_tokens(stored), min(128, max(16, held)))
        tiles = max(1, min(16, groups * stored // (tile * 1024)))
        return cls(tile, tiles, -(-stored // (tile * tiles)), 4 if each <= 16 else 8, 3)


def scan_keys(
    q_ref: Ref,  # [BH, D]
    keys_ref: Ref,  # [BG, S, D]
    lengths_ref: Ref,  # [BH]
    scores_ref: Ref,  # [BH, S]
    highest_ref: Ref,  # [BH, S / block]
    group: Array,
    program: Array,
    split: Scan,
) -> None:
    """Scores of a program's tiles for the queries of one key-value head, each up to its length."""
    dim = q_ref.shape[1]
    tile, tiles = split.tile, split.tiles
    groups, stored, _ = keys_ref.shape
    block = block_tokens(stored)
    each = q_ref.shape[0] // groups
    lane = lax.iota(jnp.int32, max(16, round_up(each)))
    rows = group * each + lane
    d = lax.iota(jnp.int32, round_up(dim))
    lengths = load_at(lengths_ref, rows, mask=lane < each, other=0)
    longest = jnp.max(lengths)
    start = program * (tile * tiles)

    @pl.when(longest > start)
    def _() -> None:
        q = load_at(
            q_ref,
            rows[:, None],
            d[None, :],
            mask=(lane < each)[:, None] & (d < dim)[None, :],
            other=0.0,
        )
        dtype = jnp.promote_types(q_ref.dtype, keys_ref.dtype)
        q = q.astype(dtype)
        precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None  # no TF32

        def body(i: Array, carry: Array) -> Array:
            first = start + i * tile
            token = first + lax.iota(jnp.int32, tile)
            mask = None
            if stored % tile or round_up(dim) != dim:
                mask = (token < stored)[:, None] & (d < dim)[None, :]
            keys = load_at(
                keys_ref,
                group,
                token[:, None],
                d[None, :],
                mask=mask,
                other=None if mask is None else 0.0,
            )
            dots = plt.dot(q, keys.astype(dtype).T, precision=precision)
            scores = finite_scores(dots, dim**-0.5, token[None, :] < lengths[:, None])
            wanted = (lengths > first)[:, None]
            store_at(
                scores_ref,
                scores,
                rows[:, None],
                token[None, :],
                mask=wanted & (token < stored)[None, :] if stored % tile else wanted,
            )
            highest = jnp.max(scores.reshape(lane.shape[0], tile // block, block), axis=2)
            at = program * (tile * tiles // block) + i * (tile // block)
            at += lax.iota(jnp.int32, tile // block)
            store_at(
                highest_ref,
                highest,
                rows[:, None],
                at[None, :],
                mask=wanted & (at < highest_ref.shape[1])[None, :],
            )
            return carry

        left = (longest - start + (tile - 1)) // tile
        lax.fori_loop(0, jnp.minimum(tiles, left), body, jnp.int32(0))


def select_blocks(
    all_scores_ref: Ref,  # [BH, S]
    highest_ref: Ref,  # [BH, S / block]
    blocks_ref: Ref,  # [BH, K + spare] scratch
    tokens_ref: Ref,  # [BH, M] scratch
    keys_ref: Ref,  # [BH, M] scratch
    support_ref: Ref,  # [BH, K]
    scores_ref: Ref,  # [BH, K]
    row: Array,
    length: Array,
) -> None:
    """Exact top-K of one head from what `scan_keys` wrote."""
    budget = support_ref.shape[1]
    number = highest_ref.shape[1]
    block = block_tokens(all_scores_ref.shape[1])

    lane = lax.iota(jnp.int32, round_up(number))
    highest = load_at(
        highest_ref, row, lane, mask=lane < (length + (block - 1)) // block, other=-float("inf")
    )
    highest = order_key(highest)
    (chosen,), found = pick([highest], budget, spare_blocks(budget))
    bound = jnp.min(jnp.where(chosen, highest, LAST))
    bound = jnp.where(found < budget, NOTHING + 1, bound)
    place = jnp.where(chosen, jnp.cumsum(jnp.where(chosen, 1, 0)) - 1, LAST)
    store_at(blocks_ref, lane, row, place, mask=chosen)
    barrier()

    chunk = max(block, min(_FILTERED, round_up(budget * block)))
    lane = lax.iota(jnp.int32, chunk)

    def keep(i: Array, kept: Array) -> Array:
        position = i * chunk + lane
        inside = position < found * block
        token = load_at(blocks_ref, row, position // block, mask=inside, other=0) * block
        token += position % block
        inside &= token < length
        score = load_at(all_scores_ref, row, token, mask=inside, other=-float("inf"))
        key = order_key(score)
        reach = key >= bound
        ones = jnp.where(reach, 1, 0)
        place = kept + jnp.cumsum(ones) - 1
        store_at(tokens_ref, token, row, place, mask=reach)
        store_at(keys_ref, key, row, place, mask=reach)
        return kept + jnp.sum(ones)

    kept = lax.fori_loop(0, (found * block + (chunk - 1)) // chunk, keep, jnp.int32(0))
    barrier()

    lane = lax.iota(jnp.int32, _CHUNK)
    chunks = (kept + (_CHUNK - 1)) // _CHUNK

    def load_keys(i: Array) -> Array:
        position = i * _CHUNK + lane
        return load_at(keys_ref, row, position, mask=position < kept, other=NOTHING)

    def in_registers() -> tuple[Array, Array]:
        keys = load_keys(jnp.int32(0))
        top = jnp.max(keys) + 1
        return largest_threshold(
            lambda first, second: count_pair([keys], first, second), bound, kept, top, budget
        )

    def in_chunks() -> tuple[Array, Array]:
        def count(first: Array, second: Array) -> tuple[Array, Array]:
            def add(i: Array, counts: tuple[Array, Array]) -> tuple[Array, Array]:
                one, two = count_pair([load_keys(i)], first, second)
                return counts[0] + one, counts[1] + two

            return lax.fori_loop(0, chunks, add, (jnp.int32(0), jnp.int32(0)))

        top = lax.fori_loop(
            0, chunks, lambda i, top: jnp.maximum(top, jnp.max(load_keys(i))), jnp.int32(NOTHING)
        )
        return largest_threshold(count, bound, kept, top + 1, budget)

    threshold, reached = lax.cond(kept <= _CHUNK, in_registers, in_chunks)

    above = lax.fori_loop(
        0,
        jnp.where(reached > budget, chunks, 0),
        lambda i, above: above + jnp.sum(jnp.where(load_keys(i) > threshold, 1, 0)),
        jnp.int32(0),
    )
    room = jnp.where(reached > budget, budget - above, LAST)

    def emit(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        written, ties = carry
        key = load_keys(i)
        token = load_at(tokens_ref, row, i * _CHUNK + lane, mask=key > NOTHING, other=0)
        tied = jnp.where(key == threshold, 1, 0)
        mask = (key > threshold) | ((tied > 0) & (ties + jnp.cumsum(tied) <= room))
        ones = jnp.where(mask, 1, 0)
        place = jnp.where(mask, written + jnp.cumsum(ones) - 1, budget + lane)
        store_at(support_ref, token, row, place, mask=mask)
        store_at(scores_ref, key_score(key), row, place, mask=mask)
        return written + jnp.sum(ones), ties + jnp.sum(tied)

    written, _ = lax.fori_loop(0, chunks, emit, (jnp.int32(0), jnp.int32(0)))
    pad_support(support_ref, scores_ref, row, written)


def scan_outputs(rows: int, stored: int) -> list[jax.ShapeDtypeStruct]:
    """What `scan_keys` writes."""
    blocks = -(-stored // block_tokens(stored))
    return [
        jax.ShapeDtypeStruct((rows, stored), jnp.float32),
        jax.ShapeDtypeStruct((rows, blocks), jnp.float32),
    ]


def select_scratch(rows: int, stored: int, budget: int) -> list[jax.ShapeDtypeStruct]:
    """What `select_blocks` works in."""
    block = block_tokens(stored)
    blocks = budget + spare_blocks(budget)
    most = min(blocks, -(-stored // block)) * block
    return [
        jax.ShapeDtypeStruct((rows, blocks), jnp.int32),
        jax.ShapeDtypeStruct((rows, most), jnp.int32),
        jax.ShapeDtypeStruct((rows, most), jnp.int32),
    ]


def check_scan(dim: int, each: int, stored: int) -> None:
    """Raises NotImplementedError for sizes that the kernels do not hold."""
    check(dim <= 256, "up to 256 dimensions")
    check(each <= 64, "up to 64 queries a key-value head")
    check(block_tokens(stored) <= 128, "up to 1,048,576 stored tokens")


SELECT_WARPS = 8


def exact_rows(
    q: jax.Array, keys: jax.Array, lengths: jax.Array, *, budget: int
) -> tuple[jax.Array, jax.Array]:
    """Exact top-K of queries that each see a prefix of the keys.

    Args:
        q: ``[BH, D]``; the queries of a key-value head follow each other.
        keys: ``[BG, S, D]``.
        lengths: int32 ``[BH]``, keys that a query sees; 0 costs nothing.
        budget: K.

    Returns:
        Support and scores, ``[BH, K]``.
    """
    rows, dim = q.shape
    groups, stored, _ = keys.shape
    check_scan(dim, rows // groups, stored)
    split = Scan.of(groups, rows // groups, stored, dim, keys.dtype)

    def scan(
        q_ref: Ref,  # [BH, D]
        keys_ref: Ref,  # [BG, S, D]
        lengths_ref: Ref,  # [BH]
        scores_ref: Ref,  # [BH, S]
        highest_ref: Ref,  # [BH, S / block]
    ) -> None:
        scan_keys(
            q_ref,
            keys_ref,
            lengths_ref,
            scores_ref,
            highest_ref,
            pl.program_id(0),
            pl.program_id(1),
            split,
        )

    def select(
        all_scores_ref: Ref,  # [BH, S]
        highest_ref: Ref,  # [BH, S / block]
        lengths_ref: Ref,  # [BH]
        support_ref: Ref,  # [BH, K]
        scores_ref: Ref,  # [BH, K]
        blocks_ref: Ref,  # [BH, K + spare] scratch
        tokens_ref: Ref,  # [BH, M] scratch
        candidate_keys_ref: Ref,  # [BH, M] scratch
    ) -> None:
        row = pl.program_id(0)
        length = lengths_ref[row]

        @pl.when(length > 0)
        def _() -> None:
            select_blocks(
                all_scores_ref,
                highest_ref,
                blocks_ref,
                tokens_ref,
                candidate_keys_ref,
                support_ref,
                scores_ref,
                row,
                length,
            )

        @pl.when(length <= 0)
        def _() -> None:
            pad_support(support_ref, scores_ref, row, jnp.int32(0))

    scores, highest = call(
        scan,
        name="exact_scan",
        grid=(groups, split.programs),
        outputs=scan_outputs(rows, stored),
        warps=split.warps,
        stages=split.stages,
    )(q, keys, lengths)
    support, kept, *_ = call(
        select,
        name="exact_select",
        grid=(rows,),
        outputs=[
            jax.ShapeDtypeStruct((rows, budget), jnp.int32),
            jax.ShapeDtypeStruct((rows, budget), jnp.float32),
            *select_scratch(rows, stored, budget),
        ],
        warps=SELECT_WARPS,
    )(scores, highest, lengths)
    return support, kept


def exact_support(
    q: jax.Array, keys: jax.Array, lengths: jax.Array, wanted: jax.Array, *, budget: int
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.exact_support.exact_support`."""
    batch, heads, dim = q.shape
    groups, stored = keys.shape[1:3]
    visible = jnp.where(wanted, lengths[:, None], 0)
    support, scores = exact_rows(
        q.reshape(batch * heads, dim),
        keys.reshape(batch * groups, stored, dim),
        visible.reshape(batch * heads),
        budget=budget,
    )
    return support.reshape(batch, heads, budget), scores.reshape(batch, heads, budget)
