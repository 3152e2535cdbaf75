"""Full attention in plain XLA."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.exact_support.reference import all_scores


def full_attention(
    q: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array
) -> jax.Array:
    """See `pallas_kernels.full_attention.full_attention`."""
    batch, heads, dim = q.shape
    groups, slots = keys.shape[1:3]
    scores = all_scores(q, keys, lengths)  # [B, H, S]
    best = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(best > -jnp.inf, best, 0.0))
    total = jnp.sum(weights, axis=-1)  # [B, H]
    out = jnp.einsum(
        "bgqs,bgsd->bgqd",
        weights.reshape(batch, groups, heads // groups, slots).astype(values.dtype),
        values,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    ).reshape(batch, heads, dim)
    return (out / jnp.where(total > 0, total, 1.0)[..., None]).astype(values.dtype)
