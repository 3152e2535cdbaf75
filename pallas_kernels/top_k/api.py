"""Top-K: the positions of the K largest scores, ties to the lower position."""

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import dispatch
from pallas_kernels.top_k import mosaic_tpu, reference, triton

_IMPLEMENTATIONS = {
    "reference": reference.top_k,
    "triton": triton.top_k,
    "mosaic_tpu": mosaic_tpu.top_k,
}
_PREFERENCE = {"gpu": ("triton",), "tpu": ("mosaic_tpu",)}


def top_k(
    scores: jax.Array, *, budget: int, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Exact top-K along the last axis.

    Args:
        scores: float32 ``[B, H, S]``; −inf is never kept; no NaN and no negative zero.
        budget: K.
        implementation: name of one, or None for the platform's best.

    Returns:
        Positions int32 ``[B, H, K]``, ascending with −1 last, and their scores float32
        ``[B, H, K]``, −inf at −1. Equal scores: the lower position.
    """
    chex.assert_rank(scores, 3)
    chex.assert_type(scores, jnp.float32)
    if budget < 1:
        raise ValueError(f"budget={budget}: expected 1 or more")
    run = dispatch("top_k", _IMPLEMENTATIONS, implementation, _PREFERENCE)
    return run(scores, budget=budget)


__all__ = ["top_k"]
