"""Preallocated key-value cache, one array a layer, written in place when donated."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from retopk_jax.language_model import Geometry


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of every token so far.

    Attributes:
        keys: per layer ``[B, G, S, D]``, after positional encoding.
        values: per layer ``[B, G, S, D]``.
        lengths: int32 ``[B]``, valid tokens of each row. Slots beyond hold anything finite.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    lengths: jax.Array

    @property
    def capacity(self) -> int:
        """Slots a row, S."""
        return self.keys[0].shape[2]

    @property
    def batch(self) -> int:
        """Rows, B."""
        return self.keys[0].shape[0]

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows and slots, (B, S)."""
        return self.batch, self.capacity


def kv_cache_bytes(geometry: Geometry, batch: int, capacity: int, dtype: DTypeLike) -> int:
    """Bytes of keys and values of all layers."""
    slots = batch * geometry.num_kv_heads * capacity * geometry.head_dim
    return 2 * geometry.num_layers * slots * jnp.dtype(dtype).itemsize


def empty_kv_cache(geometry: Geometry, batch: int, capacity: int, dtype: DTypeLike) -> KVCache:
    """A cache of zeros with no valid token."""
    shape = (batch, geometry.num_kv_heads, capacity, geometry.head_dim)
    zeros = [jnp.zeros(shape, dtype) for _ in range(2 * geometry.num_layers)]
    layers = geometry.num_layers
    return KVCache(tuple(zeros[:layers]), tuple(zeros[layers:]), jnp.zeros(batch, jnp.int32))


def append_token(cache: jax.Array, new: jax.Array, slot: jax.Array) -> jax.Array:
    """Writes one token a row.

    Args:
        cache: ``[B, G, S, D]``.
        new: ``[B, G, D]``.
        slot: int32 ``[B]``; a slot outside ``0 … S − 1`` writes nothing.
    """
    rows = jnp.arange(cache.shape[0])
    written = cache.at[rows, :, slot].set(new.astype(cache.dtype), mode="drop")
    # Without the barrier XLA fuses the write into the reader and again into the output, each on a
    # copy of the whole cache (CPU, B = 1).
    return jax.lax.optimization_barrier(written)


def append_chunk(cache: jax.Array, new: jax.Array, row: jax.Array, slots: jax.Array) -> jax.Array:
    """Writes T tokens of one row.

    Args:
        cache: ``[B, G, S, D]``.
        new: ``[T, G, D]``.
        row: int32 scalar.
        slots: int32 ``[T]``; a slot outside ``0 … S − 1`` writes nothing.
    """
    return cache.at[row, :, slots].set(new.astype(cache.dtype), mode="drop")
