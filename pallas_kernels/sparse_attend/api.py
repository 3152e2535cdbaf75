"""Sparse attend: softmax over a support's scores and the weighted sum of its values."""

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import dispatch
from pallas_kernels.sparse_attend import mosaic_tpu, reference, triton

_IMPLEMENTATIONS = {
    "reference": reference.sparse_attend,
    "triton": triton.sparse_attend,
    "mosaic_tpu": mosaic_tpu.sparse_attend,
}
_PREFERENCE = {"gpu": ("triton",), "tpu": ("mosaic_tpu",)}


def sparse_attend(
    values: jax.Array, support: jax.Array, scores: jax.Array, *, implementation: str | None = None
) -> jax.Array:
    """Attention output over the support (equation 12): ``softmax(scores) · values[support]``.

    Args:
        values: ``[B, G, S, D]``.
        support: int32 ``[B, H, K]``, −1 for none.
        scores: float32 ``[B, H, K]``, −inf where the support is −1.
        implementation: name of one, or None for the platform's best.

    Returns:
        ``[B, H, D]`` in the dtype of ``values``; softmax and sum in float32. An empty support gives
        zeros.
    """
    batch, heads = support.shape[:2]
    if heads % values.shape[1]:
        raise ValueError(f"support has {heads} heads: expected a multiple of {values.shape[1]}")
    chex.assert_equal_shape([support, scores])
    chex.assert_shape(values, (batch, None, None, None))
    chex.assert_type([support, scores], [jnp.int32, jnp.float32])
    run = dispatch("sparse_attend", _IMPLEMENTATIONS, implementation, _PREFERENCE)
    return run(values, support, scores)


__all__ = ["sparse_attend"]
