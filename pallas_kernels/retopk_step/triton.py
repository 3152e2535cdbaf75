"""The ReTopK step as three Triton kernels.

1. ``plan``, a program a head: recall, the path, the counters, and the push of the query.
2. ``rank``: programs of heads that reuse score a block of candidates, programs of key-value heads
   with a head that does not scan a stretch of keys; the others end at once.
3. ``finish``, a few programs a head: selection by the head's path, output, and the push of the
   support.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.candidates.triton import (
    block_rows,
    check_candidates,
    score_block,
    score_programs,
)
from pallas_kernels.exact_support.triton import (
    check_scan,
    scan_keys,
    scan_outputs,
    select_blocks,
    select_scratch,
    tile_tokens,
    tiles_each,
)
from pallas_kernels.recall.triton import match_ring, ring_warps
from pallas_kernels.retopk_step.types import (
    FALLBACK,
    REFRESH,
    REUSE,
    Remembered,
    ReTopKStep,
)
from pallas_kernels.select.triton import pad_support, select_slots
from pallas_kernels.sparse_attend.triton import attend_support, splits
from pallas_kernels.triton_lib import Ref, barrier, call, check, load_at, round_up, store_at


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
) -> ReTopKStep:
    """See `pallas_kernels.retopk_step.retopk_step`."""
    batch, heads, dim = q.shape
    groups, stored = keys.shape[1:3]
    capacity, budget = remembered.supports.shape[2:]
    each = heads // groups
    check(capacity <= 128, "rings of up to 128 entries")
    check(each <= 16, "up to 16 query heads a key-value head")
    check_scan(dim, each, stored)
    check_candidates(dim, entries, budget, window)
    rows, scans = batch * heads, batch * groups
    slots_total = entries * budget + window

    def plan(
        q_ref: Ref,  # [BH, D]
        tau_ref: Ref,  # [1]
        lengths_ref: Ref,  # [B]
        due_ref: Ref,  # [B]
        active_ref: Ref,  # [B]
        pushed_ref: Ref,  # [B]
        queries_ref: Ref,  # [BH, C, D]
        paths_ref: Ref,  # [BH, 3]
        new_queries_ref: Ref,  # [BH, C, D] aliased
        new_paths_ref: Ref,  # [BH, 3] aliased
        new_pushed_ref: Ref,  # [B]
        slots_ref: Ref,  # [BH, R]
        rho_ref: Ref,  # [BH]
        path_ref: Ref,  # [BH]
        reuse_length_ref: Ref,  # [BH]: L of a head that reuses, else 0
        scan_length_ref: Ref,  # [BH]: L of a head that scans, else 0
    ) -> None:
        row = pl.program_id(0)
        b = row // heads
        pushed, running = pushed_ref[b], active_ref[b]
        found = match_ring(q_ref, queries_ref, row, pushed, entries=entries)
        similar = (found.rho_max >= tau_ref[0]) & (found.rho_max > -float("inf"))
        path = jnp.where(due_ref[b], REFRESH, jnp.where(similar, REUSE, FALLBACK))
        for r, slot in enumerate(found.slots):
            slots_ref[row, r] = slot
        length = jnp.where(running, lengths_ref[b], 0)
        rho_ref[row] = found.rho_max
        path_ref[row] = path
        reuse_length_ref[row] = jnp.where(path == REUSE, length, 0)
        scan_length_ref[row] = jnp.where(path == REUSE, 0, length)
        new_pushed_ref[b] = pushed + jnp.where(running, 1, 0)

        @pl.when(running)
        def _() -> None:
            new_paths_ref[row, path] = paths_ref[row, path] + 1
            barrier()
            d = lax.iota(jnp.int32, round_up(dim))
            qbar = found.qbar.astype(new_queries_ref.dtype)
            store_at(new_queries_ref, qbar, row, pushed % capacity, d, mask=d < dim)

    flat_q = q.reshape(rows, dim)
    flat_keys = keys.reshape(scans, stored, dim)
    queries, paths, pushed, slots, rho_max, path, reuse_lengths, scan_lengths = call(
        plan,
        name="retopk_plan",
        grid=(rows,),
        outputs=[
            jax.ShapeDtypeStruct((rows, capacity, dim), remembered.queries.dtype),
            jax.ShapeDtypeStruct((rows, 3), jnp.int32),
            jax.ShapeDtypeStruct((batch,), jnp.int32),
            jax.ShapeDtypeStruct((rows, entries), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
            *[jax.ShapeDtypeStruct((rows,), jnp.int32)] * 3,
        ],
        warps=ring_warps(capacity, dim),
        aliases={6: 0, 7: 1},
    )(
        flat_q,
        tau.reshape(1),
        lengths,
        refresh_due,
        active,
        remembered.pushed,
        remembered.queries.reshape(rows, capacity, dim),
        remembered.paths.reshape(rows, 3),
    )

    block = block_rows(dim, keys.dtype.itemsize)
    scoring = score_programs(budget, entries, window, block)
    tile = tile_tokens(dim, keys.dtype.itemsize, stored)
    tiles = tiles_each(scans, stored, tile)
    stretches = -(-stored // (tile * tiles))

    def rank(
        q_ref: Ref,  # [BH, D]
        keys_ref: Ref,  # [BG, S, D]
        supports_ref: Ref,  # [BH, C, K]
        slots_ref: Ref,  # [BH, R]
        reuse_length_ref: Ref,  # [BH]
        scan_length_ref: Ref,  # [BH]
        ids_ref: Ref,  # [BH, N]
        candidate_scores_ref: Ref,  # [BH, N]
        all_scores_ref: Ref,  # [BH, S]
        highest_ref: Ref,  # [BH, S / block]
    ) -> None:
        program = pl.program_id(0)

        @pl.when(program < scans * stretches)
        def _() -> None:
            scan_keys(
                q_ref,
                keys_ref,
                scan_length_ref,
                all_scores_ref,
                highest_ref,
                program // stretches,
                program % stretches,
                tile=tile,
                tiles=tiles,
            )

        @pl.when(program >= scans * stretches)
        def _() -> None:
            number = program - scans * stretches
            row = number // scoring
            length = reuse_length_ref[row]

            @pl.when(length > 0)
            def _() -> None:
                score_block(
                    q_ref,
                    keys_ref,
                    supports_ref,
                    slots_ref,
                    ids_ref,
                    candidate_scores_ref,
                    row,
                    number % scoring,
                    length,
                    block=block,
                    window=window,
                )

    flat_supports = remembered.supports.reshape(rows, capacity, budget)
    ids, candidate_scores, all_scores, highest = call(
        rank,
        name="retopk_rank",
        grid=(scans * stretches + rows * scoring,),
        outputs=[
            jax.ShapeDtypeStruct((rows, slots_total), jnp.int32),
            jax.ShapeDtypeStruct((rows, slots_total), jnp.float32),
            *scan_outputs(rows, stored),
        ],
        warps=4,
        stages=3,
    )(flat_q, flat_keys, flat_supports, slots, reuse_lengths, scan_lengths)

    pieces = splits(rows, dim)

    def finish(
        ids_ref: Ref,  # [BH, N]
        candidate_scores_ref: Ref,  # [BH, N]
        all_scores_ref: Ref,  # [BH, S]
        highest_ref: Ref,  # [BH, S / block]
        reuse_length_ref: Ref,  # [BH]
        scan_length_ref: Ref,  # [BH]
        pushed_ref: Ref,  # [B]
        values_ref: Ref,  # [BG, S, D]
        total_ref: Ref,  # [BH]
        supports_ref: Ref,  # [BH, C, K]
        new_total_ref: Ref,  # [BH] aliased
        new_supports_ref: Ref,  # [BH, C, K] aliased
        out_ref: Ref,  # [BH, D]
        support_ref: Ref,  # [BH, K]
        unique_ref: Ref,  # [BH]
        scores_ref: Ref,  # [BH, K] scratch
        blocks_ref: Ref,  # [BH, K] scratch
        tokens_ref: Ref,  # [BH, M] scratch
        candidate_keys_ref: Ref,  # [BH, M] scratch
    ) -> None:
        row, split = pl.program_id(0), pl.program_id(1)
        reuse_length, scan_length = reuse_length_ref[row], scan_length_ref[row]

        @pl.when(reuse_length > 0)
        def _() -> None:
            unique = select_slots(
                ids_ref, candidate_scores_ref, support_ref, scores_ref, row, tail=window
            )

            @pl.when(split == 0)
            def _() -> None:
                unique_ref[row] = unique
                new_total_ref[row] = total_ref[row] + unique

        @pl.when(scan_length > 0)
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
                scan_length,
            )

        @pl.when(reuse_length + scan_length <= 0)
        def _() -> None:
            pad_support(support_ref, scores_ref, row, jnp.int32(0))

        @pl.when((split == 0) & (reuse_length <= 0))
        def _() -> None:
            unique_ref[row] = 0

        barrier()
        attend_support(support_ref, scores_ref, values_ref, out_ref, row, split, pieces=pieces)

        @pl.when((split == 0) & (reuse_length + scan_length > 0))
        def _() -> None:
            k = lax.iota(jnp.int32, round_up(budget))
            support = load_at(support_ref, row, k, mask=k < budget, other=-1)
            slot = pushed_ref[row // heads] % capacity
            store_at(new_supports_ref, support, row, slot, k, mask=k < budget)

    total, supports, out, support, unique, *_ = call(
        finish,
        name="retopk_finish",
        grid=(rows, pieces),
        outputs=[
            jax.ShapeDtypeStruct((rows,), jnp.int32),
            jax.ShapeDtypeStruct((rows, capacity, budget), jnp.int32),
            jax.ShapeDtypeStruct((rows, dim), values.dtype),
            jax.ShapeDtypeStruct((rows, budget), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
            jax.ShapeDtypeStruct((rows, budget), jnp.float32),
            *select_scratch(rows, stored, budget),
        ],
        warps=8,
        aliases={8: 0, 9: 1},
    )(
        ids,
        candidate_scores,
        all_scores,
        highest,
        reuse_lengths,
        scan_lengths,
        remembered.pushed,
        values.reshape(scans, stored, dim),
        remembered.candidates.reshape(rows),
        flat_supports,
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
