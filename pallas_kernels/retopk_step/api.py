"""One decode step of ReTopK attention for one layer."""

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import dispatch
from pallas_kernels.retopk_step import mosaic_tpu, reference, triton, types
from pallas_kernels.retopk_step.types import Remembered, ReTopKStep

_IMPLEMENTATIONS = {
    "reference": reference.retopk_step,
    "triton": triton.retopk_step,
    "mosaic_tpu": mosaic_tpu.retopk_step,
}
_PREFERENCE = {"gpu": ("triton",), "tpu": ("mosaic_tpu",)}


def retopk_step(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    remembered: Remembered,
    lengths: jax.Array,
    refresh_due: jax.Array,
    active: jax.Array,
    tau: float | jax.Array,
    *,
    entries: int,
    window: int,
    by_recency: bool = False,
    implementation: str | None = None,
) -> ReTopKStep:
    """Attends to the top-K of the recalled candidates, or of all keys where nothing is similar.

    The path of a head is refresh where due, else reuse if its largest similarity reaches ``tau``,
    else fallback. What is remembered should be donated: it is updated in place.

    Args:
        q: ``[B, H, D]`` current queries, after positional encoding.
        keys: ``[B, G, S, D]``, the current token's included.
        values: ``[B, G, S, D]``, the current token's included.
        remembered: of this layer.
        lengths: int32 ``[B]``, valid tokens L, the current one included: at least 1 in active rows.
        refresh_due: bool ``[B]``, rows whose heads all scan.
        active: bool ``[B]``; of other rows nothing is remembered or counted.
        tau: similarity from which on a head reuses; of all heads, or anything that broadcasts to
            ``[B, H]``.
        entries: R, entries to recall, at most C.
        window: W, most recent tokens that are always candidates.
        by_recency: merge the supports of the last R entries instead of the R most similar; the path
            still depends on the largest similarity.
        implementation: name of one, or None for the platform's best.
    """
    batch, heads, dim = q.shape
    groups = keys.shape[1]
    if heads % groups:
        raise ValueError(f"q has {heads} heads: expected a multiple of the {groups} of keys")
    capacity = remembered.queries.shape[2]
    if not 1 <= entries <= capacity:
        raise ValueError(f"entries={entries}: expected 1 to the ring's capacity {capacity}")
    if window < 0:
        raise ValueError(f"window={window}: expected 0 or more")
    chex.assert_shape(keys, (batch, groups, None, dim))
    chex.assert_equal_shape([keys, values])
    chex.assert_shape(remembered.queries, (batch, heads, capacity, dim))
    chex.assert_shape(remembered.supports, (batch, heads, capacity, None))
    chex.assert_shape([remembered.pushed, lengths, refresh_due, active], (batch,))
    chex.assert_shape(remembered.paths, (batch, heads, 3))
    chex.assert_shape(remembered.candidates, (batch, heads))
    chex.assert_shape(remembered.signals, (batch, heads, *types.SIGNALS))
    chex.assert_type([lengths, refresh_due, active], [jnp.int32, jnp.bool_, jnp.bool_])
    tau = jnp.broadcast_to(jnp.asarray(tau, jnp.float32), (batch, heads))
    run = dispatch("retopk_step", _IMPLEMENTATIONS, implementation, _PREFERENCE)
    return run(
        q,
        keys,
        values,
        remembered,
        lengths,
        refresh_due,
        active,
        tau,
        entries=entries,
        window=window,
        by_recency=by_recency,
    )


__all__ = ["ReTopKStep", "Remembered", "retopk_step"]
