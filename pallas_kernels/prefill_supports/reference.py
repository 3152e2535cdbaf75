"""Prefill supports in plain XLA: one query at a time, so that C × L scores never exist at once."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.exact_support.reference import all_scores
from pallas_kernels.numerics import top_k_support


def prefill_supports(
    queries: jax.Array, keys: jax.Array, positions: jax.Array, *, budget: int
) -> jax.Array:
    """See `pallas_kernels.prefill_supports.prefill_supports`."""

    def one(query: tuple[jax.Array, jax.Array]) -> jax.Array:
        q, position = query  # [B, H, D], [B]
        return top_k_support(all_scores(q, keys, position + 1), None, budget)[0]

    supports = lax.map(one, (jnp.moveaxis(queries, 2, 0), jnp.moveaxis(positions, 1, 0)))
    return jnp.moveaxis(supports, 0, 2)
