"""Prefill supports on a TPU: one exact scan a query."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.exact_support.mosaic_tpu import exact_support


def prefill_supports(
    queries: jax.Array, keys: jax.Array, positions: jax.Array, *, budget: int
) -> jax.Array:
    """See `pallas_kernels.prefill_supports.prefill_supports`."""

    def one(query: tuple[jax.Array, jax.Array]) -> jax.Array:
        q, position = query  # [B, H, D], [B]
        lengths = jnp.maximum(position + 1, 0)
        wanted = jnp.broadcast_to(lengths[:, None] > 0, q.shape[:2])
        return exact_support(q, keys, lengths, wanted, budget=budget)[0]

    supports = lax.map(one, (jnp.moveaxis(queries, 2, 0), jnp.moveaxis(positions, 1, 0)))
    return jnp.moveaxis(supports, 0, 2)
