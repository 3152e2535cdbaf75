"""The ReTopK step as the composition of the plain XLA forms of its parts."""

import jax
import jax.numpy as jnp

from pallas_kernels.candidates.reference import candidates
from pallas_kernels.exact_support.reference import exact_support
from pallas_kernels.numerics import PAD
from pallas_kernels.recall.reference import recall
from pallas_kernels.retopk_step.types import (
    FALLBACK,
    REFRESH,
    REUSE,
    Remembered,
    ReTopKStep,
)
from pallas_kernels.select.reference import select
from pallas_kernels.sparse_attend.reference import sparse_attend


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
    queries, supports, pushed = remembered[:3]
    capacity, budget = supports.shape[2:]
    found = recall(q, queries, pushed, entries=entries)
    similar = (found.rho_max >= tau) & (found.rho_max > -jnp.inf)
    path = jnp.where(refresh_due[:, None], REFRESH, jnp.where(similar, REUSE, FALLBACK))
    path = path.astype(jnp.int32)
    counted = active[:, None]
    slots = newest_slots(pushed, capacity, found.slots.shape) if by_recency else found.slots
    scored = candidates(q, keys, supports, slots, lengths, window=window)
    support, scores = select(scored.ids, scored.scores, budget=budget)
    wanted = (path != REUSE) & counted
    exact, exact_scores = exact_support(q, keys, lengths, wanted, budget=budget)
    support = jnp.where(wanted[..., None], exact, support)
    scores = jnp.where(wanted[..., None], exact_scores, scores)
    support = jnp.where(counted[..., None], support, PAD)
    scores = jnp.where(counted[..., None], scores, -jnp.inf)
    unique = jnp.where((path == REUSE) & counted, scored.unique, 0)
    return ReTopKStep(
        sparse_attend(values, support, scores),
        push(remembered, found.qbar, support, path, unique, active),
        support,
        path,
        found.rho_max,
        unique,
    )


def push(
    remembered: Remembered,
    qbar: jax.Array,
    support: jax.Array,
    path: jax.Array,
    unique: jax.Array,
    active: jax.Array,
) -> Remembered:
    """What is remembered after a step; of rows that are not active, what was.

    Args:
        remembered: before the step.
        qbar: float32 ``[B, H, D]``.
        support: int32 ``[B, H, K]``.
        path: int32 ``[B, H]``.
        unique: int32 ``[B, H]``, unique candidates of a head that reuses; 0 of another.
        active: bool ``[B]``.
    """
    queries, supports, pushed, paths, candidate_total, signals = remembered
    capacity = queries.shape[2]
    # Makes the ring's write wait for its reads; free to overlap, XLA would copy it first.
    qbar, support = jax.lax.optimization_barrier((qbar, support))
    rows = jnp.arange(pushed.shape[0])
    slot = jnp.where(active, pushed % capacity, capacity)  # capacity: dropped
    taken = (path[..., None] == jnp.arange(3)[None, None]) & active[:, None, None]
    return Remembered(
        queries.at[rows, :, slot].set(qbar.astype(queries.dtype), mode="drop"),
        supports.at[rows, :, slot].set(support, mode="drop"),
        pushed + active.astype(jnp.int32),
        paths + taken.astype(jnp.int32),
        candidate_total + unique,
        signals,
    )


def newest_slots(pushed: jax.Array, capacity: int, shape: tuple[int, ...]) -> jax.Array:
    """Slots of the last R entries, the newest first, −1 where fewer are filled.

    Args:
        pushed: int32 ``[B]``.
        capacity: C.
        shape: ``(B, H, R)`` of the result.
    """
    age = jnp.arange(shape[2], dtype=jnp.int32)[None]
    slots = jnp.where(age < pushed[:, None], (pushed[:, None] - 1 - age) % capacity, -1)  # [B, R]
    return jnp.broadcast_to(slots[:, None], shape)
