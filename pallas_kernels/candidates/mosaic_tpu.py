"""Candidates on a TPU: XLA sorts the union, a kernel fetches and scores the unique rows."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.candidates.types import Candidates
from pallas_kernels.numerics import PAD
from pallas_kernels.support_scores.mosaic_tpu import support_scores

_LAST = jnp.iinfo(jnp.int32).max


def unique_tokens(
    recalled: jax.Array, lengths: jax.Array, *, window: int
) -> tuple[jax.Array, jax.Array]:
    """Union of the recalled supports and the window, without gaps, so that one loop fetches it.

    Args:
        recalled: int32 ``[B, H, R, K]``, −1 for none.
        lengths: int32 ``[B]``.
        window: W.

    Returns:
        Tokens int32 ``[B, H, N]``, ascending with PAD last, and their number int32 ``[B, H]``.
    """
    batch, heads, entries, budget = recalled.shape
    tokens = jnp.where(recalled >= 0, recalled, _LAST).reshape(batch, heads, entries * budget)
    recent = lengths[:, None] - window + jnp.arange(window, dtype=jnp.int32)[None, :]  # [B, W]
    recent = jnp.where(recent >= 0, recent, _LAST)[:, None, :]
    recent = jnp.broadcast_to(recent, (batch, heads, window))
    tokens = lax.sort(jnp.concatenate([tokens, recent], axis=-1), is_stable=False)  # [B, H, N]
    repeated = jnp.pad(tokens[..., 1:] == tokens[..., :-1], ((0, 0), (0, 0), (1, 0)))
    tokens = lax.sort(jnp.where(repeated, _LAST, tokens), is_stable=False)
    tokens = jnp.where(tokens == _LAST, PAD, tokens)
    return tokens, jnp.sum(tokens != PAD, axis=-1, dtype=jnp.int32)


def candidates(
    q: jax.Array,
    keys: jax.Array,
    supports: jax.Array,
    slots: jax.Array,
    lengths: jax.Array,
    *,
    window: int,
) -> Candidates:
    """See `pallas_kernels.candidates.candidates`."""
    recalled = jnp.take_along_axis(supports, jnp.maximum(slots, 0)[..., None], axis=2)
    recalled = jnp.where((slots >= 0)[..., None], recalled, PAD)
    ids, unique = unique_tokens(recalled, lengths, window=window)
    return Candidates(ids, support_scores(q, keys, ids), unique)
