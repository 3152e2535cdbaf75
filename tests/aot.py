"""Compilation for GPUs on a machine that has none."""

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    SingleDeviceSharding,
    use_abstract_mesh,
)

MARKS = [
    pytest.mark.aot,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_plugins") is None
        or importlib.util.find_spec("jax_plugins.xla_cuda13") is None,
        reason="needs the CUDA plugin and compiler: make aot installs the extra `aot`",
    ),
]

_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {shared_core}
  shared_memory_per_block_optin: {shared_block}
  threads_per_core_limit: {threads} core_count: {cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{name}"
"""
DEVICES = {
    "sm_90": {
        "name": "NVIDIA H200",
        "major": 9,
        "minor": 0,
        "shared_core": 233472,
        "shared_block": 232448,
        "threads": 2048,
        "cores": 132,
        "bandwidth": 4800000000000,
        "memory": 150000000000,
    },
    "sm_89": {
        "name": "NVIDIA L40",
        "major": 8,
        "minor": 9,
        "shared_core": 102400,
        "shared_block": 101376,
        "threads": 1536,
        "cores": 142,
        "bandwidth": 864000000000,
        "memory": 48000000000,
    },
}


def mesh_for(target: str, sizes: tuple[int, ...], axes: tuple[str, ...]) -> Mesh:
    """A mesh of as many GPUs."""
    topology = topologies.get_topology_desc(
        topology_name=target,
        platform="cuda",
        target_config=_TARGET.format(**DEVICES[target]),
        topology=f"1x{math.prod(sizes)}x1",
    )
    devices = np.array(topology.devices).reshape(sizes)
    return Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))


def compile_for(
    target: str, function: Callable[..., Any], *shapes: Any, **options: Any
) -> jax.stages.Compiled:
    """Compiles for a GPU; a kernel that spills registers is an error.

    Args:
        target: one of `DEVICES`.
        function: to compile.
        *shapes: its arguments, `jax.ShapeDtypeStruct` leaves.
        **options: of `jax.jit`.
    """
    device = DEVICES[target]
    topology = topologies.get_topology_desc(
        topology_name=target,
        platform="cuda",
        target_config=_TARGET.format(**device),
        topology="1x1x1",
    )
    sharding = SingleDeviceSharding(topology.devices[0])
    args = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes)
    gpu = AbstractDevice(device_kind=device["name"], num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), axis_types=(), abstract_device=gpu)):
        lowered = jax.jit(function, **options).trace(*args).lower()
        return lowered.compile({"xla_gpu_fail_ptx_compilation_on_register_spilling": True})
