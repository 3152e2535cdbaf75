"""Every kernel compiles for sm_90 and sm_89 on a machine without a GPU, and spills no registers."""

import functools
import importlib
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from pallas_kernels.retopk_step import Remembered

pytestmark = [
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
_DEVICES = {
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
B, H, G, D, S, K, C, R, W = 1, 28, 4, 128, 131072, 512, 32, 4, 32


def _shape(*sizes: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def _arguments(op: str):
    bf16 = functools.partial(_shape, dtype=jnp.bfloat16)
    f32 = functools.partial(_shape, dtype=jnp.float32)
    flag = functools.partial(_shape, dtype=jnp.bool_)
    q, cache, ring = bf16(B, H, D), bf16(B, G, S, D), bf16(B, H, C, D)
    supports, slots_total = _shape(B, H, C, K), R * K + W
    state: Any = (ring, supports, _shape(B), _shape(B, H, 3), _shape(B, H))
    remembered = Remembered(*state)
    return {
        "recall": ((q, ring, _shape(B)), {"entries": R}),
        "candidates": ((q, cache, supports, _shape(B, H, R), _shape(B)), {"window": W}),
        "select": ((_shape(B, H, slots_total), f32(B, H, slots_total)), {"budget": K}),
        "top_k": ((f32(B, H, S),), {"budget": K}),
        "top_k_of_few": ((f32(B, H, 8192),), {"budget": 32}),
        "support_scores": ((q, cache, _shape(B, H, K)), {}),
        "sparse_attend": ((cache, _shape(B, H, K), f32(B, H, K)), {}),
        "exact_support": ((q, cache, _shape(B), flag(B, H)), {"budget": K}),
        "full_attention": ((q, cache, cache, _shape(B)), {}),
        "prefill_supports": ((ring, cache, _shape(B, C)), {"budget": K}),
        "retopk_step": (
            (q, cache, cache, remembered, _shape(B), flag(B), flag(B), f32()),
            {"entries": R, "window": W},
        ),
    }[op]


@pytest.mark.parametrize("target", list(_DEVICES))
@pytest.mark.parametrize(
    "op",
    [
        "recall",
        "candidates",
        "select",
        "top_k",
        "top_k_of_few",
        "support_scores",
        "sparse_attend",
        "exact_support",
        "full_attention",
        "prefill_supports",
        "retopk_step",
    ],
)
def test_kernels_compile_without_spills(op: str, target: str) -> None:
    device = _DEVICES[target]
    topology = topologies.get_topology_desc(
        topology_name=target,
        platform="cuda",
        target_config=_TARGET.format(**device),
        topology="1x1x1",
    )
    sharding = SingleDeviceSharding(topology.devices[0])
    shapes, kwargs = _arguments(op)
    args = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes)
    name = op.removesuffix("_of_few")
    function = getattr(importlib.import_module(f"pallas_kernels.{name}"), name)
    call = functools.partial(function, implementation="triton", **kwargs)
    donate = (3,) if op == "retopk_step" else ()
    gpu = AbstractDevice(device_kind=device["name"], num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), axis_types=(), abstract_device=gpu)):
        lowered = jax.jit(call, donate_argnums=donate).trace(*args).lower()
        compiled = lowered.compile({"xla_gpu_fail_ptx_compilation_on_register_spilling": True})
    if op == "retopk_step":
        memory = compiled.memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < 50e6
