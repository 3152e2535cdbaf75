"""Exact support as four Triton kernels: nothing is sorted, and few scores are read twice.

1. The scan multiplies tiles of keys with all the queries that share a key-value head. It writes
   the scores, and the largest of keys that lie far from each other: neighbours often score alike.
2. Keys are in sets. The bound is a score that the largest scores of at least K sets reach, found by
   counting. At least K keys reach it, so it is a lower bound of the K-th score.
3. The filter lists the keys that reach the bound, some more than K, and their scores.
4. The selection finds the K-th score among those listed, by counting, and keeps what reaches it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.select.triton import Destination, Listing, Shortlist, write_picked
from pallas_kernels.sparse_attend.triton import at_once
from pallas_kernels.triton_lib import (
    LAST,
    LOWEST,
    Array,
    Bracket,
    Ref,
    barrier,
    call,
    check,
    count_reaching,
    extent,
    finite_scores,
    load_at,
    narrow,
    narrow_among,
    probes_for,
    round_up,
    store_at,
    warps_for,
)

_FILTERED = 4096
"""Scores that a program of the filter holds."""
_COPIED = 128
"""Scores that a program of the filter lists at a time."""
_STRETCH = 16 * _FILTERED
"""Scores that a program of the filter reads at most."""
_FILTERS = 1024
"""Programs of the filter that fill a GPU; a row has four at least."""
SCAN_PROGRAMS = 512
"""Programs of the scan that fill a GPU."""
_MANY_PROGRAMS = 2048
"""Programs of the scan of very many keys: their ends are a smaller part of their time."""
MOST_PROGRAMS = 1024
"""Programs of the scan for a key-value head, unless a tight bound needs more."""
_SURVIVORS = 2048
"""Listed keys that a selection holds; it reads more in parts of that size, again and again."""
_PARTS = 16
"""Parts of the lists of which a selection finds the right one with reads that do not wait."""
_BOUNDED = 8192
"""Largest scores that a program of the bound reads at a time."""


def sets_of(budget: int) -> int:
    """Sets of keys whose largest scores make a tight bound of the K-th score."""
    return min(2**14, max(1024, 4 * round_up(budget)))


def _stretch(rows: int, stored: int) -> int:
    """Keys that a program of the filter reads: a power of two, or as many times `_FILTERED`."""
    stretch = -(-stored // max(4, _FILTERS // rows))
    if stretch <= _FILTERED:
        return max(min(1024, _FILTERED), round_up(stretch))
    return min(_STRETCH, -(-stretch // _FILTERED) * _FILTERED)


class Scan(NamedTuple):
    """How a scan, its bound and its filter are split over programs.

    Attributes:
        tile: keys that a program multiplies at a time.
        tiles: tiles of a program, each as far from the next as all programs reach.
        programs: programs of a key-value head.
        warps: of a program.
        stages: of the pipeline that loads tiles.
        sets: of keys, for the bound.
        stretch: keys that a program of the filter reads.
        stretches: programs of the filter for a query.
        kept: listed keys that the selection holds.
    """

    tile: int
    tiles: int
    programs: int
    warps: int
    stages: int
    sets: int
    stretch: int
    stretches: int
    kept: int

    @classmethod
    def of(
        cls,
        groups: int,
        each: int,
        stored: int,
        dim: int,
        dtype: jnp.dtype,
        budget: int,
        *,
        programs: int = SCAN_PROGRAMS,
    ) -> "Scan":
        """Enough programs to fill a GPU, if the keys are enough.

        Args:
            groups: key-value heads of all rows.
            each: queries of a key-value head.
            stored: S.
            dim: D.
            dtype: of the keys.
            budget: K.
            programs: of the scan, about so many; more where keys are very many.
        """
        check(dim <= 256, "up to 256 dimensions")
        check(each <= 64, "up to 64 queries a key-value head")
        tile = min(64, max(16, 16384 // (round_up(dim) * dtype.itemsize)))
        tiles = groups * stored // (tile * programs)
        if tiles > 16:
            tiles = max(16, tiles * programs // _MANY_PROGRAMS)
        tiles = max(2, tiles, -(-stored // (tile * MOST_PROGRAMS)))
        tiles = max(1, min(tiles, stored // sets_of(budget)))
        programs = -(-stored // (tile * tiles))
        split = cls.of_scores(groups * each, stored, budget, tile, programs)
        return split._replace(tiles=tiles, warps=4 if each <= 16 else 8, stages=3)

    @classmethod
    def of_scores(cls, rows: int, stored: int, budget: int, tile: int, programs: int) -> "Scan":
        """What follows a scan, for ``rows`` of ``stored`` scores.

        Args:
            rows: queries.
            stored: S.
            budget: K.
            tile: largest scores of a program.
            programs: of a query.
        """
        check(stored <= 2**24, "up to 16,777,216 stored tokens")
        stretch = _stretch(rows, stored)
        kept = max(_SURVIVORS, 2 * round_up(budget))
        check(kept < 2**15, "up to 8,192 tokens kept")
        return cls(
            tile=tile,
            tiles=1,
            programs=programs,
            warps=0,
            stages=0,
            sets=min(sets_of(budget), round_up(programs * tile)),
            stretch=stretch,
            stretches=-(-stored // stretch),
            kept=kept,
        )

    @property
    def reach(self) -> int:
        """Keys from a tile of a program to its next; as many largest scores has a query."""
        return self.programs * self.tile

    def used(self, length: Array) -> Array:
        """Programs that scan for a query of some length; their largest scores are known."""
        return jnp.minimum((length + (self.tile - 1)) // self.tile, self.programs)

    def outputs(self, rows: int, stored: int) -> list[jax.ShapeDtypeStruct]:
        """What `scan_keys` writes: scores, and the largest of keys `reach` apart."""
        return [
            jax.ShapeDtypeStruct((rows, stored), jnp.float32),
            jax.ShapeDtypeStruct((rows, self.reach), jnp.float32),
        ]

    def lists(self, rows: int) -> "Listed":
        """What `filter_keys` writes."""
        return Listed(
            jax.ShapeDtypeStruct((rows, 2, self.stretches * self.stretch), jnp.int32),
            jax.ShapeDtypeStruct((rows, self.stretches), jnp.int32),
        )


class Listed(NamedTuple):
    """Keys that may be among the K best of a query, by stretch; arrays or refs.

    Attributes:
        keys: int32 ``[BH, 2, P * stretch]``, tokens and the bits of their float32 scores.
        counts: int32 ``[BH, P]``, keys listed of every stretch.
    """

    keys: Any
    counts: Any


def group_lanes(each: int) -> Array:
    """Lanes for the queries of a key-value head, as many as a product needs at least."""
    return lax.iota(jnp.int32, max(16, round_up(each)))


def scan_keys(
    q_ref: Ref,  # [BH, D]
    keys_ref: Ref,  # [BG, S, D]
    scores_ref: Ref,  # [BH, S]
    highest_ref: Ref,  # [BH, reach]
    group: Array,
    program: Array,
    lengths: Array,
    split: Scan,
) -> None:
    """Scores of a program's tiles for the queries of one key-value head, each up to its length.

    Args:
        q_ref: queries.
        keys_ref: keys.
        scores_ref: to write.
        highest_ref: to write.
        group: key-value head, over all rows.
        program: of the key-value head.
        lengths: int32, of `group_lanes`, keys that a query sees.
        split: how.
    """
    dim = q_ref.shape[1]
    tile = split.tile
    groups, stored, _ = keys_ref.shape
    each = q_ref.shape[0] // groups
    lane = group_lanes(each)
    rows = group * each + lane
    d = lax.iota(jnp.int32, round_up(dim))
    longest = jnp.max(lengths)
    start = program * tile
    k = lax.iota(jnp.int32, tile)

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

        def body(i: Array, highest: Array) -> Array:
            first = start + i * split.reach
            token = first + k
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
            return jnp.maximum(highest, scores)

        none = jnp.full((lane.shape[0], tile), -float("inf"), jnp.float32)
        steps = (longest - start + (split.reach - 1)) // split.reach
        highest = lax.fori_loop(0, steps, body, none)
        wanted = (lengths > start)[:, None]
        store_at(highest_ref, highest, rows[:, None], (start + k)[None, :], mask=wanted)


def find_bound(
    highest_ref: Ref,  # [BH, reach]
    row: Array,
    length: Array,
    split: Scan,
    budget: int,
    *,
    warps: int,
    scanned: Callable[[Array], Array] | None = None,
) -> Array:
    """Score that at least K and not many more keys of one query reach, a scalar.

    `LOWEST` if fewer than K sets have a score.

    Args:
        highest_ref: largest scores.
        row: of the query.
        length: keys that it sees.
        split: of the scan.
        budget: K.
        warps: of the program.
        scanned: of programs ``[m, n]`` of the scan, which have ended; all, if it is not given.
    """
    programs = split.used(length)
    turns = -(-split.reach // split.sets)
    together = min(round_up(turns), max(1, _BOUNDED // split.sets))
    across = split.sets // split.tile
    part, place = lax.iota(jnp.int32, together), lax.iota(jnp.int32, across)
    lane = lax.iota(jnp.int32, split.tile)

    def add(i: Array, highest: Array) -> Array:
        program = ((i * together + part) * across)[:, None] + place[None, :]
        known = program < programs
        if scanned is not None:
            known &= scanned(program)
        at = program[:, :, None] * split.tile + lane[None, None, :]
        read = load_at(highest_ref, row, at, mask=known[:, :, None], other=-float("inf"))
        return jnp.maximum(highest, jnp.max(read, axis=0).reshape(split.sets))

    none = jnp.full((split.sets,), -float("inf"), jnp.float32)
    highest = lax.fori_loop(0, -(-turns // together), add, none)
    spare = max(1, budget // 4)
    bracket = narrow_among([highest], budget, warps=warps, spare=spare)
    return jnp.where(bracket.number < budget, LOWEST, bracket.threshold)


def filter_keys(
    all_scores_ref: Ref,  # [BH, S]
    listed: Listed,
    row: Array,
    program: Array,
    length: Array,
    bound: Array,
    split: Scan,
) -> None:
    """Lists the keys of one stretch that may be among the K best of one query.

    Args:
        all_scores_ref: scores.
        listed: to write.
        row: of the query.
        program: number of the stretch.
        length: keys that the query sees.
        bound: score that all listed reach.
        split: of the filter.
    """
    start = program * split.stretch
    size = min(split.stretch, _FILTERED)

    @pl.when(start >= length)
    def _() -> None:
        listed.counts[row, program] = 0

    @pl.when(start < length)
    def _() -> None:
        def keep(i: Array, kept: Array) -> Array:
            token = start + i * size + lax.iota(jnp.int32, size)
            score = load_at(all_scores_ref, row, token, mask=token < length, other=-float("inf"))
            reach = score >= bound
            ones = jnp.where(reach, 1, 0)
            place = start + kept + jnp.cumsum(ones) - 1
            store_at(listed.keys, token, row, 0, place, mask=reach)
            return kept + jnp.sum(ones)

        kept = lax.fori_loop(0, split.stretch // size, keep, jnp.int32(0))
        barrier()

        def add_scores(i: Array, _: None) -> None:
            k = i * _COPIED + lax.iota(jnp.int32, _COPIED)
            token = load_at(listed.keys, row, 0, start + k, mask=k < kept, other=0)
            score = load_at(all_scores_ref, row, token, mask=k < kept, other=0.0)
            score_bits = lax.bitcast_convert_type(score, jnp.int32)
            store_at(listed.keys, score_bits, row, 1, start + k, mask=k < kept)

        # Scores are near now. Listed above, with the tokens, they would need many registers.
        lax.fori_loop(0, (kept + (_COPIED - 1)) // _COPIED, add_scores, None)
        listed.counts[row, program] = kept


def load_counts(counts_ref: Ref, row: Array, split: Scan) -> Array:
    """How many keys of every stretch `filter_keys` listed for one query.

    Args:
        counts_ref: int32 ``[BH, P]``.
        row: of the query.
        split: of the filter.
    """
    part = lax.iota(jnp.int32, round_up(split.stretches))
    return load_at(counts_ref, row, part, mask=part < split.stretches, other=0)


def select_listed(
    listed: Listed,
    counts: Array,
    starts_ref: Ref,  # [BH, P] scratch
    row: Array,
    split: Scan,
    to: Destination,
    *,
    warps: int,
) -> Shortlist:
    """Writes the K best of one query among the keys that `filter_keys` listed.

    And some more, if there is room and few were listed.

    Args:
        listed: as `filter_keys` wrote them.
        counts: of `load_counts`.
        starts_ref: to write.
        row: of the query.
        split: of the filter.
        to: where the picked go.
        warps: of the program.
    """
    budget, size = to.budget, split.kept
    stretches = counts.shape[0]
    part = lax.iota(jnp.int32, stretches)
    number = jnp.sum(counts)
    inside = part < split.stretches
    store_at(starts_ref, jnp.cumsum(counts) - counts, row, part, mask=inside)
    barrier()

    def load(i: Array | int) -> Listing:
        """The i-th part of the concatenated lists; `_PARTS` are told apart first."""
        position = i * size + lax.iota(jnp.int32, size)
        stretch, first = jnp.zeros(position.shape, jnp.int32), jnp.zeros(position.shape, jnp.int32)
        step = max(1, stretches // _PARTS)
        for ahead in range(step, split.stretches, step):
            start = starts_ref[row, ahead]
            stretch = jnp.where(start <= position, ahead, stretch)
            first = jnp.where(start <= position, start, first)
        while step > 1:
            step //= 2
            ahead = stretch + step
            start = load_at(starts_ref, row, ahead, mask=ahead < split.stretches, other=LAST)
            stretch = jnp.where(start <= position, ahead, stretch)
            first = jnp.where(start <= position, start, first)
        there = position < number
        place = stretch * split.stretch + (position - first)
        token = load_at(listed.keys, row, 0, place, mask=there, other=0)
        score_bits = load_at(listed.keys, row, 1, place, mask=there, other=0)
        score = lax.bitcast_convert_type(score_bits, jnp.float32)
        return Listing(token, jnp.where(there, score, -float("inf")))

    def from_few() -> Shortlist:
        return write_picked([load(0)], to, warps=warps)

    def from_many() -> Shortlist:
        parts = (number + (size - 1)) // size

        def count(probes: Array) -> Array:
            def add(i: Array, counts: Array) -> Array:
                return counts + count_reaching([load(i).scores], probes, warps=warps)

            return lax.fori_loop(0, parts, add, jnp.zeros(probes.shape, jnp.float32))

        probes = probes_for(size, warps)

        def widen(i: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
            lowest, highest = extent([load(i).scores], probes, warps=warps)
            return jnp.minimum(ends[0], lowest), jnp.maximum(ends[1], highest)

        none = (jnp.float32(float("inf")), jnp.float32(-float("inf")))
        lowest, highest = lax.fori_loop(0, parts, widen, none)
        bracket = narrow(count, Bracket.of(lowest, highest), budget, 0, probes)
        threshold = bracket.threshold

        def add_above(i: Array, above: Array) -> Array:
            return above + jnp.sum(jnp.where(load(i).scores > threshold, 1, 0))

        above = lax.fori_loop(0, parts, add_above, jnp.int32(0))
        room = jnp.where(bracket.number > budget, budget - above, LAST)

        def emit(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            written, ties = carry
            part = load(i)
            tied = jnp.where(part.scores == threshold, 1, 0)
            mask = (part.scores > threshold) | ((tied > 0) & (ties + jnp.cumsum(tied) <= room))
            ones = jnp.where(mask, 1, 0)
            to.put(written + jnp.cumsum(ones) - 1, part, mask)
            return written + jnp.sum(ones), ties + jnp.sum(tied)

        written, _ = lax.fori_loop(0, parts, emit, (jnp.int32(0), jnp.int32(0)))
        return Shortlist(written, bracket)

    return lax.cond(number <= size, from_few, from_many)


BOUND_WARPS = 8
SELECT_WARPS = 8


def selecting_warps(rows: int) -> int:
    """Warps of a program that selects for one of so many heads: few where programs take turns."""
    return SELECT_WARPS if at_once(rows) else SELECT_WARPS // 2


def run_scan(
    q: jax.Array, keys: jax.Array, lengths: jax.Array, split: Scan
) -> tuple[jax.Array, jax.Array]:
    """Scores ``[BH, S]`` and largest scores ``[BH, reach]``, as `scan_keys` writes them."""
    groups = keys.shape[0]

    def kernel(
        q_ref: Ref,  # [BH, D]
        keys_ref: Ref,  # [BG, S, D]
        lengths_ref: Ref,  # [BH]
        scores_ref: Ref,  # [BH, S]
        highest_ref: Ref,  # [BH, reach]
    ) -> None:
        group, program = pl.program_id(0), pl.program_id(1)
        each = q_ref.shape[0] // groups
        lane = group_lanes(each)
        lengths = load_at(lengths_ref, group * each + lane, mask=lane < each, other=0)
        scan_keys(q_ref, keys_ref, scores_ref, highest_ref, group, program, lengths, split)

    return call(
        kernel,
        name="exact_scan",
        grid=(groups, split.programs),
        outputs=split.outputs(q.shape[0], keys.shape[1]),
        warps=split.warps,
        stages=split.stages,
    )(q, keys, lengths)


def run_bound(highest: jax.Array, lengths: jax.Array, split: Scan, budget: int) -> jax.Array:
    """Bounds float32 ``[BH]`` as `find_bound` gives them; undefined for length 0."""
    rows = lengths.shape[0]

    def kernel(
        highest_ref: Ref,  # [BH, reach]
        lengths_ref: Ref,  # [BH]
        bounds_ref: Ref,  # [BH]
    ) -> None:
        row = pl.program_id(0)
        length = lengths_ref[row]

        @pl.when(length > 0)
        def _() -> None:
            bounds_ref[row] = find_bound(highest_ref, row, length, split, budget, warps=BOUND_WARPS)

    (bounds,) = call(
        kernel,
        name="exact_bound",
        grid=(rows,),
        outputs=[jax.ShapeDtypeStruct((rows,), jnp.float32)],
        warps=BOUND_WARPS,
    )(highest, lengths)
    return bounds


def run_filter(scores: jax.Array, bounds: jax.Array, lengths: jax.Array, split: Scan) -> Listed:
    """Lists as `filter_keys` writes them."""
    rows = lengths.shape[0]

    def kernel(
        all_scores_ref: Ref,  # [BH, S]
        bounds_ref: Ref,  # [BH]
        lengths_ref: Ref,  # [BH]
        *listed_refs: Ref,
    ) -> None:
        row, program = pl.program_id(0), pl.program_id(1)
        length, bound = lengths_ref[row], bounds_ref[row]
        filter_keys(all_scores_ref, Listed(*listed_refs), row, program, length, bound, split)

    listed = call(
        kernel,
        name="exact_filter",
        grid=(rows, split.stretches),
        outputs=split.lists(rows),
        warps=warps_for(min(split.stretch, _FILTERED), each=32),
    )(scores, bounds, lengths)
    return Listed(*listed)


def run_select(
    listed: Listed, lengths: jax.Array, split: Scan, budget: int
) -> tuple[jax.Array, jax.Array]:
    """Support and scores ``[BH, K]``, as `select_listed` writes them; none for length 0."""
    rows = lengths.shape[0]

    def kernel(
        keys_ref: Ref,  # [BH, 2, P * stretch]
        counts_ref: Ref,  # [BH, P]
        lengths_ref: Ref,  # [BH]
        support_ref: Ref,  # [BH, K]
        scores_ref: Ref,  # [BH, K]
        starts_ref: Ref,  # [BH, P] scratch
    ) -> None:
        row = pl.program_id(0)
        to = Destination(support_ref, scores_ref, row)
        lists = Listed(keys_ref, counts_ref)
        counts = load_counts(counts_ref, row, split)  # while the length is read

        @pl.when(lengths_ref[row] > 0)
        def _() -> None:
            to.pad(
                select_listed(lists, counts, starts_ref, row, split, to, warps=SELECT_WARPS).number
            )

        @pl.when(lengths_ref[row] <= 0)
        def _() -> None:
            to.pad(jnp.int32(0))

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
    )(*listed, lengths)
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
    bounds = run_bound(highest, lengths, split, budget)
    listed = run_filter(scores, bounds, lengths, split)
    return run_select(listed, lengths, split, budget)


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
