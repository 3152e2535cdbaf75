"""Several devices: a mesh of rows, heads and positions, and where everything lives on it.

``data`` shards the rows of a batch, ``tensor`` the heads, ``sequence`` the positions of the
key-value cache in as many contiguous blocks. Weights and activations are left to XLA, which puts
one all-reduce after each attention and each MLP; what touches the cache runs per device.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from retopk_jax.attention.checks import check_integer
from retopk_jax.errors import CapacityError, ConfigError
from retopk_jax.language_model import Geometry

DATA, TENSOR, SEQUENCE = AXES = ("data", "tensor", "sequence")

ROWS = P(DATA)
"""Of ``[B, ...]``."""
HEADS = P(DATA, TENSOR)
"""Of ``[B, H, ...]``."""
CACHE = P(DATA, TENSOR, SEQUENCE)
"""Of ``[B, G, S, D]``."""
TAIL = P(DATA, None, TENSOR)
"""Of ``[B, T, H, D]``."""
CHUNK_OF_ROW = P(None, TENSOR)
"""Of ``[T, H, D]``, tokens of one row."""


def make_mesh(
    *, data: int = 1, tensor: int = 1, sequence: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh of ``data * tensor * sequence`` devices.

    Args:
        data: ways in which rows are sharded.
        tensor: ways in which heads are sharded.
        sequence: ways in which positions are sharded.
        devices: which; None for all of every process.

    Raises:
        ConfigError: there are not as many devices.
    """
    sizes = {DATA: data, TENSOR: tensor, SEQUENCE: sequence}
    for name, size in sizes.items():
        check_integer(name, size, minimum=1)
    found = jax.devices() if devices is None else devices
    needed = data * tensor * sequence
    if len(found) != needed:
        shown = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ConfigError(f"mesh {shown}: needs {needed} devices, there are {len(found)}")
    return jax.make_mesh(tuple(sizes.values()), AXES, (AxisType.Auto,) * 3, devices=found)


def parse_mesh(text: str) -> Mesh | None:
    """The mesh of ``tensor=2`` or ``data=2,sequence=4``; None for an empty text.

    Raises:
        ConfigError: another axis, no number, or not as many devices.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if name not in AXES or not size.isdecimal() or name in sizes:
            raise ConfigError(f"mesh {text!r}: expected AXIS=N with axes {', '.join(AXES)}")
        sizes[name] = int(size)
    if not sizes:
        return None
    data, tensor, sequence = (sizes.get(axis, 1) for axis in AXES)
    return make_mesh(data=data, tensor=tensor, sequence=sequence)


def check_geometry(geometry: Geometry, mesh: Mesh) -> None:
    """Refuses heads that do not divide over a mesh.

    Raises:
        ConfigError: they do not.
    """
    ways, heads, groups = mesh.shape[TENSOR], geometry.num_heads, geometry.num_kv_heads
    fitting = [n for n in range(1, heads + 1) if not (heads % n or (groups % n and n % groups))]
    if ways not in fitting:
        raise ConfigError(
            f"tensor={ways}: {heads} query and {groups} KV heads can be sharded "
            f"{', '.join(map(str, fitting))} ways"
        )


def check_sizes(batch: int, slots: int, mesh: Mesh | None) -> None:
    """Refuses rows or slots that do not divide over a mesh.

    Raises:
        ConfigError: the rows do not.
        CapacityError: the slots do not.
    """
    if mesh is None:
        return
    rows, positions = mesh.shape[DATA], mesh.shape[SEQUENCE]
    if batch % rows:
        raise ConfigError(f"{batch} rows on a mesh of data={rows}: expected a multiple of {rows}")
    if slots % positions:
        raise CapacityError(
            f"capacity={slots} on a mesh of sequence={positions}: expected a multiple of "
            f"{positions}"
        )


def check_method(name: str, shards: frozenset[str], mesh: Mesh | None) -> None:
    """Refuses a method on a mesh over which it cannot be sharded.

    Raises:
        ConfigError: it cannot; says over what it can.
    """
    if mesh is None:
        return
    for axis in (TENSOR, SEQUENCE):
        if mesh.shape[axis] > 1 and axis not in shards:
            able = ", ".join([DATA, *sorted(shards)])
            raise ConfigError(f"{name} cannot be sharded by {axis}: expected a mesh of {able} only")


def placed(mesh: Mesh | None, spec: P) -> NamedSharding | None:
    """Sharding of an array; None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, spec)


def on_every_host(tree: Any) -> Any:
    """The arrays with what other hosts alone have of them gathered, so that each can read them."""

    def gathered(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return x
        return multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(gathered, tree)


def shards_of(mesh: Mesh | None, spec: P) -> int:
    """Different parts into which a mesh divides an array."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in spec if axis is not None)


def constrained(tree: Any, mesh: Mesh | None, spec: P) -> Any:
    """The arrays of a tree, kept where the spec says inside a jit."""
    return tree if mesh is None else lax.with_sharding_constraint(tree, placed(mesh, spec))


def specs_by_rank(tree: Any, spec: P) -> Any:
    """The spec for arrays of more than one axis, `ROWS` for ``[B]``."""
    return jax.tree.map(lambda leaf: spec if leaf.ndim > 1 else ROWS, tree)


def per_device(function: Any, mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Any:
    """The function on every device's part of its arguments; as it is without a mesh."""
    if mesh is None:
        return function
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def ways(axis: str) -> int:
    """Devices along an axis of the mesh that the caller runs on a part of; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[axis] if axis in mesh.manual_axes else 1


def place_of(axis: str, size: int) -> jax.Array | int:
    """Number of the first of ``size`` entries that this device has along an axis."""
    return lax.axis_index(axis) * size if ways(axis) > 1 else 0


def mine(index: jax.Array, axis: str, size: int) -> jax.Array:
    """Entries by their number here, and ``size`` where another device has them.

    Args:
        index: int32, numbers along the whole axis.
        axis: the axis.
        size: entries that every device has.
    """
    if ways(axis) == 1:
        return index
    local = index - place_of(axis, size)
    return jnp.where((local >= 0) & (local < size), local, size)
