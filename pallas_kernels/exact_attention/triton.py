"""Exact attention as four Triton kernels: scan, bound, filter, and selection with output.

With many heads the output is a fifth.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.exact_support.triton import (
    Listed,
    Scan,
    load_counts,
    run_bound,
    run_filter,
    run_scan,
    select_listed,
    selecting_warps,
)
from pallas_kernels.select.triton import Destination, load_picked
from pallas_kernels.sparse_attend.triton import at_once, attend, attend_rows, splits
from pallas_kernels.triton_lib import Ref, barrier, call


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
    attends, warps = at_once(rows), selecting_warps(rows)
    pieces = splits(rows, dim) if attends else 1
    flat_values = values.reshape(batch * groups, stored, dim)
    visible = jnp.where(wanted, lengths[:, None], 0).reshape(rows)
    flat_keys = keys.reshape(batch * groups, stored, dim)
    scores, highest = run_scan(q.reshape(rows, dim), flat_keys, visible, scan)
    bounds = run_bound(highest, visible, scan, budget)
    listed = run_filter(scores, bounds, visible, scan)

    def finish(
        values_ref: Ref,  # [BG, S, D]
        keys_ref: Ref,  # [BH, 2, P * stretch]
        counts_ref: Ref,  # [BH, P]
        lengths_ref: Ref,  # [BH]
        out_ref: Ref,  # [BH, D]
        support_ref: Ref,  # [BH, K]
        scores_ref: Ref,  # [BH, K]
        starts_ref: Ref,  # [BH, P] scratch
    ) -> None:
        row, split = pl.program_id(0), pl.program_id(1)
        picked = Destination(support_ref, scores_ref, row)
        lists = Listed(keys_ref, counts_ref)
        counts = load_counts(counts_ref, row, scan)  # while the length is read

        @pl.when(lengths_ref[row] > 0)
        def _() -> None:
            select_listed(lists, counts, starts_ref, row, scan, picked, warps=warps)

        @pl.when(lengths_ref[row] <= 0)
        def _() -> None:
            picked.pad(jnp.int32(0))

        if attends:
            barrier()
            load = partial(load_picked, support_ref, scores_ref, row)
            attend(load, budget, values_ref, out_ref, row, split, pieces=pieces)

    out, support, kept, _ = call(
        finish,
        name="exact_finish",
        grid=(rows, pieces),
        outputs=[
            jax.ShapeDtypeStruct((rows, dim), values.dtype),
            jax.ShapeDtypeStruct((rows, budget), jnp.int32),
            jax.ShapeDtypeStruct((rows, budget), jnp.float32),
            jax.ShapeDtypeStruct((rows, scan.stretches), jnp.int32),
        ],
        warps=warps,
    )(
        flat_values,
        *listed,
        visible,
    )
    if not attends:
        out = attend_rows(flat_values, support, kept)
    return out.reshape(batch, heads, dim), support.reshape(batch, heads, budget)
