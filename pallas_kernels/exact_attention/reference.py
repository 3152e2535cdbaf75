"""Exact attention in plain XLA."""

import jax

from pallas_kernels.exact_support.reference import exact_support
from pallas_kernels.sparse_attend.reference import sparse_attend


def exact_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array,
    wanted: jax.Array,
    *,
    budget: int,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.exact_attention.exact_attention`."""
    support, scores = exact_support(q, keys, lengths, wanted, budget=budget)
    return sparse_attend(values, support, scores), support
