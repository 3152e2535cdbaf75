"""Candidates in plain XLA: sort the union, drop repeats, gather and score."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.candidates.types import Candidates
from pallas_kernels.numerics import PAD, clean_scores, gather_rows

_LAST = jnp.iinfo(jnp.int32).max


def union(
    supports: jax.Array, slots: jax.Array, lengths: jax.Array, *, window: int
) -> tuple[jax.Array, jax.Array]:
    """Unique tokens of the recalled supports and the window.

    Returns:
        Tokens int32 ``[B, H, N]``, ascending but for PAD in place of a repeat or an empty slot, and
        their number int32 ``[B, H]``.
    """
    batch, heads, _, budget = supports.shape
    entries = slots.shape[2]
    recalled = jnp.take_along_axis(supports, jnp.maximum(slots, 0)[..., None], axis=2)
    used = (slots >= 0)[..., None] & (recalled >= 0)
    recalled = jnp.where(used, recalled, _LAST).reshape(batch, heads, entries * budget)
    recent = lengths[:, None] - window + jnp.arange(window, dtype=jnp.int32)[None, :]  # [B, W]
    recent = jnp.where(recent >= 0, recent, _LAST)
    recent = jnp.broadcast_to(recent[:, None, :], (batch, heads, window))
    tokens = jnp.sort(jnp.concatenate([recalled, recent], axis=-1), axis=-1)  # [B, H, N]
    repeated = jnp.pad(tokens[..., 1:] == tokens[..., :-1], ((0, 0), (0, 0), (1, 0)))
    tokens = jnp.where(repeated | (tokens == _LAST), PAD, tokens)
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
    ids, count = union(supports, slots, lengths, window=window)
    scores = jnp.einsum(
        "bhd,bhnd->bhn",
        q,
        gather_rows(keys, ids),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return Candidates(ids, clean_scores(scores * q.shape[-1] ** -0.5, ids != PAD), count)
