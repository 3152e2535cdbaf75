"""Sparse attend as a TPU kernel: row copies, then a masked softmax over the rows in VMEM."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic_tpu_lib import (
    HBM,
    LANES,
    Array,
    Ref,
    Rows,
    attend_rows,
    block,
    call,
    ends_of,
    fetch_rows,
    in_rows,
    key_rows,
    key_score,
    order_key,
    output,
    packed_cache,
    row_cost,
    rows_scratch,
)
from pallas_kernels.packed import VALUE


def sparse_attend(values: jax.Array, support: jax.Array, scores: jax.Array) -> jax.Array:
    """See `pallas_kernels.sparse_attend.sparse_attend`."""
    cache = packed_cache(values, VALUE)
    batch, heads, slots = support.shape
    groups, dim, lanes = values.shape[1], values.shape[3], cache.shape[3]
    programs, each, rows = batch * groups, heads // groups, key_rows(slots)

    def kernel(
        ends_ref: Ref,  # [BH]
        place_ref: Ref,  # [1, g * rows, 128] in SMEM
        tokens_ref: Ref,  # [1, g * rows, 128]
        keys_ref: Ref,  # [1, g * rows, 128]
        cache_ref: Ref,  # [BG, S, 2, D]
        out_ref: Ref,  # [1, g, D] float32
        rows_ref: Ref,  # [g * rows * 128, 2, D]
        semaphore: Ref,
    ) -> None:
        group = pl.program_id(0)
        end_of = lambda head: ends_ref[group * each + head]  # noqa: E731
        fetched = Rows(rows_ref, each, rows)
        fetch_rows(fetched, semaphore, cache_ref, place_ref, end_of, group)

        def attend(head: Array, carry: None) -> None:
            out_ref[0, pl.ds(head, 1), :] = attend_rows(
                fetched,
                head,
                end_of(head),
                lambda i: tokens_ref[0, pl.ds(head * rows + i, 1), :] >= 0,
                lambda i: key_score(keys_ref[0, pl.ds(head * rows + i, 1), :]),
            )
            return carry

        lax.fori_loop(0, each, attend, None)

    tokens = in_rows(support, groups, -1)
    (out,) = call(
        kernel,
        name="sparse_attend",
        grid=programs,
        inputs=[
            block(each * rows, LANES, memory=pltpu.SMEM),
            block(each * rows, LANES),
            block(each * rows, LANES),
            HBM,
        ],
        outputs=[output(programs, each, lanes, dtype=jnp.float32)],
        scratch=rows_scratch(each, rows, lanes, cache.dtype),
        cost=row_cost(batch * heads, rows, cache, products=1),
        scalars=1,
    )(ends_of(support), tokens, tokens, in_rows(order_key(scores), groups, 0), cache)
    return out[..., :dim].reshape(batch, heads, dim).astype(values.dtype)
