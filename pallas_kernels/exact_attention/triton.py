"""Exact attention as four Triton kernels: scan, bound, filter, and selection with output.

With many heads the output is a fifth.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.exact_support.triton import (
    SELECT_WARPS,
    Scan,
    run_bound,
    run_filter,
    run_scan,
    select_listed,
)
from pallas_kernels.select.triton import Destination, Listing
from pallas_kernels.sparse_attend.triton import at_once, attend, attend_rows, part_of, splits
from pallas_kernels.triton_lib import Array, Ref, barrier, call, load_at, store_at


def exact_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array,
    wanted: jax.Array,
    *,
    budget: int,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.exact_attention.exact_attention`."""
    batch, heads, dim = q.shape
    groups, stored = keys.shape[1:3]
    rows = batch * heads
    scan = Scan.of(batch * groups, heads // groups, stored, dim, keys.dtype, budget)
    attends = at_once(rows)
    pieces = splits(rows, dim) if attends else 1
    flat_values = values.reshape(batch * groups, stored, dim)
    visible = jnp.where(wanted, lengths[:, None], 0).reshape(rows)
    flat_keys = keys.reshape(batch * groups, stored, dim)
    scores, highest = run_scan(q.reshape(rows, dim), flat_keys, visible, scan)
    bounds = run_bound(highest, visible, scan, budget)
    tokens, counts = run_filter(scores, bounds, visible, scan)

    def finish(
        values_ref: Ref,  # [BG, S, D]
        all_scores_ref: Ref,  # [BH, S]
        tokens_ref: Ref,  # [BH, P * stretch]
        counts_ref: Ref,  # [BH, P]
        lengths_ref: Ref,  # [BH]
        out_ref: Ref,  # [BH, D]
        support_ref: Ref,  # [BH, K]
        scores_ref: Ref,  # [BH, K] of `attend_rows`
        picks_ref: Ref,  # [BH, K] scratch
        starts_ref: Ref,  # [BH, P] scratch
    ) -> None:
        row, split = pl.program_id(0), pl.program_id(1)
        picks = Destination(picks_ref, None, row)

        @pl.when(lengths_ref[row] > 0)
        def _() -> None:
            select_listed(all_scores_ref, tokens_ref, counts_ref, starts_ref, row, scan, picks)

        @pl.when(lengths_ref[row] <= 0)
        def _() -> None:
            picks.pad(jnp.int32(0))

        def look_up(k: Array) -> Listing:
            token = load_at(picks_ref, row, k, mask=k < budget, other=-1)
            there, place = token >= 0, jnp.maximum(token, 0)
            score = load_at(all_scores_ref, row, place, mask=there, other=-float("inf"))
            return Listing(token, score)

        barrier()
        k = part_of(budget, split, pieces)
        part = look_up(k)
        store_at(support_ref, part.tokens, row, k, mask=k < budget)
        if attends:
            attend(look_up, budget, values_ref, out_ref, row, split, pieces=pieces)
        else:
            store_at(scores_ref, part.scores, row, k, mask=k < budget)

    out, support, kept, *_ = call(
        finish,
        name="exact_finish",
        grid=(rows, pieces),
        outputs=[
            jax.ShapeDtypeStruct((rows, dim), values.dtype),
            jax.ShapeDtypeStruct((rows, budget), jnp.int32),
            jax.ShapeDtypeStruct((rows, budget), jnp.float32),
            jax.ShapeDtypeStruct((rows, budget), jnp.int32),
            jax.ShapeDtypeStruct((rows, scan.stretches), jnp.int32),
        ],
        warps=SELECT_WARPS,
    )(
        flat_values,
        scores,
        tokens,
        counts,
        visible,
    )
    if not attends:
        out = attend_rows(flat_values, support, kept)
    return out.reshape(batch, heads, dim), support.reshape(batch, heads, budget)
