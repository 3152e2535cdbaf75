"""Rotation of keys and queries by position, in the half-split convention."""

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, angles: jax.Array, scale: float = 1.0) -> jax.Array:
    """Rotates the pairs (i, i + D/2) of ``x`` by ``angles``, in float32.

    Rotations add up: a key at position p rotated by ``delta * inverse_frequencies`` is that key at
    position p + delta.

    Args:
        x: ``[B, T, heads, D]``.
        angles: float32 ``[B, T, D/2]``, radians.
        scale: what the result is multiplied by.

    Returns:
        As ``x``.
    """
    cos, sin = (scale * f(angles)[:, :, None, :] for f in (jnp.cos, jnp.sin))  # [B, T, 1, D/2]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)  # [B, T, heads, D/2]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
