"""Exact support as three Triton kernels: nothing is sorted, and few scores are read twice.

1. The scan multiplies tiles of keys with all the queries that share a key-value head. It writes
   the scores, and the largest score of every block of keys.
2. The filter finds a score that the largest scores of at least K blocks reach, by counting. At
   least K keys reach it, so it is a lower bound of the K-th score. Programs split the keys and
   list those that reach it: some more than K.
3. The selection finds the K-th score among those listed, by counting, and keeps what reaches it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.select.triton import pad_support, write_picked
from pallas_kernels.triton_lib import (
    INFINITE,
    LAST,
    NOTHING,
    Array,
    Ref,
    barrier,
    call,
    check,
    count_pair,
    finite_scores,
    load_at,
    order_key,
    round_up,
    store_at,
    threshold_of,
    threshold_within,
)

_FILTERED = 1024
"""Keys that a program of the filter holds."""
_FILTERS = 1024
"""Programs of the filter that fill a GPU; a row has four at least."""
_SURVIVORS = 2048
"""Listed keys that a selection holds in registers."""
_CHUNK = 128
"""Listed keys that it reads at a time, again and again, when there are more."""


def _blocks(budget: int) -> int:
    """Blocks of keys whose largest scores make a tight bound."""
    return max(1024, 2 * round_up(budget))


def _stretch(rows: int, stored: int) -> int:
    """Keys that a program of the filter reads."""
    return max(_FILTERED, round_up(-(-stored // max(4, _FILTERS // rows))))


class Scan(NamedTuple):
    """How a scan and its filter are split over programs.

    Attributes:
        block: keys that share a largest score.
        merged: blocks that the filter takes as one.
        tile: keys that a program multiplies at a time.
        tiles: tiles of a program.
        programs: programs of a key-value head.
        warps: of a program.
        stages: of the pipeline that loads tiles.
        stretch: keys that a program of the filter reads.
        stretches: programs of the filter for a query.
    """

    block: int
    merged: int
    tile: int
    tiles: int
    programs: int
    warps: int
    stages: int
    stretch: int
    stretches: int

    @classmethod
    def of(
        cls, groups: int, each: int, stored: int, dim: int, dtype: jnp.dtype, budget: int
    ) -> "Scan":
        """Enough programs to fill a GPU several times, if the keys are enough.

        Args:
            groups: key-value heads of all rows.
            each: queries of a key-value head.
            stored: S.
            dim: D.
            dtype: of the keys.
            budget: K.
        """
        check(dim <= 256, "up to 256 dimensions")
        check(each <= 64, "up to 64 queries a key-value head")
        wide = max(8, round_up(-(-stored // _blocks(budget))))
        block = min(32, wide)  # in the scan: held by one warp
        check(-(-stored // block) <= 2**15, "up to 1,048,576 stored tokens")
        held = 16384 // (round_up(dim) * dtype.itemsize)
        tile = max(block, min(64, max(16, held)))
        tiles = max(1, min(16, groups * stored // (tile * 1024)))
        stretch = _stretch(groups * each, stored)
        return cls(
            block=block,
            merged=min(8, wide // block),
            tile=tile,
            tiles=tiles,
            programs=-(-stored // (tile * tiles)),
            warps=4 if each <= 16 else 8,
            stages=3,
            stretch=stretch,
            stretches=-(-stored // stretch),
        )

    @classmethod
    def of_scores(cls, rows: int, stored: int, budget: int) -> "Scan":
        """The filter's part, for ``rows`` of ``stored`` scores that are there already."""
        stretch = _stretch(rows, stored)
        return cls(
            block=max(8, round_up(-(-stored // _blocks(budget)))),
            merged=1,
            tile=0,
            tiles=0,
            programs=0,
            warps=0,
            stages=0,
            stretch=stretch,
            stretches=-(-stored // stretch),
        )

    def outputs(self, rows: int, stored: int) -> list[jax.ShapeDtypeStruct]:
        """What `scan_keys` writes: scores, and the largest of every block."""
        return [
            jax.ShapeDtypeStruct((rows, stored), jnp.float32),
            jax.ShapeDtypeStruct((rows, -(-stored // self.block)), jnp.float32),
        ]

    def lists(self, rows: int) -> list[jax.ShapeDtypeStruct]:
        """What `filter_keys` writes: tokens of every stretch, and their numbers."""
        return [
            jax.ShapeDtypeStruct((rows, self.stretches * self.stretch), jnp.int32),
            jax.ShapeDtypeStruct((rows, self.stretches), jnp.int32),
        ]


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
    block = split.block
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


def filter_keys(
    all_scores_ref: Ref,  # [BH, S]
    highest_ref: Ref,  # [BH, S / block]
    tokens_ref: Ref,  # [BH, P * stretch]
    counts_ref: Ref,  # [BH, P]
    row: Array,
    program: Array,
    length: Array,
    split: Scan,
    budget: int,
) -> None:
    """Lists the keys of one stretch that may be among the K best of one query."""
    start = program * split.stretch

    @pl.when(start >= length)
    def _() -> None:
        counts_ref[row, program] = 0

    @pl.when(start < length)
    def _() -> None:
        lane = lax.iota(jnp.int32, max(1, round_up(highest_ref.shape[1]) // split.merged))
        known = (length + (split.block - 1)) // split.block
        highest = jnp.full(lane.shape, -float("inf"), jnp.float32)
        for i in range(split.merged):  # in threads' own registers, unlike a reduction of an axis
            at = lane * split.merged + i
            part = load_at(highest_ref, row, at, mask=at < known, other=-float("inf"))
            highest = jnp.maximum(highest, part)
        bound, reached = threshold_of(order_key(highest), budget, spare=max(1, budget // 4))
        bound = jnp.where(reached < budget, NOTHING + 1, bound)

        def keep(i: Array, kept: Array) -> Array:
            token = start + i * _FILTERED + lax.iota(jnp.int32, _FILTERED)
            score = load_at(all_scores_ref, row, token, mask=token < length, other=-float("inf"))
            reach = order_key(score) >= bound
            ones = jnp.where(reach, 1, 0)
            place = start + kept + jnp.cumsum(ones) - 1
            store_at(tokens_ref, token, row, place, mask=reach)
            return kept + jnp.sum(ones)

        counts_ref[row, program] = lax.fori_loop(0, split.stretch // _FILTERED, keep, jnp.int32(0))


def select_listed(
    all_scores_ref: Ref,  # [BH, S]
    tokens_ref: Ref,  # [BH, P * stretch]
    counts_ref: Ref,  # [BH, P]
    starts_ref: Ref,  # [BH, P] scratch
    support_ref: Ref,  # [BH, K]
    scores_ref: Ref,  # [BH, K]
    row: Array,
    split: Scan,
) -> None:
    """Exact top-K of one query among the keys that `filter_keys` listed."""
    budget = support_ref.shape[1]
    stretches = round_up(split.stretches)
    part = lax.iota(jnp.int32, stretches)
    inside = part < split.stretches
    counts = load_at(counts_ref, row, part, mask=inside, other=0)
    listed = jnp.sum(counts)
    store_at(starts_ref, jnp.cumsum(counts) - counts, row, part, mask=inside)
    barrier()

    def load(i: Array, size: int) -> tuple[Array, Array]:
        """Tokens and scores of the i-th part of the concatenated lists."""
        position = i * size + lax.iota(jnp.int32, size)
        stretch = jnp.zeros(position.shape, jnp.int32)
        step = stretches // 2
        while step:
            ahead = stretch + step
            start = load_at(starts_ref, row, ahead, mask=ahead < split.stretches, other=LAST)
            stretch = jnp.where(start <= position, ahead, stretch)
            step //= 2
        there = position < listed
        offset = position - load_at(starts_ref, row, stretch)
        place = stretch * split.stretch + offset
        token = load_at(tokens_ref, row, place, mask=there, other=0)
        score = load_at(all_scores_ref, row, token, mask=there, other=-float("inf"))
        return token, score

    @pl.when(listed <= _SURVIVORS)
    def _() -> None:
        token, score = load(jnp.int32(0), _SURVIVORS)
        write_picked(token, score, support_ref, scores_ref, row)

    @pl.when(listed > _SURVIVORS)
    def _() -> None:
        parts = (listed + (_CHUNK - 1)) // _CHUNK

        def count(first: Array, second: Array) -> tuple[Array, Array]:
            def add(i: Array, counts: tuple[Array, Array]) -> tuple[Array, Array]:
                one, two = count_pair(order_key(load(i, _CHUNK)[1]), first, second)
                return counts[0] + one, counts[1] + two

            return lax.fori_loop(0, parts, add, (jnp.int32(0), jnp.int32(0)))

        def widen(i: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            key = order_key(load(i, _CHUNK)[1])
            lowest = jnp.min(jnp.where(key > NOTHING, key, LAST))
            highest = jnp.max(jnp.where(key < INFINITE, key, NOTHING))
            return jnp.minimum(bounds[0], lowest), jnp.maximum(bounds[1], highest)

        low, highest = lax.fori_loop(0, parts, widen, (jnp.int32(LAST), jnp.int32(NOTHING)))
        infinite, _ = count(jnp.int32(INFINITE), jnp.int32(INFINITE))
        threshold, reached = threshold_within(count, low, listed, highest, infinite, budget)
        above, _ = count(threshold + 1, threshold + 1)
        room = jnp.where(reached > budget, budget - above, LAST)

        def emit(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            written, ties = carry
            token, score = load(i, _CHUNK)
            key = order_key(score)
            tied = jnp.where(key == threshold, 1, 0)
            mask = (key > threshold) | ((tied > 0) & (ties + jnp.cumsum(tied) <= room))
            ones = jnp.where(mask, 1, 0)
            place = written + jnp.cumsum(ones) - 1
            store_at(support_ref, token, row, place, mask=mask)
            store_at(scores_ref, score, row, place, mask=mask)
            return written + jnp.sum(ones), ties + jnp.sum(tied)

        written, _ = lax.fori_loop(0, parts, emit, (jnp.int32(0), jnp.int32(0)))
        pad_support(support_ref, scores_ref, row, written)


FILTER_WARPS = 4
SELECT_WARPS = 8


def run_scan(
    q: jax.Array, keys: jax.Array, lengths: jax.Array, split: Scan
) -> tuple[jax.Array, jax.Array]:
    """Scores ``[BH, S]`` and largest scores ``[BH, S / block]``, as `scan_keys` writes them."""
    groups = keys.shape[0]

    def kernel(
        q_ref: Ref,  # [BH, D]
        keys_ref: Ref,  # [BG, S, D]
        lengths_ref: Ref,  # [BH]
        scores_ref: Ref,  # [BH, S]
        highest_ref: Ref,  # [BH, S / block]
    ) -> None:
        group, program = pl.program_id(0), pl.program_id(1)
        scan_keys(q_ref, keys_ref, lengths_ref, scores_ref, highest_ref, group, program, split)

    return call(
        kernel,
        name="exact_scan",
        grid=(groups, split.programs),
        outputs=split.outputs(q.shape[0], keys.shape[1]),
        warps=split.warps,
        stages=split.stages,
    )(q, keys, lengths)


def run_filter(
    scores: jax.Array, highest: jax.Array, lengths: jax.Array, split: Scan, budget: int
) -> tuple[jax.Array, jax.Array]:
    """Tokens ``[BH, P * stretch]`` and their numbers ``[BH, P]``, as `filter_keys` writes them."""
    rows = lengths.shape[0]

    def kernel(
        all_scores_ref: Ref,  # [BH, S]
        highest_ref: Ref,  # [BH, S / block]
        lengths_ref: Ref,  # [BH]
        tokens_ref: Ref,  # [BH, P * stretch]
        counts_ref: Ref,  # [BH, P]
    ) -> None:
        row, program = pl.program_id(0), pl.program_id(1)
        length = lengths_ref[row]
        filter_keys(
            all_scores_ref,
            highest_ref,
            tokens_ref,
            counts_ref,
            row,
            program,
            length,
            split,
            budget,
        )

    return call(
        kernel,
        name="exact_filter",
        grid=(rows, split.stretches),
        outputs=split.lists(rows),
        warps=FILTER_WARPS,
    )(scores, highest, lengths)


def run_select(
    scores: jax.Array,
    tokens: jax.Array,
    counts: jax.Array,
    lengths: jax.Array,
    split: Scan,
    budget: int,
) -> tuple[jax.Array, jax.Array]:
    """Support and scores ``[BH, K]``, as `select_listed` writes them; none for length 0."""
    rows = lengths.shape[0]

    def kernel(
        all_scores_ref: Ref,  # [BH, S]
        tokens_ref: Ref,  # [BH, P * stretch]
        counts_ref: Ref,  # [BH, P]
        lengths_ref: Ref,  # [BH]
        support_ref: Ref,  # [BH, K]
        scores_ref: Ref,  # [BH, K]
        starts_ref: Ref,  # [BH, P] scratch
    ) -> None:
        row = pl.program_id(0)
        length = lengths_ref[row]

        @pl.when(length > 0)
        def _() -> None:
            select_listed(
                all_scores_ref,
                tokens_ref,
                counts_ref,
                starts_ref,
                support_ref,
                scores_ref,
                row,
                split,
            )

        @pl.when(length <= 0)
        def _() -> None:
            pad_support(support_ref, scores_ref, row, jnp.int32(0))

    support, kept, _ = call(
        kernel,
        name="exact_select",
        grid=(rows,),
        outputs=[
            jax.ShapeDtypeStruct((rows, budget), jnp.int32),
            jax.ShapeDtypeStruct((rows, budget), jnp.float32),
            jax.ShapeDtypeStruct((rows, split.stretches), jnp.int32),
        ],
        warps=SELECT_WARPS,
    )(scores, tokens, counts, lengths)
    return support, kept


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
    split = Scan.of(groups, rows // groups, stored, dim, keys.dtype, budget)
    scores, highest = run_scan(q, keys, lengths, split)
    tokens, counts = run_filter(scores, highest, lengths, split, budget)
    return run_select(scores, tokens, counts, lengths, split, budget)


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
