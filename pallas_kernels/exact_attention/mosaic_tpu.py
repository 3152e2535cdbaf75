"""Exact attention in TPU kernels: the scan with its selection, then the output."""

import jax

from pallas_kernels.exact_support.mosaic_tpu import exact_support
from pallas_kernels.sparse_attend.mosaic_tpu import sparse_attend


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
