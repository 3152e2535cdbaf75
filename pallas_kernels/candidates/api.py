"""Candidates: union of recalled supports and recent tokens, scored exactly."""

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.candidates import mosaic_tpu, reference, triton
from pallas_kernels.candidates.types import Candidates
from pallas_kernels.dispatch import dispatch

_IMPLEMENTATIONS = {
    "reference": reference.candidates,
    "triton": triton.candidates,
    "mosaic_tpu": mosaic_tpu.candidates,
}
_PREFERENCE = {"gpu": ("triton",), "tpu": ("mosaic_tpu",)}


def candidates(
    q: jax.Array,
    keys: jax.Array,
    supports: jax.Array,
    slots: jax.Array,
    lengths: jax.Array,
    *,
    window: int,
    implementation: str | None = None,
) -> Candidates:
    """Merges the recalled supports with the window and scores them (equations 8 to 10).

    ``scores = q · k / sqrt(D)`` with float32 accumulation, over the unique tokens of the supports
    in ``slots`` and of ``max(0, L − W) … L − 1``.

    Args:
        q: ``[B, H, D]`` current queries, after positional encoding.
        keys: ``[B, G, S, D]``.
        supports: int32 ``[B, H, C, K]``, each ascending with −1 last, tokens below ``lengths``.
        slots: int32 ``[B, H, R]``, slots to merge; −1 for none.
        lengths: int32 ``[B]``, valid tokens L, the current one included.
        window: W; 0 for no window.
        implementation: name of one, or None for the platform's best.
    """
    batch, heads, dim = q.shape
    groups = keys.shape[1]
    if heads % groups:
        raise ValueError(f"q has {heads} heads: expected a multiple of the {groups} of keys")
    chex.assert_shape(keys, (batch, groups, None, dim))
    chex.assert_shape(supports, (batch, heads, None, None))
    chex.assert_shape(slots, (batch, heads, None))
    chex.assert_shape(lengths, (batch,))
    chex.assert_type([supports, slots, lengths], jnp.int32)
    if window < 0:
        raise ValueError(f"window={window}: expected 0 or more")
    run = dispatch("candidates", _IMPLEMENTATIONS, implementation, _PREFERENCE)
    return run(q, keys, supports, slots, lengths, window=window)


__all__ = ["Candidates", "candidates"]
