"""Support scores: exact scores of tokens that were chosen by other means."""

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import dispatch
from pallas_kernels.support_scores import mosaic_tpu, reference, triton

_IMPLEMENTATIONS = {
    "reference": reference.support_scores,
    "triton": triton.support_scores,
    "mosaic_tpu": mosaic_tpu.support_scores,
}
_PREFERENCE = {"gpu": ("triton",), "tpu": ("mosaic_tpu",)}


def support_scores(
    q: jax.Array, keys: jax.Array, support: jax.Array, *, implementation: str | None = None
) -> jax.Array:
    """``q · k / sqrt(D)`` with float32 accumulation over a support.

    Args:
        q: ``[B, H, D]`` current queries, after positional encoding.
        keys: ``[B, G, S, D]``.
        support: int32 ``[B, H, K]``, −1 for none.
        implementation: name of one, or None for the platform's best.

    Returns:
        float32 ``[B, H, K]``; −inf at −1 and where the score is not finite.
    """
    batch, heads, dim = q.shape
    groups = keys.shape[1]
    if heads % groups:
        raise ValueError(f"q has {heads} heads: expected a multiple of the {groups} of keys")
    chex.assert_shape(keys, (batch, groups, None, dim))
    chex.assert_shape(support, (batch, heads, None))
    chex.assert_type(support, jnp.int32)
    run = dispatch("support_scores", _IMPLEMENTATIONS, implementation, _PREFERENCE)
    return run(q, keys, support)


__all__ = ["support_scores"]
