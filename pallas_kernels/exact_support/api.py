"""Exact support: scan every key and keep the K best."""

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import dispatch
from pallas_kernels.exact_support import mosaic_tpu, reference, triton

_IMPLEMENTATIONS = {
    "reference": reference.exact_support,
    "triton": triton.exact_support,
    "mosaic_tpu": mosaic_tpu.exact_support,
}
_PREFERENCE = {"gpu": ("triton",), "tpu": ("mosaic_tpu",)}


def exact_support(
    q: jax.Array,
    keys: jax.Array,
    lengths: jax.Array,
    wanted: jax.Array,
    *,
    budget: int,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Scores all L keys, ``q · k / sqrt(D)`` with float32 accumulation, and keeps the K best.

    Args:
        q: ``[B, H, D]`` current queries, after positional encoding.
        keys: ``[B, G, S, D]``.
        lengths: int32 ``[B]``, valid tokens L, the current one included.
        wanted: bool ``[B, H]``, heads whose support is needed; the others get an empty support and
            may cost nothing.
        budget: K.
        implementation: name of one, or None for the platform's best.

    Returns:
        Support int32 ``[B, H, K]``, ascending with −1 last, and its scores float32 ``[B, H, K]``,
        −inf at −1. Equal scores: the lower token. Scores that are not finite are never kept.
    """
    batch, heads, dim = q.shape
    groups = keys.shape[1]
    if heads % groups:
        raise ValueError(f"q has {heads} heads: expected a multiple of the {groups} of keys")
    chex.assert_shape(keys, (batch, groups, None, dim))
    chex.assert_shape(lengths, (batch,))
    chex.assert_shape(wanted, (batch, heads))
    chex.assert_type([lengths, wanted], [jnp.int32, jnp.bool_])
    if budget < 1:
        raise ValueError(f"budget={budget}: expected 1 or more")
    run = dispatch("exact_support", _IMPLEMENTATIONS, implementation, _PREFERENCE)
    return run(q, keys, lengths, wanted, budget=budget)


__all__ = ["exact_support"]
