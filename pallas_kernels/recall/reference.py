"""Recall in plain XLA."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.recall.types import Recalled


def normalise(q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Unit vectors along the last axis in float32, and where the norm is usable ``[...]``."""
    q = q.astype(jnp.float32)
    norm = jnp.sqrt(jnp.sum(q * q, axis=-1))
    usable = jnp.isfinite(norm) & (norm > 0)
    unit = q / jnp.where(usable, norm, 1.0)[..., None]
    return jnp.where(usable[..., None], unit, 0.0), usable


def recall(q: jax.Array, queries: jax.Array, pushed: jax.Array, *, entries: int) -> Recalled:
    """See `pallas_kernels.recall.recall`."""
    capacity = queries.shape[2]
    qbar, usable = normalise(q)  # [B, H, D], [B, H]
    rho = jnp.einsum(
        "bhd,bhcd->bhc", qbar, queries.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    rho = jnp.clip(rho, -1.0, 1.0)  # rounding may carry a cosine beyond
    rho = jnp.where(rho == 0.0, 0.0, rho)  # top_k puts 0 before -0: a tie that age must decide
    age = jnp.arange(capacity, dtype=jnp.int32)
    slot_of_age = (pushed[:, None] - 1 - age[None, :]) % capacity  # [B, C], newest first
    slot_of_age = jnp.broadcast_to(slot_of_age[:, None, :], rho.shape)
    known = (age[None, :] < pushed[:, None])[:, None, :] & usable[..., None]
    by_age = jnp.where(known, jnp.take_along_axis(rho, slot_of_age, axis=-1), -jnp.inf)
    similarity, ages = lax.top_k(by_age, entries)
    slots = jnp.take_along_axis(slot_of_age, ages, axis=-1)
    return Recalled(qbar, jnp.where(similarity > -jnp.inf, slots, -1), similarity[..., 0])
