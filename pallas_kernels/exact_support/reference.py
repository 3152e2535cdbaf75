"""Exact support in plain XLA."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import PAD, clean_scores, top_k_support


def all_scores(q: jax.Array, keys: jax.Array, lengths: jax.Array) -> jax.Array:
    """Scores of every slot, float32 ``[B, H, S]``; −inf where not valid or not finite."""
    batch, heads, dim = q.shape
    groups, slots = keys.shape[1:3]
    scores = jnp.einsum(
        "bgqd,bgsd->bgqs",
        q.reshape(batch, groups, heads // groups, dim),
        keys,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    ).reshape(batch, heads, slots)
    valid = jnp.arange(slots)[None, None, :] < lengths[:, None, None]
    return clean_scores(scores * dim**-0.5, valid)


def exact_support(
    q: jax.Array, keys: jax.Array, lengths: jax.Array, wanted: jax.Array, *, budget: int
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.exact_support.exact_support`."""

    def scan() -> tuple[jax.Array, jax.Array]:
        support, scores = top_k_support(all_scores(q, keys, lengths), None, budget)
        keep = wanted[..., None]
        return jnp.where(keep, support, PAD), jnp.where(keep, scores, -jnp.inf)

    def skip() -> tuple[jax.Array, jax.Array]:
        shape = (*wanted.shape, budget)
        return jnp.full(shape, PAD, jnp.int32), jnp.full(shape, -jnp.inf, jnp.float32)

    return lax.cond(jnp.any(wanted), scan, skip)
