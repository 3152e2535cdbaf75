"""Preallocated key-value cache, written in place when donated.

On a TPU the key and the value of a token lie side by side, where one row copy reaches both. This
module alone knows: the keys and values of such a cache are stand-ins for the arrays of any other.
"""

from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from pallas_kernels.dispatch import platform
from pallas_kernels.packed import PackedRows, both_of, pack, rows_of, whole_lanes
from retopk_jax.language_model import Geometry
from retopk_jax.sharding import CACHE, ROWS, placed


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class KVCache:
    """Keys and values of every token so far.

    As a pytree, a layer is its two arrays, or the one that a packed layer's keys and values share.

    Attributes:
        keys: per layer ``[B, G, S, D]``, after positional encoding.
        values: per layer ``[B, G, S, D]``.
        lengths: int32 ``[B]``, valid tokens of each row. Slots beyond hold anything finite.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    lengths: jax.Array

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], int | None]:
        """Arrays by name, and D where they are packed."""
        first = self.keys[0] if self.keys else None
        dim = first.dim if isinstance(first, PackedRows) else None
        rows = vars(self) if dim is None else {"both": tuple(map(both_of, self.keys))}
        named = {**rows, "lengths": self.lengths}
        return tuple((jax.tree_util.GetAttrKey(name), x) for name, x in named.items()), dim

    @classmethod
    def tree_unflatten(cls, dim: int | None, children: Any) -> Self:
        """Inverse of `tree_flatten_with_keys`."""
        if dim is None:
            return cls(*children)
        both, lengths = children
        layers = [rows_of(x, dim) for x in both]
        return cls(tuple(k for k, _ in layers), tuple(v for _, v in layers), lengths)

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


def packs() -> bool:
    """Whether caches made now are packed."""
    return platform() == "tpu"


def stored(
    keys: tuple[jax.Array, ...], values: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Keys and values ``[B, G, S, D]`` of all layers as a cache made now holds them."""
    if not packs():
        return keys, values
    layers = [rows_of(pack(k, v), k.shape[3]) for k, v in zip(keys, values, strict=True)]
    return tuple(k for k, _ in layers), tuple(v for _, v in layers)


def kv_cache_bytes(geometry: Geometry, batch: int, capacity: int, dtype: DTypeLike) -> int:
    """Bytes of keys and values of all layers; a TPU stores rows in whole lanes."""
    dim = whole_lanes(geometry.head_dim) if packs() else geometry.head_dim
    slots = batch * geometry.num_kv_heads * capacity * dim
    return 2 * geometry.num_layers * slots * jnp.dtype(dtype).itemsize


def empty_kv_cache(
    geometry: Geometry, batch: int, capacity: int, dtype: DTypeLike, mesh: Mesh | None = None
) -> KVCache:
    """A cache of zeros with no valid token, on a mesh where one is given."""
    rows, where = (batch, geometry.num_kv_heads, capacity), placed(mesh, CACHE)
    layers = geometry.num_layers
    lengths = jnp.zeros(batch, jnp.int32, device=placed(mesh, ROWS))
    if packs():
        dim = geometry.head_dim
        both = (*rows, 2, whole_lanes(dim))
        pairs = [rows_of(jnp.zeros(both, dtype, device=where), dim) for _ in range(layers)]
        return KVCache(tuple(k for k, _ in pairs), tuple(v for _, v in pairs), lengths)
    shape = (*rows, geometry.head_dim)
    zeros = [jnp.zeros(shape, dtype, device=where) for _ in range(2 * layers)]
    return KVCache(tuple(zeros[:layers]), tuple(zeros[layers:]), lengths)


def append_step(
    keys: jax.Array, values: jax.Array, k: jax.Array, v: jax.Array, slot: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Writes the key and value of one token a row.

    Args:
        keys: ``[B, G, S, D]``.
        values: ``[B, G, S, D]``.
        k: ``[B, G, D]``.
        v: ``[B, G, D]``.
        slot: int32 ``[B]``; a slot outside ``0 … S − 1`` writes nothing.
    """
    both = both_of(keys)
    if both is not None:
        return rows_of(append_token(both, pack(k, v), slot), k.shape[-1])
    if keys.shape[0] > 1:
        return append_token(keys, k, slot), append_token(values, v, slot)
    # What a scatter of one row becomes, but that keys and values share a kernel.
    at = jnp.clip(slot[0], 0, keys.shape[2] - 1)
    there = [lax.dynamic_index_in_dim(x, at, 2, keepdims=False) for x in (keys, values)]
    new = jnp.where(at == slot[0], jnp.stack([k, v]).astype(keys.dtype), jnp.stack(there))
    k, v = lax.optimization_barrier(new)
    keys, values = (
        lax.dynamic_update_index_in_dim(x, row, at, 2) for x, row in ((keys, k), (values, v))
    )
    return lax.optimization_barrier((keys, values))  # see `append_token`


def append_token(cache: jax.Array, new: jax.Array, slot: jax.Array) -> jax.Array:
    """Writes one token a row.

    Args:
        cache: ``[B, G, S, ...]``.
        new: ``[B, G, ...]``.
        slot: int32 ``[B]``; a slot outside ``0 … S − 1`` writes nothing.
    """
    rows = jnp.arange(cache.shape[0])
    written = cache.at[rows, :, slot].set(new.astype(cache.dtype), mode="drop")
    # Without the barrier XLA fuses the write into the reader and again into the output, each on a
    # copy of the whole cache (CPU, B = 1).
    return lax.optimization_barrier(written)


def append_chunk(
    keys: jax.Array,
    values: jax.Array,
    k: jax.Array,
    v: jax.Array,
    row: jax.Array,
    slots: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Writes the keys and values of T tokens of one row.

    Args:
        keys: ``[B, G, S, D]``.
        values: ``[B, G, S, D]``.
        k: ``[T, G, D]``.
        v: ``[T, G, D]``.
        row: int32 scalar.
        slots: int32 ``[T]``; a slot outside ``0 … S − 1`` writes nothing.
    """

    def write(cache: jax.Array, new: jax.Array) -> jax.Array:
        return cache.at[row, :, slots].set(new.astype(cache.dtype), mode="drop")

    both = both_of(keys)
    if both is not None:
        return rows_of(write(both, pack(k, v)), k.shape[-1])
    return write(keys, k), write(values, v)
