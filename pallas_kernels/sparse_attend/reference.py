"""Sparse attend in plain XLA."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import PAD, gather_rows


def sparse_attend(values: jax.Array, support: jax.Array, scores: jax.Array) -> jax.Array:
    """See `pallas_kernels.sparse_attend.sparse_attend`."""
    best = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(best > -jnp.inf, best, 0.0))  # [B, H, K]
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    rows = jnp.where((support != PAD)[..., None], gather_rows(values, support), 0)  # [B, H, K, D]
    out = jnp.einsum(
        "bhk,bhkd->bhd", weights, rows.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    return out.astype(values.dtype)
