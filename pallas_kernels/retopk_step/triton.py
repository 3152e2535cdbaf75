"""The ReTopK step as four Triton kernels.

1. ``recall``: every program of a head compares the query with the ring and so knows the path; if
   the head reuses, the program scores its part of the candidates.
2. The scan and the filter of the exact support, for heads that do not reuse.
3. ``finish``: selection by the head's path, output, push and counters.

Programs that are not needed end at once; the host decides nothing.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.candidates.triton import (
    WARPS,
    check_candidates,
    score_candidates,
    split_candidates,
)
from pallas_kernels.exact_support.triton import (
    SELECT_WARPS,
    Scan,
    run_filter,
    run_scan,
    select_listed,
)
from pallas_kernels.recall.triton import match_ring
from pallas_kernels.retopk_step.types import (
    FALLBACK,
    REFRESH,
    REUSE,
    Remembered,
    ReTopKStep,
)
from pallas_kernels.select.triton import Destination, load_slots, write_picked
from pallas_kernels.sparse_attend.triton import attend_support, splits
from pallas_kernels.triton_lib import (
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
    slots_total = entries * budget + window
    split_scores = split_candidates(rows, budget, entries, window)

    def recall(
        q_ref: Ref,  # [BH, D]
        keys_ref: Ref,  # [BG, S, D]
        queries_ref: Ref,  # [BH, C, D]
        supports_ref: Ref,  # [BH, C, K]
        tau_ref: Ref,  # [BH]
        lengths_ref: Ref,  # [B]
        due_ref: Ref,  # [B]
        active_ref: Ref,  # [B]
        pushed_ref: Ref,  # [B]
        ids_ref: Ref,  # [BH, N]
        scores_ref: Ref,  # [BH, N]
        qbar_ref: Ref,  # [BH, D]
        rho_ref: Ref,  # [BH]
        path_ref: Ref,  # [BH]
        reuse_length_ref: Ref,  # [BH]: L of a head that reuses, else 0
        scan_length_ref: Ref,  # [BH]: L of a head that scans, else 0
        new_pushed_ref: Ref,  # [B]
    ) -> None:
        row, program = pl.program_id(0), pl.program_id(1)
        b = row // heads
        pushed, running = pushed_ref[b], active_ref[b] > 0
        length = jnp.where(running, lengths_ref[b], 0)
        similarity, due = tau_ref[row], due_ref[b] > 0  # read before there is anything to wait for
        found = match_ring(q_ref, queries_ref, row, pushed, entries=entries)
        similar = (found.rho_max >= similarity) & (found.rho_max > -float("inf"))
        path = FALLBACK - similar.astype(jnp.int32)  # REUSE if similar
        path = jnp.where(due, REFRESH, path)

        @pl.when((path == REUSE) & running)
        def _() -> None:
            score_candidates(
                q_ref,
                keys_ref,
                supports_ref,
                ids_ref,
                scores_ref,
                row,
                program,
                found.slots,
                length,
                split=split_scores,
                window=window,
            )

        @pl.when(program == 0)
        def _() -> None:
            d = lax.iota(jnp.int32, round_up(dim))
            store_at(qbar_ref, found.qbar.astype(qbar_ref.dtype), row, d, mask=d < dim)
            rho_ref[row] = found.rho_max
            path_ref[row] = path
            reuse_length_ref[row] = jnp.where(path == REUSE, length, 0)
            scan_length_ref[row] = jnp.where(path == REUSE, 0, length)
            new_pushed_ref[b] = pushed + running.astype(jnp.int32)

    flat_q = q.reshape(rows, dim)
    flat_keys = keys.reshape(scans, stored, dim)
    flat_values = values.reshape(scans, stored, dim)
    flat_queries = remembered.queries.reshape(rows, capacity, dim)
    flat_supports = remembered.supports.reshape(rows, capacity, budget)
    ids, candidate_scores, qbar, rho_max, path, reuse_lengths, scan_lengths, pushed = call(
        recall,
        name="retopk_recall",
        grid=(rows, split_scores.total),
        outputs=[
            jax.ShapeDtypeStruct((rows, slots_total), jnp.int32),
            jax.ShapeDtypeStruct((rows, slots_total), jnp.float32),
            jax.ShapeDtypeStruct((rows, dim), remembered.queries.dtype),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
            *[jax.ShapeDtypeStruct((rows,), jnp.int32)] * 3,
            jax.ShapeDtypeStruct((batch,), jnp.int32),
        ],
        warps=WARPS,
    )(
        flat_q,
        flat_keys,
        flat_queries,
        flat_supports,
        tau.reshape(rows),
        lengths,
        refresh_due.astype(jnp.int32),
        active.astype(jnp.int32),
        remembered.pushed,
    )

    scan = Scan.of(scans, each, stored, dim, keys.dtype, budget)
    all_scores, highest = run_scan(flat_q, flat_keys, scan_lengths, scan)
    tokens, counts = run_filter(all_scores, highest, scan_lengths, scan, budget, finite=True)
    pieces = splits(rows, dim)

    def finish(
        values_ref: Ref,  # [BG, S, D]
        ids_ref: Ref,  # [BH, N]
        candidate_scores_ref: Ref,  # [BH, N]
        all_scores_ref: Ref,  # [BH, S]
        tokens_ref: Ref,  # [BH, P * stretch]
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
        new_queries_ref: Ref,  # [BH, C, D] aliased
        new_supports_ref: Ref,  # [BH, C, K] aliased
        new_paths_ref: Ref,  # [BH, 3] aliased
        new_total_ref: Ref,  # [BH] aliased
        out_ref: Ref,  # [BH, D]
        support_ref: Ref,  # [BH, K]
        unique_ref: Ref,  # [BH]
        scores_ref: Ref,  # [BH, K] scratch
        starts_ref: Ref,  # [BH, P] scratch
    ) -> None:
        row, split = pl.program_id(0), pl.program_id(1)
        reuse_length, scan_length = reuse_length_ref[row], scan_length_ref[row]
        slot = pushed_ref[row // heads] % capacity
        # All that the end needs is read here, and so are the slots, also for a head that scans:
        # nothing has to be waited for twice.
        candidate_slots = load_slots(ids_ref, candidate_scores_ref, row)
        d, kind = lax.iota(jnp.int32, round_up(dim)), lax.iota(jnp.int32, 4)
        qbar = load_at(qbar_ref, row, d, mask=d < dim, other=0.0)
        path, total = path_ref[row], total_ref[row]
        paths = load_at(paths_ref, row, kind, mask=kind < 3, other=0)
        to = Destination(support_ref, scores_ref, row, new_supports_ref, slot)

        @pl.when(split == 0)
        def _() -> None:
            unique = jnp.int32(0)
            for piece in candidate_slots:
                unique += jnp.sum(jnp.where(piece.tokens >= 0, 1, 0))
            unique = jnp.where(reuse_length > 0, unique, 0)
            unique_ref[row] = unique
            new_total_ref[row] = total + unique

        @pl.when(reuse_length > 0)
        def _() -> None:
            write_picked(candidate_slots, to, finite=True)

        @pl.when(scan_length > 0)
        def _() -> None:
            select_listed(
                all_scores_ref, tokens_ref, counts_ref, starts_ref, row, scan, to, finite=True
            )

        @pl.when(reuse_length + scan_length <= 0)
        def _() -> None:
            Destination(support_ref, scores_ref, row).pad(jnp.int32(0))

        barrier()
        attend_support(support_ref, scores_ref, values_ref, out_ref, row, split, pieces=pieces)

        @pl.when((reuse_length + scan_length > 0) & (split == 0))
        def _() -> None:
            store_at(new_queries_ref, qbar, row, slot, d, mask=d < dim)
            counted = paths + jnp.where(kind == path, 1, 0)
            store_at(new_paths_ref, counted, row, kind, mask=kind < 3)

    queries, supports, paths, total, out, support, unique, *_ = call(
        finish,
        name="retopk_finish",
        grid=(rows, pieces),
        outputs=[
            jax.ShapeDtypeStruct(flat_queries.shape, flat_queries.dtype),
            jax.ShapeDtypeStruct(flat_supports.shape, jnp.int32),
            jax.ShapeDtypeStruct((rows, 3), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
            jax.ShapeDtypeStruct((rows, dim), values.dtype),
            jax.ShapeDtypeStruct((rows, budget), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
            jax.ShapeDtypeStruct((rows, budget), jnp.float32),
            jax.ShapeDtypeStruct((rows, scan.stretches), jnp.int32),
        ],
        warps=SELECT_WARPS,
        aliases={11: 0, 12: 1, 13: 2, 14: 3},
    )(
        flat_values,
        ids,
        candidate_scores,
        all_scores,
        tokens,
        counts,
        qbar,
        path,
        reuse_lengths,
        scan_lengths,
        remembered.pushed,
        flat_queries,
        flat_supports,
        remembered.paths.reshape(rows, 3),
        remembered.candidates.reshape(rows),
    )
    return ReTopKStep(
        out.reshape(batch, heads, dim),
        Remembered(
            queries.reshape(batch, heads, capacity, dim),
            supports.reshape(batch, heads, capacity, budget),
            pushed,
            paths.reshape(batch, heads, 3),
            total.reshape(batch, heads),
        ),
        support.reshape(batch, heads, budget),
        path.reshape(batch, heads),
        rho_max.reshape(batch, heads),
        unique.reshape(batch, heads),
    )
