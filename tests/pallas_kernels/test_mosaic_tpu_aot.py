"""The TPU kernels, and decode steps on them, compile for real chips on a machine without one.

The compiler refuses what does not fit the VMEM or the HBM.
"""

import importlib.util
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks import tpu_static
from benchmarks.tpu_static import (
    OPS,
    Program,
    Sizes,
    compile_for,
    copies_of,
    decode_specs,
    decode_step,
    mesh_of,
    op_program,
)
from pallas_kernels.retopk_step import ReTopKStep
from retopk_jax.attention import ExactTopK, ReTopK
from retopk_jax.sharding import HEADS, specs_by_rank

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="needs libtpu: make aot installs the extra `aot`",
    ),
]

CACHE = 4 * 131072 * 128  # elements of the keys of a layer


def temporary(compiled: jax.stages.Compiled) -> int:
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def assert_on_kernels(compiled: jax.stages.Compiled, kernels: int) -> None:
    assert (compiled.as_text() or "").count('custom_call_target="tpu_custom_call"') == kernels


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize("op", OPS)
def test_kernels_compile(op: str, chip: str) -> None:
    compiled = compile_for(mesh_of(chip), op_program(op))
    assert_on_kernels(compiled, 3 if op == "retopk_step" else 1)
    assert temporary(compiled) < 20e6
    assert not copies_of(compiled, CACHE)


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(k=1024),
        Sizes(s=2**20),
        Sizes(s=2**20, k=1024),
        Sizes(d=64),
        Sizes(h=8, g=1, d=256, k=1024),
        Sizes(h=16, g=16),
        Sizes(b=8, h=32, g=4, s=32768),
        Sizes(dtype=jnp.float32),
        Sizes(h=9, g=3, d=64, s=8123, w=0),
    ],
    ids=lambda s: f"B{s.b}-H{s.h}-G{s.g}-D{s.d}-S{s.s}-K{s.k}",
)
def test_a_step_of_other_sizes_compiles(sizes: Sizes, chip: str) -> None:
    compiled = compile_for(mesh_of(chip), op_program("retopk_step", sizes))
    assert_on_kernels(compiled, 3)
    assert temporary(compiled) < 20e6
    assert not copies_of(compiled, sizes.b * sizes.g * sizes.s * sizes.d)


@pytest.mark.parametrize("chip", ["v5p", "v4"])
def test_a_step_compiles_for_older_chips(chip: str) -> None:
    compiled = compile_for(mesh_of(chip), op_program("retopk_step"))
    assert_on_kernels(compiled, 3)
    assert not copies_of(compiled, CACHE)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="of scratch in 16777216 of VMEM"):
        compile_for(mesh_of("v4"), op_program("exact_support", Sizes(s=2**20)))


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_heads_are_sharded_over_four_chips(chip: str) -> None:
    mesh, program = mesh_of(chip, 4), op_program("retopk_step")
    both, q, remembered, *rows, _ = specs_by_rank(program.shapes, HEADS)
    specs = (both, q, remembered, *rows, P())  # tau is one number
    outs: Any = (HEADS, remembered, HEADS, HEADS, HEADS, HEADS)
    run = jax.shard_map(
        program.run,
        mesh=mesh,
        in_specs=specs,
        out_specs=ReTopKStep(*outs),
        check_vma=False,
    )
    compiled = compile_for(mesh, replace(program, run=run), specs)
    assert_on_kernels(compiled, 3)
    assert not copies_of(compiled, CACHE // 4)
    text = compiled.as_text() or ""
    assert "all-gather" not in text
    assert "all-reduce" not in text


@pytest.mark.parametrize(("chip", "devices"), [("v6e", 1), ("v5e", 4)], ids=["v6e", "four v5e"])
def test_decode_step_at_128k_copies_no_cache(chip: str, devices: int) -> None:
    mesh = mesh_of(chip, devices)
    program = decode_step(ReTopK(), mesh, layers=28, slots=131072)
    specs = decode_specs(program, mesh) if devices > 1 else None
    compiled = compile_for(mesh, program, specs)
    assert_on_kernels(compiled, 3 * 28)
    assert temporary(compiled) < 100e6
    assert not [line for line in copies_of(compiled, CACHE // devices) if "131072" in line]
    memory = compiled.memory_analysis()
    assert memory is not None
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert new < 50e6, "what is donated comes out in other buffers"


def test_exact_decode_step_copies_no_cache() -> None:
    mesh = mesh_of("v5e")
    compiled = compile_for(mesh, decode_step(ExactTopK(), mesh, layers=2, slots=131072))
    assert_on_kernels(compiled, 2 * 2)
    assert temporary(compiled) < 100e6
    assert not [line for line in copies_of(compiled, CACHE) if "131072" in line]


def test_a_copy_is_found() -> None:
    mesh = mesh_of("v5e")
    step = decode_step(ReTopK(), mesh, layers=1, slots=131072)
    compiled = compile_for(mesh, Program(step.run, step.shapes))  # nothing is donated
    assert any("131072" in line for line in copies_of(compiled, CACHE))


def test_the_table_is_written(tmp_path) -> None:
    tpu_static.main(["--out", str(tmp_path), "--chips", "v6e", "--only", "recall"])
    (written,) = tmp_path.iterdir()
    assert written.name == "tpu_static.json"
    assert "not timings" in written.read_text()
