"""Recall as a TPU kernel: one program a query head."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic_tpu_lib import Ref, block, call, estimate, output
from pallas_kernels.recall.types import Recalled

_OLDER = 2**30


def find(
    q: jax.Array,
    queries: jax.Array,
    pushed: jax.Array,
    supports: jax.Array,
    *,
    entries: int,
    by_recency: bool,
) -> tuple[Recalled, jax.Array]:
    """Recalls entries and their supports.

    Args:
        q: ``[B, H, D]``.
        queries: ``[B, H, C, D]``.
        pushed: int32 ``[B]``.
        supports: int32 ``[B, H, C, K]``.
        entries: R.
        by_recency: recall the last entries instead of the most similar.

    Returns:
        What `pallas_kernels.recall.recall` returns, and the supports of its slots, int32
        ``[B, H, R, K]``, −1 where there is none.
    """
    batch, heads, capacity, dim = queries.shape
    budget = supports.shape[3]
    total = batch * heads

    def kernel(
        pushed_ref: Ref,  # [B]
        q_ref: Ref,  # [1, 1, D] float32
        queries_ref: Ref,  # [1, C, D]
        supports_ref: Ref,  # [1, C, K]
        qbar_ref: Ref,  # [1, 1, D]
        slots_ref: Ref,  # [1, 1, R]
        rho_ref: Ref,  # [1, 1, 1]
        recalled_ref: Ref,  # [1, R, K]
    ) -> None:
        number = pushed_ref[pl.program_id(0) // heads]
        query = q_ref[0]
        norm = jnp.sqrt(jnp.sum(query * query, axis=1, keepdims=True))
        usable = (norm > 0.0) & (norm < float("inf"))
        qbar = jnp.where(usable, query / jnp.where(usable, norm, 1.0), 0.0)
        qbar_ref[0] = qbar
        rho = jnp.sum(queries_ref[0].astype(jnp.float32) * qbar, axis=1, keepdims=True)  # [C, 1]
        rho = jnp.clip(rho, -1.0, 1.0)
        newest = lax.rem(number + capacity - 1, capacity)
        age = newest - lax.broadcasted_iota(jnp.int32, (capacity, 1), 0)
        age = jnp.where(age < 0, age + capacity, age)
        known = age < number
        rho = jnp.where(known & usable, rho, -float("inf"))
        rho_ref[0] = jnp.max(rho, axis=0, keepdims=True)
        rank = jnp.where(known, -age.astype(jnp.float32), -float("inf")) if by_recency else rho
        place = lax.broadcasted_iota(jnp.int32, (1, entries), 1)
        slots = jnp.full((1, entries), -1, jnp.int32)
        for entry in range(entries):
            best = jnp.max(rank)
            tied = (rank == best) & (rank > -float("inf"))
            youngest = jnp.min(jnp.where(tied, age, _OLDER))
            slot = newest - youngest
            slot = jnp.where(slot < 0, slot + capacity, slot)
            found = youngest < _OLDER
            slots = jnp.where(place == entry, jnp.where(found, slot, -1), slots)
            support = supports_ref[0, pl.ds(jnp.maximum(slot, 0), 1), :]
            recalled_ref[0, entry : entry + 1, :] = jnp.where(found, support, -1)
            rank = jnp.where(age == youngest, -float("inf"), rank)
        slots_ref[0] = slots

    qbar, slots, rho_max, recalled = call(
        kernel,
        name="retopk_recall",
        grid=total,
        inputs=[block(1, dim), block(capacity, dim), block(capacity, budget)],
        outputs=[
            output(total, 1, dim, dtype=jnp.float32),
            output(total, 1, entries, dtype=jnp.int32),
            output(total, 1, 1, dtype=jnp.float32),
            output(total, entries, budget, dtype=jnp.int32),
        ],
        cost=estimate(products=queries.size, read=queries.nbytes + supports.nbytes),
        scalars=1,
    )(
        pushed,
        q.reshape(total, 1, dim).astype(jnp.float32),
        queries.reshape(total, capacity, dim),
        supports.reshape(total, capacity, budget),
    )
    found = Recalled(
        qbar.reshape(batch, heads, dim),
        slots.reshape(batch, heads, entries),
        rho_max.reshape(batch, heads),
    )
    return found, recalled.reshape(batch, heads, entries, budget)


def recall(q: jax.Array, queries: jax.Array, pushed: jax.Array, *, entries: int) -> Recalled:
    """See `pallas_kernels.recall.recall`."""
    nothing = jnp.full((*queries.shape[:3], 1), -1, jnp.int32)
    return find(q, queries, pushed, nothing, entries=entries, by_recency=False)[0]
