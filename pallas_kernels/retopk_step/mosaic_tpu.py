"""The ReTopK step as three TPU kernels.

1. ``recall``: similarities, the path, and the recalled supports; XLA makes their union.
2. The scan of the exact support, for key-value heads with a head that does not reuse.
3. ``finish``: fetches what a head ranks, the union or its exact support, once: scores, selection
   and output all come from those rows.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.candidates.mosaic_tpu import unique_tokens
from pallas_kernels.exact_support.mosaic_tpu import exact_support
from pallas_kernels.mosaic_tpu_lib import (
    HBM,
    LANES,
    Array,
    Chosen,
    Ref,
    Rows,
    attend_rows,
    block,
    call,
    check,
    choose,
    ends_of,
    fetch_rows,
    grouped_queries,
    in_rows,
    key_rows,
    key_score,
    list_chosen,
    list_scratch,
    output,
    packed_cache,
    round_up,
    row_cost,
    rows_scratch,
    score_rows,
)
from pallas_kernels.numerics import PAD
from pallas_kernels.packed import KEY, VALUE
from pallas_kernels.recall.mosaic_tpu import find
from pallas_kernels.retopk_step.reference import push
from pallas_kernels.retopk_step.types import (
    FALLBACK,
    REFRESH,
    REUSE,
    Remembered,
    ReTopKStep,
)


def rank_and_attend(
    q: jax.Array, keys: jax.Array, tokens: jax.Array, *, budget: int
) -> tuple[jax.Array, jax.Array]:
    """Scores tokens, keeps the K best and attends to them; every row is fetched once.

    Args:
        q: ``[B, H, D]``.
        keys: ``[B, G, S, D]`` of a packed cache, whose values are used as well.
        tokens: int32 ``[B, H, N]``, ascending, −1 for none.
        budget: K.

    Returns:
        Output ``[B, H, D]`` in the dtype of the cache, and support int32 ``[B, H, K]``.
    """
    cache = packed_cache(keys, KEY)
    batch, heads, dim = q.shape
    groups, lanes = keys.shape[1], cache.shape[3]
    programs, each, rows = batch * groups, heads // groups, key_rows(tokens.shape[2])
    padded = round_up(budget, LANES)

    def kernel(
        ends_ref: Ref,  # [BH]
        place_ref: Ref,  # [1, g * rows, 128] in SMEM
        tokens_ref: Ref,  # [1, g * rows, 128]
        q_ref: Ref,  # [1, g, D] float32
        cache_ref: Ref,  # [BG, S, 2, D]
        out_ref: Ref,  # [1, g, D] float32
        support_ref: Ref,  # [1, g, Kp]
        rows_ref: Ref,  # [g * rows * 128, 2, D]
        semaphore: Ref,
        keys_ref: Ref,  # [g * rows, 128]
        threshold_ref: Ref,  # [2, g, 128]
        gathered_ref: Ref,
        origin_ref: Ref,
    ) -> None:
        group = pl.program_id(0)
        end_of = lambda head: ends_ref[group * each + head]  # noqa: E731
        fetched = Rows(rows_ref, each, rows)
        fetch_rows(fetched, semaphore, cache_ref, place_ref, end_of, group)
        scored = score_rows(fetched, keys_ref, q_ref, tokens_ref, end_of, dim**-0.5)
        chosen = choose(scored, budget)
        threshold_ref[0] = jnp.broadcast_to(chosen.key, (each, LANES))
        threshold_ref[1] = jnp.broadcast_to(chosen.end, (each, LANES))
        per_block = scored.block_rows

        def finish(head: Array, carry: None) -> None:
            mine = Chosen(*(threshold_ref[part, pl.ds(head, 1), :1] for part in range(2)))

            def tokens_of(i: Array) -> Array:
                start = pl.multiple_of(head * rows + i * per_block, 8)
                return tokens_ref[0, pl.ds(start, per_block), :]

            positions, (listed,) = list_chosen(
                scored, mine, head, gathered_ref, origin_ref, [tokens_of]
            )
            support_ref[0, pl.ds(head, 1), :] = jnp.where(positions >= 0, listed, PAD)

            def key_row(i: Array) -> Array:
                return keys_ref[pl.ds(head * rows + i, 1), :]

            def mask(i: Array) -> Array:
                k = key_row(i)
                position = i * LANES + lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
                return mine.mask(k, position)

            out_ref[0, pl.ds(head, 1), :] = attend_rows(
                fetched,
                head,
                end_of(head),
                mask,
                lambda i: key_score(key_row(i)),
            )
            return carry

        lax.fori_loop(0, each, finish, None)

    laid_out = in_rows(tokens, groups, PAD)
    out, support = call(
        kernel,
        name="retopk_finish",
        grid=programs,
        inputs=[
            block(each * rows, LANES, memory=pltpu.SMEM),
            block(each * rows, LANES),
            block(each, lanes),
            HBM,
        ],
        outputs=[
            output(programs, each, lanes, dtype=jnp.float32),
            output(programs, each, padded, dtype=jnp.int32),
        ],
        scratch=[
            *rows_scratch(each, rows, lanes, cache.dtype),
            pltpu.VMEM((each * rows, LANES), jnp.int32),
            pltpu.VMEM((2, each, LANES), jnp.int32),
            *list_scratch(rows, budget, 1),
        ],
        cost=row_cost(batch * heads, rows, cache, products=2),
        scalars=1,
    )(
        ends_of(tokens),
        laid_out,
        laid_out,
        grouped_queries(q, cache),
        cache,
    )
    return (
        out[..., :dim].reshape(batch, heads, dim).astype(cache.dtype),
        support.reshape(batch, heads, padded)[..., :budget],
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
    check(packed_cache(keys, KEY) is not None and packed_cache(values, VALUE) is not None, "both")
    budget = remembered.supports.shape[3]
    found, recalled = find(
        q,
        remembered.queries,
        remembered.pushed,
        remembered.supports,
        entries=entries,
        by_recency=by_recency,
    )
    similar = (found.rho_max >= tau) & (found.rho_max > -jnp.inf)
    path = jnp.where(refresh_due[:, None], REFRESH, jnp.where(similar, REUSE, FALLBACK))
    path = path.astype(jnp.int32)
    reusing = (path == REUSE) & active[:, None]
    tokens, unique = unique_tokens(recalled, lengths, window=window)
    scanning = (path != REUSE) & active[:, None]
    exact, _ = exact_support(q, keys, lengths, scanning, budget=budget)
    spare = tokens.shape[2] - budget
    exact = jnp.pad(exact, ((0, 0), (0, 0), (0, spare)), constant_values=PAD)
    tokens = jnp.where(reusing[..., None], tokens, exact)  # PAD where neither
    out, support = rank_and_attend(q, keys, tokens, budget=budget)
    unique = jnp.where(reusing, unique, 0)
    return ReTopKStep(
        out,
        push(remembered, found.qbar, support, path, unique, active),
        support,
        path,
        found.rho_max,
        unique,
    )
