"""Select: exact top-K of scored candidates, ties to the lower token."""

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import dispatch
from pallas_kernels.select import mosaic_tpu, reference, triton

_IMPLEMENTATIONS = {
    "reference": reference.select,
    "triton": triton.select,
    "mosaic_tpu": mosaic_tpu.select,
}
_PREFERENCE = {"gpu": ("triton",), "tpu": ("mosaic_tpu",)}


def select(
    ids: jax.Array, scores: jax.Array, *, budget: int, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Keeps the K best candidates (equation 11).

    Args:
        ids: int32 ``[B, H, N]``, ascending where the score is finite.
        scores: float32 ``[B, H, N]``, −inf where there is no candidate; no NaN.
        budget: K.
        implementation: name of one, or None for the platform's best.

    Returns:
        Support int32 ``[B, H, K]``, ascending with −1 last, and its scores float32 ``[B, H, K]``,
        −inf at −1. Equal scores: the lower token.
    """
    chex.assert_equal_shape([ids, scores])
    chex.assert_rank(ids, 3)
    chex.assert_type([ids, scores], [jnp.int32, jnp.float32])
    if budget < 1:
        raise ValueError(f"budget={budget}: expected 1 or more")
    run = dispatch("select", _IMPLEMENTATIONS, implementation, _PREFERENCE)
    return run(ids, scores, budget=budget)


__all__ = ["select"]
