"""Select in plain XLA."""

import jax

from pallas_kernels.numerics import top_k_support


def select(ids: jax.Array, scores: jax.Array, *, budget: int) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.select.select`."""
    return top_k_support(scores, ids, budget)
