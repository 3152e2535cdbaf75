"""Exact attention as four Triton kernels: scan, bound, filter, and selection with output.

With many heads the output is a fifth.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
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
from pallas_kernels.select.triton import Destination, Shortlist, load_picked
from pallas_kernels.sparse_attend.triton import (
    Target,
    at_once,
    attend_rows,
    attend_shortlist,
    spare_entries,
    splits,
)
from pallas_kernels.triton_lib import Array, Ref, barrier, call, round_up, store_at


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
    spare = spare_entries(budget, rows, dim)
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
        scores_ref: Ref,  # [BH, K] of `attend_rows`
        picks_ref: Ref,  # [BH, K + spare] scratch
        picked_scores_ref: Ref,  # [BH, K + spare] scratch
        starts_ref: Ref,  # [BH, P] scratch
    ) -> None:
        row, split = pl.program_id(0), pl.program_id(1)
        picks = Destination(picks_ref, picked_scores_ref, row, spare)
        lists = Listed(keys_ref, counts_ref)
        counts = load_counts(counts_ref, row, scan)  # while the length is read
        shortlist = lax.cond(
            lengths_ref[row] > 0,
            lambda: select_listed(lists, counts, starts_ref, row, scan, picks, warps=warps),
            Shortlist.none,
        )
        barrier()
        load = partial(load_picked, picks_ref, picked_scores_ref, row, number=shortlist.number)

        def put(k: Array, tokens: Array, mask: Array) -> None:
            store_at(support_ref, tokens, row, k, mask=mask)

        if attends:
            target = Target(values_ref, out_ref, row, split, pieces)
            attend_shortlist(load, shortlist, budget, spare, target, put, warps=warps)
        else:
            k = lax.iota(jnp.int32, round_up(budget))
            token, score = load(k)
            put(k, token, k < budget)
            store_at(scores_ref, score, row, k, mask=k < budget)

    out, support, kept, *_ = call(
        finish,
        name="exact_finish",
        grid=(rows, pieces),
        outputs=[
            jax.ShapeDtypeStruct((rows, dim), values.dtype),
            jax.ShapeDtypeStruct((rows, budget), jnp.int32),
            jax.ShapeDtypeStruct((rows, budget), jnp.float32),
            jax.ShapeDtypeStruct((rows, budget + spare), jnp.int32),
            jax.ShapeDtypeStruct((rows, budget + spare), jnp.float32),
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
