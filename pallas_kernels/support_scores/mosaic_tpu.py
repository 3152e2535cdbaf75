"""Support scores as a TPU kernel: row copies and one product a row of 128 tokens."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic_tpu_lib import (
    HBM,
    LANES,
    NOTHING,
    Ref,
    Rows,
    block,
    call,
    ends_of,
    fetch_rows,
    grouped_queries,
    in_rows,
    key_rows,
    key_score,
    out_of_rows,
    output,
    packed_cache,
    row_cost,
    rows_scratch,
    score_rows,
)
from pallas_kernels.packed import KEY


def support_scores(q: jax.Array, keys: jax.Array, support: jax.Array) -> jax.Array:
    """See `pallas_kernels.support_scores.support_scores`."""
    cache = packed_cache(keys, KEY)
    batch, heads, dim = q.shape
    groups, lanes = keys.shape[1], cache.shape[3]
    programs, each, rows = batch * groups, heads // groups, key_rows(support.shape[2])

    def kernel(
        ends_ref: Ref,  # [BH]
        place_ref: Ref,  # [1, g * rows, 128] in SMEM
        tokens_ref: Ref,  # [1, g * rows, 128]
        q_ref: Ref,  # [1, g, D] float32
        cache_ref: Ref,  # [BG, S, 2, D]
        keys_ref: Ref,  # [1, g * rows, 128]
        rows_ref: Ref,  # [g * rows * 128, 2, D]
        semaphore: Ref,
    ) -> None:
        group = pl.program_id(0)
        end_of = lambda head: ends_ref[group * each + head]  # noqa: E731
        fetched = Rows(rows_ref, each, rows)
        fetch_rows(fetched, semaphore, cache_ref, place_ref, end_of, group)
        score_rows(fetched, keys_ref.at[0], q_ref, tokens_ref, end_of, dim**-0.5)

    tokens = in_rows(support, groups, -1)
    (scored,) = call(
        kernel,
        name="support_scores",
        grid=programs,
        inputs=[
            block(each * rows, LANES, memory=pltpu.SMEM),
            block(each * rows, LANES),
            block(each, lanes),
            HBM,
        ],
        outputs=[output(programs, each * rows, LANES, dtype=jnp.int32)],
        scratch=rows_scratch(each, rows, lanes, cache.dtype),
        cost=row_cost(batch * heads, rows, cache, products=1),
        scalars=1,
    )(
        ends_of(support),
        tokens,
        tokens,
        grouped_queries(q, cache),
        cache,
    )
    scored = out_of_rows(scored, heads, support.shape[2])
    return jnp.where(scored > NOTHING, key_score(scored), -jnp.inf)
