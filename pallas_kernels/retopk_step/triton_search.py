"""What a ReTopK step finds before it selects, as Triton kernels: paths, candidates, lists of keys.

Where a GPU runs all programs that score candidates at once, one kernel does it all: programs that
find the path of a head come first, then those that scan keys, that find bounds, and that filter;
each waits for what it needs of the others. Otherwise every part is a kernel of its own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.candidates.triton import WARPS, Split, score_candidates
from pallas_kernels.exact_support.triton import (
    Listed,
    Scan,
    filter_keys,
    find_bound,
    group_lanes,
    run_bound,
    run_filter,
    run_scan,
    scan_keys,
)
from pallas_kernels.recall.triton import RingMatch, match_ring, most_similar, ring_warps
from pallas_kernels.retopk_step.types import FALLBACK, REFRESH, REUSE, WORDS
from pallas_kernels.triton_lib import (
    Array,
    Ref,
    acquire,
    await_signals,
    barrier,
    bits,
    call,
    divide,
    load_at,
    round_up,
    signal,
    store_at,
)

_BITS = 32
"""Of an integer."""
SEARCH_SCAN_PROGRAMS = 1024
"""Scanning programs, if all groups scan: as many as are shared evenly if some do."""
_SCANS, _BOUNDED, _REUSES = 2, 3, 4
"""What is known of a head: that it scans; that, and its bound; that it reuses, or takes no step."""


class Inputs(NamedTuple):
    """What a search reads: heads, and rows of the batch, one after another.

    Attributes:
        q: ``[BH, D]``.
        keys: ``[BG, S, D]``.
        queries: ``[BH, C, D]``.
        supports: int32 ``[BH, C, K]``.
        tau: float32 ``[BH]``.
        lengths: int32 ``[B]``.
        due: int32 ``[B]``.
        active: int32 ``[B]``.
        pushed: int32 ``[B]``.
    """

    q: jax.Array
    keys: jax.Array
    queries: jax.Array
    supports: jax.Array
    tau: jax.Array
    lengths: jax.Array
    due: jax.Array
    active: jax.Array
    pushed: jax.Array


class Found(NamedTuple):
    """What a search writes.

    Attributes:
        signals: int32 ``[BH, *SIGNALS]``, zeros before: what is known of a head, `_SCANS` or what
            follows; and, at the first head of a group, a bit of every program that has scanned.
        qbar: ``[BH, D]``.
        rho_max: float32 ``[BH]``.
        path: int32 ``[BH]``.
        reuse_length: int32 ``[BH]``, L of a head that reuses, else 0.
        scan_length: int32 ``[BH]``, L of a head that scans, else 0.
        pushed: int32 ``[B]``, with this step's.
        ids: int32 ``[BH, N]``, candidates of heads that reuse.
        candidate_scores: float32 ``[BH, N]``.
        scores: float32 ``[BH, S]``, of heads that scan.
        highest: float32 ``[BH, reach]``.
        bounds: float32 ``[BH]``.
        listed_keys: of `Listed`.
        counts: of `Listed`.
    """

    signals: jax.Array
    qbar: jax.Array
    rho_max: jax.Array
    path: jax.Array
    reuse_length: jax.Array
    scan_length: jax.Array
    pushed: jax.Array
    ids: jax.Array
    candidate_scores: jax.Array
    scores: jax.Array
    highest: jax.Array
    bounds: jax.Array
    listed_keys: jax.Array
    counts: jax.Array

    @property
    def listed(self) -> Listed:
        """Keys that may be among the K best of a head that scans."""
        return Listed(self.listed_keys, self.counts)


class _Path(NamedTuple):
    """What decides and what follows for one head."""

    match: RingMatch
    path: Array
    length: Array
    pushed: Array
    running: Array


def _find_path(inputs: Inputs, row: Array, b: Array) -> _Path:
    """Compares a head with its ring; ``inputs`` are refs."""
    pushed, running = inputs.pushed[b], inputs.active[b] > 0
    length = jnp.where(running, inputs.lengths[b], 0)
    tau, due = inputs.tau[row], inputs.due[b] > 0  # read before there is anything to wait for
    match = match_ring(inputs.q, inputs.queries, row, pushed)
    similar = (match.rho_max >= tau) & (match.rho_max > -float("inf"))
    path = FALLBACK - similar.astype(jnp.int32)  # REUSE if similar
    return _Path(match, jnp.where(due, REFRESH, path), length, pushed, running)


def _store_path(
    found: _Path,
    row: Array,
    b: Array,
    dim: int,
    qbar_ref: Ref,
    rho_ref: Ref,
    path_ref: Ref,
    reuse_length_ref: Ref,
    scan_length_ref: Ref,
    pushed_ref: Ref,
) -> None:
    d = lax.iota(jnp.int32, round_up(dim))
    store_at(qbar_ref, found.match.qbar.astype(qbar_ref.dtype), row, d, mask=d < dim)
    rho_ref[row] = found.match.rho_max
    path_ref[row] = found.path
    reuse_length_ref[row] = jnp.where(found.path == REUSE, found.length, 0)
    scan_length_ref[row] = jnp.where(found.path == REUSE, 0, found.length)
    pushed_ref[b] = found.pushed + found.running.astype(jnp.int32)


def _path_outputs(inputs: Inputs) -> list[jax.ShapeDtypeStruct]:
    """Of `_store_path`."""
    rows, (batch,) = inputs.q.shape[0], inputs.pushed.shape
    return [
        jax.ShapeDtypeStruct(inputs.q.shape, inputs.queries.dtype),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
        *[jax.ShapeDtypeStruct((rows,), jnp.int32)] * 3,
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    ]


def _candidate_outputs(rows: int, slots: int) -> list[jax.ShapeDtypeStruct]:
    """Of `score_candidates`."""
    return [
        jax.ShapeDtypeStruct((rows, slots), jnp.int32),
        jax.ShapeDtypeStruct((rows, slots), jnp.float32),
    ]


def search(
    inputs: Inputs, signals: jax.Array, split: Split, scan: Scan, *, entries: int, window: int
) -> Found:
    """Finds paths, and for every head candidates or a list of keys.

    Args:
        inputs: see there.
        signals: int32 ``[BH, *SIGNALS]``, zeros; used up.
        split: of the candidates.
        scan: of the scan and its filter.
        entries: R.
        window: W.
    """
    marked = scan.programs <= _BITS * WORDS  # else there is no bit for each program of a group
    how = _search_at_once if split.at_once and marked else _search_in_turn
    return how(inputs, signals, split, scan, entries=entries, window=window)


def _search_at_once(
    inputs: Inputs, signals: jax.Array, split: Split, scan: Scan, *, entries: int, window: int
) -> Found:
    rows, dim = inputs.q.shape
    groups, stored, _ = inputs.keys.shape
    heads, budget = rows // inputs.pushed.shape[0], inputs.supports.shape[2]
    each = rows // groups
    first_scan = rows * split.total
    first_bound = first_scan + groups * scan.programs
    first_filter = first_bound + rows

    # A bound is found as soon as half of the scans of its group have ended, while the others still
    # run: about 5/2 K keys reach it. Where the selection does not hold twice as many, with more.
    enough = 4 if 4 * budget <= scan.kept else 7  # of eight

    def mark(part: Array) -> tuple[Array, Array]:
        """Where a scanning program says that it has ended: a word, and its bit there."""
        turn, place = divide(part, WORDS)
        return place, turn

    def kernel(*refs: Ref) -> None:
        given, found, ended_ref = Inputs(*refs[:9]), Found(*refs[10:-1]), refs[-1]
        program, word = pl.program_id(0), lax.iota(jnp.int32, WORDS)

        @pl.when(program < first_scan)
        def _() -> None:
            row, part = divide(program, split.total)
            b = divide(row, heads)[0]
            mine = _find_path(given, row, b)
            last = split.total - 1  # that of the window, which has least to do

            @pl.when(part == last)
            def _() -> None:
                scans = ((mine.path != REUSE) & mine.running).astype(jnp.int32)
                signal(found.signals, row, 0, 0, amount=_REUSES + scans * (_SCANS - _REUSES))
                _store_path(mine, row, b, dim, *found[1:7])

            @pl.when((mine.path == REUSE) & mine.running)
            def _() -> None:
                score_candidates(
                    given.q,
                    given.keys,
                    given.supports,
                    found.ids,
                    found.candidate_scores,
                    row,
                    part,
                    most_similar(mine.match, entries),
                    mine.length,
                    split=split,
                    window=window,
                )

        @pl.when((program >= first_scan) & (program < first_bound))
        def _() -> None:
            part, group = divide(program - first_scan, groups)
            length = given.lengths[divide(group * each, heads)[0]]
            lane = group_lanes(each)
            mine = lane < each
            # Nothing is between the two reads: a program that is not needed ends the sooner.
            known = await_signals(found.signals, group * each + lane, 0, 0, least=_SCANS, mask=mine)
            lengths = jnp.where(mine & (known < _REUSES), length, 0)

            @pl.when(jnp.max(lengths) > part * scan.tile)
            def _() -> None:
                scan_keys(
                    given.q, given.keys, found.scores, found.highest, group, part, lengths, scan
                )
                place, bit = mark(part)
                signal(found.signals, group * each, 1, place, amount=jnp.int32(1) << bit)

        @pl.when((program >= first_bound) & (program < first_filter))
        def _() -> None:
            row = program - first_bound
            length = given.lengths[divide(row, heads)[0]]

            @pl.when(await_signals(found.signals, row, 0, 0, least=_SCANS) < _REUSES)
            def _() -> None:
                first = divide(row, each)[0] * each
                expected = (scan.used(length) * enough + 7) // 8
                seen = acquire(
                    await_signals(found.signals, first, 1, word, least=expected, measure=bits)
                )

                @pl.when(bits(seen) >= expected)  # always; else nothing would be waited for
                def _() -> None:
                    store_at(ended_ref, seen, row, word)
                    barrier()

                    def scanned(part: Array) -> Array:
                        place, bit = mark(part)
                        return (load_at(ended_ref, row, place) >> bit) & 1 > 0

                    found.bounds[row] = find_bound(
                        found.highest, row, length, scan, budget, warps=WARPS, scanned=scanned
                    )
                    signal(found.signals, row, 0, 0, amount=_BOUNDED - _SCANS)

        @pl.when(program >= first_filter)
        def _() -> None:
            row, part = divide(program - first_filter, scan.stretches)
            length = given.lengths[divide(row, heads)[0]]

            @pl.when(await_signals(found.signals, row, 0, 0, least=_BOUNDED) < _REUSES)
            def _() -> None:
                first = divide(row, each)[0] * each
                expected = scan.used(length)
                seen = acquire(
                    await_signals(found.signals, first, 1, word, least=expected, measure=bits)
                )

                @pl.when(bits(seen) >= expected)  # always, as above
                def _() -> None:
                    bound = found.bounds[row]
                    filter_keys(found.scores, found.listed, row, part, length, bound, scan)

    *outputs, _ = call(
        kernel,
        name="retopk_search",
        grid=(first_filter + rows * scan.stretches,),
        outputs=[
            jax.ShapeDtypeStruct(signals.shape, jnp.int32),
            *_path_outputs(inputs),
            *_candidate_outputs(rows, entries * budget + window),
            *scan.outputs(rows, stored),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
            *scan.lists(rows),
            jax.ShapeDtypeStruct((rows, WORDS), jnp.int32),
        ],
        warps=WARPS,
        stages=scan.stages,
        aliases={9: 0},
    )(*inputs, signals)
    return Found(*outputs)


def _search_in_turn(
    inputs: Inputs, signals: jax.Array, split: Split, scan: Scan, *, entries: int, window: int
) -> Found:
    rows, dim = inputs.q.shape
    heads, (_, capacity, budget) = rows // inputs.pushed.shape[0], inputs.supports.shape

    def recall(*refs: Ref) -> None:
        given, slots_ref = Inputs(*refs[:9]), refs[15]
        row = pl.program_id(0)
        b = divide(row, heads)[0]
        mine = _find_path(given, row, b)
        _store_path(mine, row, b, dim, *refs[9:15])
        for r, slot in enumerate(most_similar(mine.match, entries)):
            slots_ref[row, r] = slot

    qbar, rho_max, path, reuse_length, scan_length, pushed, slots = call(
        recall,
        name="retopk_recall",
        grid=(rows,),
        outputs=[*_path_outputs(inputs), jax.ShapeDtypeStruct((rows, entries), jnp.int32)],
        warps=ring_warps(capacity, dim),
    )(*inputs)

    def candidates(
        q_ref: Ref,  # [BH, D]
        keys_ref: Ref,  # [BG, S, D]
        supports_ref: Ref,  # [BH, C, K]
        slots_ref: Ref,  # [BH, R]
        reuse_length_ref: Ref,  # [BH]
        ids_ref: Ref,  # [BH, N]
        candidate_scores_ref: Ref,  # [BH, N]
    ) -> None:
        row, part = pl.program_id(0), pl.program_id(1)
        length = reuse_length_ref[row]

        @pl.when(length > 0)
        def _() -> None:
            score_candidates(
                q_ref,
                keys_ref,
                supports_ref,
                ids_ref,
                candidate_scores_ref,
                row,
                part,
                [slots_ref[row, r] for r in range(entries)],
                length,
                split=split,
                window=window,
            )

    ids, candidate_scores = call(
        candidates,
        name="retopk_candidates",
        grid=(rows, split.total),
        outputs=_candidate_outputs(rows, entries * budget + window),
        warps=WARPS,
    )(inputs.q, inputs.keys, inputs.supports, slots, reuse_length)
    scores, highest = run_scan(inputs.q, inputs.keys, scan_length, scan)
    bounds = run_bound(highest, scan_length, scan, budget)
    listed = run_filter(scores, bounds, scan_length, scan)
    return Found(
        signals,
        qbar,
        rho_max,
        path,
        reuse_length,
        scan_length,
        pushed,
        ids,
        candidate_scores,
        scores,
        highest,
        bounds,
        *listed,
    )
