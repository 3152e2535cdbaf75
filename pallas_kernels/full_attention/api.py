"""Full attention of one query token a row over a key-value cache."""

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import dispatch
from pallas_kernels.full_attention import cudnn, reference, triton

_IMPLEMENTATIONS = {
    "reference": reference.full_attention,
    "triton": triton.full_attention,
    "cudnn": cudnn.full_attention,
}
_PREFERENCE = {"gpu": ("triton",)}


def full_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """``softmax(q · k / sqrt(D)) · v`` over the L valid keys.

    Args:
        q: ``[B, H, D]`` current queries, after positional encoding.
        keys: ``[B, G, S, D]``.
        values: ``[B, G, S, D]``.
        lengths: int32 ``[B]``, valid tokens L, the current one included.
        implementation: name of one, or None for the platform's best.

    Returns:
        ``[B, H, D]`` in the dtype of ``values``. A score that is not finite gets no weight, so that
        a bad key spoils nothing else; no finite score at all gives zeros.
    """
    batch, heads, dim = q.shape
    groups = keys.shape[1]
    if heads % groups:
        raise ValueError(f"q has {heads} heads: expected a multiple of the {groups} of keys")
    chex.assert_shape(keys, (batch, groups, None, dim))
    chex.assert_equal_shape([keys, values])
    chex.assert_shape(lengths, (batch,))
    chex.assert_type(lengths, jnp.int32)
    run = dispatch("full_attention", _IMPLEMENTATIONS, implementation, _PREFERENCE)
    return run(q, keys, values, lengths)


__all__ = ["full_attention"]
