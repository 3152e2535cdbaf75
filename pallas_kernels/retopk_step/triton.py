"""The ReTopK step as two Triton kernels, or as six or seven where there are many heads.

1. The search finds the path of every head, scores the candidates of those that reuse, and scans
   for the others (`pallas_kernels.retopk_step.triton_search`).
2. ``finish``: selection by the head's path, push and counters, and the output, which is a kernel of
   its own where there are many heads.

Programs that are not needed end at once; the host decides nothing.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.candidates.triton import Split, check_candidates
from pallas_kernels.exact_support.triton import (
    SCAN_PROGRAMS,
    Listed,
    Scan,
    load_counts,
    select_listed,
    selecting_warps,
)
from pallas_kernels.retopk_step.triton_search import SEARCH_SCAN_PROGRAMS, Inputs, search
from pallas_kernels.retopk_step.types import SIGNALS, WORDS, Remembered, ReTopKStep
from pallas_kernels.select.triton import (
    Destination,
    Listing,
    Shortlist,
    load_picked,
    load_slots,
    slot_pieces,
    write_picked,
)
from pallas_kernels.sparse_attend.triton import (
    Target,
    at_once,
    attend_rows,
    attend_shortlist,
    spare_entries,
    splits,
)
from pallas_kernels.triton_lib import (
    Array,
    Ref,
    barrier,
    call,
    check,
    load_at,
    round_up,
    store_at,
)


def retopk_step(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    remembered: Remembered,
    lengths: jax.Array,
    refresh_due: jax.Array,
    active: jax.Array,
    tau: jax.Array,
    *,
    entries: int,
    window: int,
    by_recency: bool,
) -> ReTopKStep:
    """See `pallas_kernels.retopk_step.retopk_step`."""
    batch, heads, dim = q.shape
    groups, stored = keys.shape[1:3]
    capacity, budget = remembered.supports.shape[2:]
    each = heads // groups
    check(not by_recency, "recall by similarity")
    check(capacity <= 128, "rings of up to 128 entries")
    check(each <= 16, "up to 16 query heads a key-value head")
    check_candidates(dim, entries, budget, window)
    rows, scans = batch * heads, batch * groups
    flat_values = values.reshape(scans, stored, dim)
    inputs = Inputs(
        q.reshape(rows, dim),
        keys.reshape(scans, stored, dim),
        remembered.queries.reshape(rows, capacity, dim),
        remembered.supports.reshape(rows, capacity, budget),
        tau.reshape(rows),
        lengths,
        refresh_due.astype(jnp.int32),
        active.astype(jnp.int32),
        remembered.pushed,
    )
    split = Split.of(rows, budget, entries, window)
    programs = SEARCH_SCAN_PROGRAMS if split.at_once else SCAN_PROGRAMS
    scan = Scan.of(scans, each, stored, dim, keys.dtype, budget, programs=programs)
    found = search(
        inputs,
        remembered.signals.reshape(rows, *SIGNALS),
        split,
        scan,
        entries=entries,
        window=window,
    )
    attends, warps = at_once(rows), selecting_warps(rows)
    pieces = splits(rows, dim) if attends else 1
    keeps = pieces if attends else 0  # the program of a head that counts and pushes its query
    spare = spare_entries(budget, rows, dim)

    total_slots = entries * budget + window

    def finish(
        values_ref: Ref,  # [BG, S, D]
        ids_ref: Ref,  # [BH, N]
        candidate_scores_ref: Ref,  # [BH, N]
        keys_ref: Ref,  # [BH, 2, P * stretch]
        counts_ref: Ref,  # [BH, P]
        qbar_ref: Ref,  # [BH, D]
        path_ref: Ref,  # [BH]
        reuse_length_ref: Ref,  # [BH]
        scan_length_ref: Ref,  # [BH]
        pushed_ref: Ref,  # [B]
        queries_ref: Ref,  # [BH, C, D]
        supports_ref: Ref,  # [BH, C, K]
        paths_ref: Ref,  # [BH, 3]
        total_ref: Ref,  # [BH]
        _: Ref,
        new_queries_ref: Ref,  # [BH, C, D] aliased
        new_supports_ref: Ref,  # [BH, C, K] aliased
        new_paths_ref: Ref,  # [BH, 3] aliased
        new_total_ref: Ref,  # [BH] aliased
        signals_ref: Ref,  # [BH, *SIGNALS] aliased
        out_ref: Ref,  # [BH, D]
        support_ref: Ref,  # [BH, K]
        unique_ref: Ref,  # [BH]
        scores_ref: Ref,  # [BH, K] of `attend_rows`
        picks_ref: Ref,  # [BH, K + spare] scratch
        picked_scores_ref: Ref,  # [BH, K + spare] scratch
        starts_ref: Ref,  # [BH, P] scratch
    ) -> None:
        row, piece = pl.program_id(0), pl.program_id(1)
        reuse_length, scan_length = reuse_length_ref[row], scan_length_ref[row]
        slot = pushed_ref[row // heads] % capacity
        reuses, running = reuse_length > 0, reuse_length + scan_length > 0

        @pl.when(piece == keeps)
        def _() -> None:
            d, kind = lax.iota(jnp.int32, round_up(dim)), lax.iota(jnp.int32, 4)
            qbar = load_at(qbar_ref, row, d, mask=d < dim, other=0.0)
            path, total = path_ref[row], total_ref[row]
            paths = load_at(paths_ref, row, kind, mask=kind < 3, other=0)
            unique = jnp.int32(0)
            for tokens in load_slots(ids_ref, row, -1):
                unique += jnp.sum(jnp.where(tokens >= 0, 1, 0))
            unique = jnp.where(reuses, unique, 0)
            unique_ref[row] = unique
            new_total_ref[row] = total + unique
            signals_ref[row, 0, 0] = 0
            word = lax.iota(jnp.int32, WORDS)
            store_at(signals_ref, jnp.zeros((WORDS,), jnp.int32), row, 1, word)

            @pl.when(running)
            def _() -> None:
                store_at(new_queries_ref, qbar, row, slot, d, mask=d < dim)
                counted = paths + jnp.where(kind == path, 1, 0)
                store_at(new_paths_ref, counted, row, kind, mask=kind < 3)

        @pl.when(piece < pieces)
        def _() -> None:
            # Whatever the path, so that nothing has to be waited for twice.
            scores = load_slots(candidate_scores_ref, row, -float("inf"))
            counts = load_counts(counts_ref, row, scan)
            lists = Listed(keys_ref, counts_ref)
            slots = Destination(picks_ref, None, row, spare)
            tokens = Destination(picks_ref, picked_scores_ref, row, spare)

            def among_candidates() -> Shortlist:
                found = []
                for (start, size), held in zip(slot_pieces(total_slots), scores, strict=True):
                    found.append(Listing(start + lax.iota(jnp.int32, size), held))
                return write_picked(found, slots, warps=warps)

            def among_all() -> Shortlist:
                return select_listed(lists, counts, starts_ref, row, scan, tokens, warps=warps)

            shortlist = lax.cond(
                reuses,
                among_candidates,
                lambda: lax.cond(scan_length > 0, among_all, Shortlist.none),
            )
            barrier()

            def look_up(k: Array) -> Listing:
                """Entries of the shortlist: of a head that reuses, picks are slots, else tokens."""
                at, score = load_picked(picks_ref, picked_scores_ref, row, k, shortlist.number)
                place, mask = jnp.maximum(at, 0), (at >= 0) & reuses
                candidate = load_at(
                    candidate_scores_ref, row, place, mask=mask, other=-float("inf")
                )
                token = load_at(ids_ref, row, place, mask=mask, other=-1)
                return Listing(jnp.where(reuses, token, at), jnp.where(reuses, candidate, score))

            def put(k: Array, tokens: Array, mask: Array) -> None:
                store_at(support_ref, tokens, row, k, mask=mask)
                store_at(new_supports_ref, tokens, row, slot, k, mask=mask & running)

            if attends:
                target = Target(values_ref, out_ref, row, piece, pieces)
                attend_shortlist(look_up, shortlist, budget, spare, target, put, warps=warps)
            else:
                k = lax.iota(jnp.int32, round_up(budget))
                token, score = look_up(k)
                put(k, token, k < budget)
                store_at(scores_ref, score, row, k, mask=k < budget)

    queries, supports, paths, total, signals, out, support, unique, scores, *_ = call(
        finish,
        name="retopk_finish",
        grid=(rows, pieces + 1 if attends else 1),
        outputs=[
            jax.ShapeDtypeStruct(inputs.queries.shape, inputs.queries.dtype),
            jax.ShapeDtypeStruct(inputs.supports.shape, jnp.int32),
            jax.ShapeDtypeStruct((rows, 3), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
            jax.ShapeDtypeStruct((rows, *SIGNALS), jnp.int32),
            jax.ShapeDtypeStruct((rows, dim), values.dtype),
            jax.ShapeDtypeStruct((rows, budget), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
            jax.ShapeDtypeStruct((rows, budget), jnp.float32),
            jax.ShapeDtypeStruct((rows, budget + spare), jnp.int32),
            jax.ShapeDtypeStruct((rows, budget + spare), jnp.float32),
            jax.ShapeDtypeStruct((rows, scan.stretches), jnp.int32),
        ],
        warps=warps,
        aliases={10: 0, 11: 1, 12: 2, 13: 3, 14: 4},
    )(
        flat_values,
        found.ids,
        found.candidate_scores,
        *found.listed,
        found.qbar,
        found.path,
        found.reuse_length,
        found.scan_length,
        remembered.pushed,
        inputs.queries,
        inputs.supports,
        remembered.paths.reshape(rows, 3),
        remembered.candidates.reshape(rows),
        found.signals,
    )
    if not attends:
        out = attend_rows(flat_values, support, scores)
    return ReTopKStep(
        out.reshape(batch, heads, dim),
        Remembered(
            queries.reshape(batch, heads, capacity, dim),
            supports.reshape(batch, heads, capacity, budget),
            found.pushed,
            paths.reshape(batch, heads, 3),
            total.reshape(batch, heads),
            signals.reshape(batch, heads, *SIGNALS),
        ),
        support.reshape(batch, heads, budget),
        found.path.reshape(batch, heads),
        found.rho_max.reshape(batch, heads),
        unique.reshape(batch, heads),
    )
