"""Packed caches: key and value of a token side by side, so that one row copy brings both.

Rows are filled up with zeros to whole lanes, which a TPU's memory would do in any case, but then
copy the cache for the kernels. `PackedRows` is how the ops see one: a stand-in for the
``[B, G, S, D]`` array of keys or of values. The TPU kernels read the packed array behind it;
anything else that uses it gets the rows copied out of it.
"""

import math
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

KEY, VALUE = 0, 1
LANES = 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedRows:
    """Keys, or values, of a packed cache; stands for an array ``[B, G, S, D]``.

    Attributes:
        both: ``[B, G, S, 2, lanes]``, key and value of every token; the first D lanes are used.
        part: `KEY` or `VALUE`.
        dim: D.
    """

    both: jax.Array
    part: int = field(metadata={"static": True})
    dim: int = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """``(B, G, S, D)``."""
        return (*self.both.shape[:-2], self.dim)

    @property
    def ndim(self) -> int:
        """4."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements of the array that this stands for."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """Of the rows."""
        return self.both.dtype

    def astype(self, dtype: DTypeLike) -> jax.Array:
        """The rows in another dtype, as an array."""
        return jnp.asarray(self).astype(dtype)

    def __jax_array__(self) -> jax.Array:
        return self.both[..., self.part, : self.dim]

    def __getitem__(self, index: Any) -> jax.Array:
        """Rows by up to three indices: of batch row, key-value head and slot."""
        return self.both[index][..., self.part, : self.dim]


def whole_lanes(dim: int) -> int:
    """Lanes that hold D numbers."""
    return -(-dim // LANES) * LANES


def pack(keys: jax.Array, values: jax.Array) -> jax.Array:
    """Packed rows ``[..., 2, lanes]`` out of keys and values ``[..., D]``."""
    both = jnp.stack([keys, values], axis=-2)
    dim = keys.shape[-1]
    return jnp.pad(both, [(0, 0)] * (both.ndim - 1) + [(0, whole_lanes(dim) - dim)])


def rows_of(both: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    """Keys and values of a packed cache ``[B, G, S, 2, lanes]``, as the ops take them."""
    keys, values = PackedRows(both, KEY, dim), PackedRows(both, VALUE, dim)
    return cast(jax.Array, keys), cast(jax.Array, values)


def both_of(rows: Any) -> jax.Array | None:
    """The packed cache ``[B, G, S, 2, lanes]`` behind keys or values; None behind an array."""
    return rows.both if isinstance(rows, PackedRows) else None


def unpacked(argument: Any) -> Any:
    """The array that a `PackedRows` stands for; anything else as it is."""
    return jnp.asarray(argument) if isinstance(argument, PackedRows) else argument


def slots_between(cache: jax.Array, row: jax.Array, start: jax.Array, count: int) -> jax.Array:
    """Slots ``start … start + count − 1`` of one row of a cache, packed or not, ``[G, count, D]``.

    Args:
        cache: ``[B, G, S, D]``.
        row: int32 scalar.
        start: int32 scalar, at most ``S − count``.
        count: slots.
    """
    groups, dim = cache.shape[1], cache.shape[3]
    if not isinstance(cache, PackedRows):
        return lax.dynamic_slice(cache, (row, 0, start, 0), (1, groups, count, dim))[0]
    sizes = (1, groups, count, *cache.both.shape[3:])
    both = lax.dynamic_slice(cache.both, (row, 0, start, 0, 0), sizes)
    return both[0, :, :, cache.part, :dim]
