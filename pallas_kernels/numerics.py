"""Arithmetic that every implementation shares: scores, their order, and supports."""

import jax
import jax.numpy as jnp
from jax import lax

PAD = -1
"""Token index that stands for "none" in supports and candidates; always last."""

_LAST = jnp.iinfo(jnp.int32).max


def clean_scores(scores: jax.Array, valid: jax.Array) -> jax.Array:
    """Makes scores totally ordered: −inf where not valid or not finite, and no negative zero."""
    scores = jnp.where(valid & jnp.isfinite(scores), scores, -jnp.inf)
    return jnp.where(scores == 0.0, 0.0, scores)


def sort_support(ids: jax.Array, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sorts pairs by token, ascending along the last axis; entries with score −inf go last as PAD.

    Args:
        ids: int32 ``[..., K]``.
        scores: float32 ``[..., K]``.
    """
    keys = jnp.where(scores > -jnp.inf, ids, _LAST)
    keys, scores = lax.sort((keys, scores), dimension=-1, num_keys=1)
    return jnp.where(keys == _LAST, PAD, keys), scores


def top_k_support(
    scores: jax.Array, ids: jax.Array | None, budget: int
) -> tuple[jax.Array, jax.Array]:
    """Keeps the ``budget`` largest scores; ties go to the lower position.

    Args:
        scores: float32 ``[..., N]`` as `clean_scores` returns them; −inf is never kept.
        ids: int32 ``[..., N]`` token of every position, ascending where the score is finite, or
            None when position n is token n.
        budget: K.

    Returns:
        Support int32 ``[..., K]``, ascending with PAD last, and its scores float32 ``[..., K]``,
        −inf at PAD.
    """
    kept, positions = lax.top_k(scores, min(budget, scores.shape[-1]))
    tokens = positions if ids is None else jnp.take_along_axis(ids, positions, axis=-1)
    missing = budget - kept.shape[-1]
    if missing > 0:
        widths = [(0, 0)] * (kept.ndim - 1) + [(0, missing)]
        kept = jnp.pad(kept, widths, constant_values=-jnp.inf)
        tokens = jnp.pad(tokens, widths)
    return sort_support(tokens, kept)


def gather_rows(cache: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of a cache by token: ``[B, G, S, D]`` and int32 ``[B, H, N]`` give ``[B, H, N, D]``.

    Negative indices read row 0; the caller masks them.
    """
    batch, groups = cache.shape[:2]
    heads = ids.shape[1]
    b = jnp.arange(batch)[:, None, None]
    g = (jnp.arange(heads) // (heads // groups))[None, :, None]
    return cache.at[b, g, jnp.maximum(ids, 0)].get(mode="clip")
