"""Support scores in plain XLA."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import PAD, clean_scores, gather_rows


def support_scores(q: jax.Array, keys: jax.Array, support: jax.Array) -> jax.Array:
    """See `pallas_kernels.support_scores.support_scores`."""
    scores = jnp.einsum(
        "bhd,bhnd->bhn",
        q,
        gather_rows(keys, support),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return clean_scores(scores * q.shape[-1] ** -0.5, support != PAD)
