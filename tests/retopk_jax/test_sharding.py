"""A model over a mesh of simulated devices decodes as on one; what cannot be sharded is refused."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from benchmarks.model_shapes import SHAPES
from models import TransformerDecoder
from models.sharding import parameter_spec
from retopk_jax import (
    CapacityError,
    ConfigError,
    ExactTopK,
    Full,
    Loki,
    Quest,
    ReTopK,
    SparQ,
    StreamingLLM,
    TokenSelect,
)
from retopk_jax.language_model import Geometry
from retopk_jax.prefill import context_bytes
from retopk_jax.sharding import (
    AXES,
    check_geometry,
    check_method,
    check_sizes,
    make_mesh,
    parse_mesh,
)
from tests.retopk_jax.sharded_decode import HEADS, KV_HEADS, LAYERS, METHODS, SLOTS

FAST = ("tensor=8:retopk", "tensor=2,sequence=4:retopk", "tensor=2,sequence=4:full")
MESHES = (
    "tensor=1",
    "tensor=2",
    "tensor=4",
    "tensor=8",
    "tensor=16",
    "sequence=8",
    "tensor=2,sequence=4",
    "tensor=8,sequence=2",
    "data=2,tensor=2,sequence=2",
)
SLOW = [f"{mesh}:{name}" for mesh in MESHES for name in METHODS if f"{mesh}:{name}" not in FAST]


@cache
def decoded(cases: tuple[str, ...], devices: int) -> dict[str, Any]:
    """Cases, and each of their methods on one device, in a process of so many devices."""
    alone = sorted({":" + case.partition(":")[2] for case in cases})
    flag = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.retopk_jax.sharded_decode", *alone, *cases],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def compare(case: str, found: dict[str, Any]) -> None:
    mesh, _, method = case.partition(":")
    sharded, alone = found[case], found[f":{method}"]
    assert sharded["tokens"] == alone["tokens"]
    assert sharded["supports"] == alone["supports"]
    assert sharded["paths"] == alone["paths"]
    np.testing.assert_allclose(sharded["logits"], alone["logits"], rtol=0, atol=2e-5)
    if method == "full":
        assert sharded["generated"] == alone["generated"]
        assert sharded["generated"][0][:7] == [step[0] for step in alone["tokens"]]
    if method == "retopk":
        assert {path for step in alone["paths"] for path in np.ravel(step)} == {0, 1, 2}
    ways = {"data": 1, "tensor": 1, "sequence": 1}
    ways |= {name: int(n) for name, n in (part.split("=") for part in mesh.split(","))}
    groups = max(KV_HEADS // ways["tensor"], 1)
    rows, slots = 2 // ways["data"], SLOTS // ways["sequence"]
    assert sharded["part"] == [rows, groups, slots, 8]
    # After each attention and each MLP one, which also carries the counters of the last.
    per_layer = {"all-reduce": 2 if ways["tensor"] > 1 else 0, "all-gather": 0}
    if ways["sequence"] > 1:
        per_layer["all-reduce"] += 1 if method == "exact" else 2
        per_layer["all-gather"] += 0 if method == "full" else 1
    expected = {name: LAYERS * count for name, count in per_layer.items() if count}
    assert sharded["collectives"] == expected
    assert not sharded["copies"]
    assert sharded["alias_bytes"] >= sharded["cache_bytes"]
    repeated = max(ways["tensor"] // KV_HEADS, 1)
    if method != "retopk":  # a scan of all keys, on every device that has them
        np.testing.assert_allclose(
            sharded["key_bytes"], np.array(alone["key_bytes"]) * repeated, rtol=1e-6
        )


@pytest.mark.parametrize("case", FAST)
def test_sharded_equals_one_device(case: str) -> None:
    compare(case, decoded(FAST, 8))


@pytest.mark.long
@pytest.mark.parametrize("case", SLOW)
def test_every_mesh_equals_one_device(case: str) -> None:
    compare(case, decoded(tuple(SLOW), 16))


# ---- refusals ------------------------------------------------------------------------------


def mesh_of(data: int = 1, tensor: int = 1, sequence: int = 1) -> AbstractMesh:
    return AbstractMesh((data, tensor, sequence), AXES)


@pytest.mark.parametrize(
    "method", [StreamingLLM(), Quest(), SparQ(), TokenSelect(), Loki(basis=jnp.eye(2)[None, None])]
)
def test_methods_that_cannot_be_sharded_refuse(method) -> None:
    check_method(method.name, method.shards, None)
    check_method(method.name, method.shards, mesh_of(data=8))  # pyright: ignore
    for mesh, axis in ((mesh_of(tensor=2), "tensor"), (mesh_of(sequence=2), "sequence")):
        with pytest.raises(ConfigError, match=f"{method.name} cannot be sharded by {axis}"):
            check_method(method.name, method.shards, mesh)  # pyright: ignore


@pytest.mark.parametrize("method", [Full(), ExactTopK(), ReTopK()])
def test_methods_that_can_do_not(method) -> None:
    check_method(method.name, method.shards, mesh_of(2, 2, 2))  # pyright: ignore


def test_sizes_that_do_not_divide_are_refused() -> None:
    qwen = Geometry(28, 28, 4, 128)
    for ways in (1, 2, 4, 28):
        check_geometry(qwen, mesh_of(tensor=ways))  # pyright: ignore
    with pytest.raises(ConfigError, match=r"tensor=8: 28 query and 4 KV heads .* 1, 2, 4, 28 ways"):
        check_geometry(qwen, mesh_of(tensor=8))  # pyright: ignore
    check_sizes(4, 512, mesh_of(2, 1, 4))  # pyright: ignore
    with pytest.raises(ConfigError, match="3 rows on a mesh of data=2: expected a multiple of 2"):
        check_sizes(3, 512, mesh_of(data=2))  # pyright: ignore
    with pytest.raises(CapacityError, match="capacity=510 on a mesh of sequence=4"):
        check_sizes(1, 510, mesh_of(sequence=4))  # pyright: ignore


def test_memory_is_counted_on_each_device() -> None:
    decoder: Any = TransformerDecoder(SHAPES["qwen2.5-7b"], jnp.dtype("bfloat16"))
    alone = context_bytes(decoder, 4, 2**20, 128)
    assert alone["keys and values"] == 4 * 2 * 28 * 4 * 2**20 * 128 * 2
    sharded = context_bytes(replace(decoder, mesh=mesh_of(2, 4, 8)), 4, 2**20, 128)
    ways = {"keys and values": 64, "queries": 8, "logits": 2}
    assert sharded == {name: alone[name] // ways[name] for name in alone}


def test_meshes_that_cannot_be_made_are_refused() -> None:
    count = len(jax.devices())
    with pytest.raises(ConfigError, match=rf"tensor=64 .* needs 64 devices, there are {count}"):
        make_mesh(tensor=64)
    for text in ("heads=2", "tensor", "tensor=x", "tensor=2,tensor=2"):
        with pytest.raises(ConfigError, match="expected AXIS=N with axes data, tensor, sequence"):
            parse_mesh(text)
    assert parse_mesh("") is None
    assert make_mesh(devices=jax.devices()[:1]).shape == {"data": 1, "tensor": 1, "sequence": 1}


def test_weights_are_sharded_by_heads_and_inner_width() -> None:
    mesh: Any = mesh_of(tensor=4)
    specs = {
        path: parameter_spec(path, shape, mesh)
        for path, shape in {
            "layers.0.self_attn.q_proj.kernel": (32, HEADS * 8),
            "layers.0.self_attn.q_proj.bias": (HEADS * 8,),
            "layers.0.self_attn.o_proj.kernel": (HEADS * 8, 32),
            "layers.0.self_attn.o_proj.bias": (32,),
            "layers.0.mlp.down_proj.kernel": (48, 32),
            "layers.0.input_layernorm.scale": (32,),
            "lm_head.kernel": (32, 62),
        }.items()
    }
    assert [tuple(spec) for spec in specs.values()] == [
        (None, "tensor"),
        ("tensor",),
        ("tensor", None),
        (),
        ("tensor", None),
        (),
        (),
    ]
