"""Exact attention: scan every key and attend to the K best."""

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import dispatch
from pallas_kernels.exact_attention import mosaic_tpu, reference, triton

_IMPLEMENTATIONS = {
    "reference": reference.exact_attention,
    "triton": triton.exact_attention,
    "mosaic_tpu": mosaic_tpu.exact_attention,
}
_PREFERENCE = {"gpu": ("triton",), "tpu": ("mosaic_tpu",)}


def exact_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array,
    wanted: jax.Array,
    *,
    budget: int,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`exact_support` and `sparse_attend` in one: softmax over the K keys with the best scores.

    Args:
        q: ``[B, H, D]`` current queries, after positional encoding.
        keys: ``[B, G, S, D]``.
        values: ``[B, G, S, D]``.
        lengths: int32 ``[B]``, valid tokens L, the current one included.
        wanted: bool ``[B, H]``, heads that attend; the others get an empty support and may cost
            nothing.
        budget: K.
        implementation: name of one, or None for the platform's best.

    Returns:
        Output ``[B, H, D]`` in the dtype of ``values``, zeros for an empty support; and the support
        int32 ``[B, H, K]``, as `exact_support` gives it.
    """
    batch, heads, dim = q.shape
    groups = keys.shape[1]
    if heads % groups:
        raise ValueError(f"q has {heads} heads: expected a multiple of the {groups} of keys")
    if budget < 1:
        raise ValueError(f"budget={budget}: expected 1 or more")
    chex.assert_shape([keys, values], (batch, groups, None, dim))
    chex.assert_shape(lengths, (batch,))
    chex.assert_shape(wanted, (batch, heads))
    chex.assert_type([lengths, wanted], [jnp.int32, jnp.bool_])
    run = dispatch("exact_attention", _IMPLEMENTATIONS, implementation, _PREFERENCE)
    return run(q, keys, values, lengths, wanted, budget=budget)


__all__ = ["exact_attention"]
