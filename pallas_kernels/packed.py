"""Packed caches: key and value of a token side by side, so that one row copy brings both.

`PackedRows` is how the ops see one: a stand-in for the ``[B, G, S, D]`` array of keys or of values.
The TPU kernels read the packed array behind it; anything else that uses it gets the rows copied out
of it.
"""

from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

KEY, VALUE = 0, 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedRows:
    """Keys, or values, of a packed cache; stands for an array ``[B, G, S, D]``.

    Attributes:
        both: ``[B, G, S, 2, D]``, key and value of every token.
        part: `KEY` or `VALUE`.
    """

    both: jax.Array
    part: int = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """``(B, G, S, D)``."""
        *rows, _, dim = self.both.shape
        return (*rows, dim)

    @property
    def ndim(self) -> int:
        """4."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements of the array that this stands for."""
        return self.both.size // 2

    @property
    def dtype(self) -> np.dtype:
        """Of the rows."""
        return self.both.dtype

    def astype(self, dtype: DTypeLike) -> jax.Array:
        """The rows in another dtype, as an array."""
        return jnp.asarray(self).astype(dtype)

    def __jax_array__(self) -> jax.Array:
        return self.both[..., self.part, :]

    def __getitem__(self, index: Any) -> jax.Array:
        """Rows by up to three indices: of batch row, key-value head and slot."""
        return self.both[index][..., self.part, :]


def pack(keys: jax.Array, values: jax.Array) -> jax.Array:
    """``[B, G, S, 2, D]`` out of keys and values ``[B, G, S, D]``."""
    return jnp.stack([keys, values], axis=-2)


def rows_of(both: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values of a packed cache ``[B, G, S, 2, D]``, as the ops take them."""
    return cast(jax.Array, PackedRows(both, KEY)), cast(jax.Array, PackedRows(both, VALUE))


def both_of(rows: Any) -> jax.Array | None:
    """The packed cache ``[B, G, S, 2, D]`` behind keys or values; None where they are arrays."""
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
    both = lax.dynamic_slice(cache.both, (row, 0, start, 0, 0), (1, groups, count, 2, dim))
    return both[0, :, :, cache.part]
