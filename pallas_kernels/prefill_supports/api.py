"""Prefill supports: exact top-K of several past queries, each under its own causal mask."""

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import dispatch
from pallas_kernels.prefill_supports import mosaic_tpu, reference, triton

_IMPLEMENTATIONS = {
    "reference": reference.prefill_supports,
    "triton": triton.prefill_supports,
    "mosaic_tpu": mosaic_tpu.prefill_supports,
}
_PREFERENCE = {"gpu": ("triton",), "tpu": ("mosaic_tpu",)}


def prefill_supports(
    queries: jax.Array,
    keys: jax.Array,
    positions: jax.Array,
    *,
    budget: int,
    implementation: str | None = None,
) -> jax.Array:
    """Exact supports of past queries; query c sees the keys 0 … ``positions[c]``.

    Args:
        queries: ``[B, H, C, D]``, after positional encoding.
        keys: ``[B, G, S, D]``.
        positions: int32 ``[B, C]``; a negative one gives an empty support.
        budget: K.
        implementation: name of one, or None for the platform's best.

    Returns:
        int32 ``[B, H, C, K]``, ascending with −1 last. Equal scores: the lower token.
    """
    batch, heads, count, dim = queries.shape
    groups = keys.shape[1]
    if heads % groups:
        raise ValueError(f"queries have {heads} heads: expected a multiple of {groups}")
    chex.assert_shape(keys, (batch, groups, None, dim))
    chex.assert_shape(positions, (batch, count))
    chex.assert_type(positions, jnp.int32)
    run = dispatch("prefill_supports", _IMPLEMENTATIONS, implementation, _PREFERENCE)
    return run(queries, keys, positions, budget=budget)


__all__ = ["prefill_supports"]
