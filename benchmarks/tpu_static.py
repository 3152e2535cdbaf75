"""What the TPU compiler says of the kernels and of a decode step, on a machine without a TPU.

Static estimates, not timings: bytes and seconds are the compiler's own figures, in which a kernel
counts with all that it may have to do, a scan of every key and a full set of candidates at once.
"""

import argparse
import functools
import importlib
import importlib.metadata
import importlib.util
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from benchmarks.results_file import prepare_directory, write_results
from models.config import ModelConfig
from models.decoder import TransformerDecoder
from models.sharding import parameter_spec
from models.weights import dotted
from pallas_kernels.packed import rows_of, whole_lanes
from pallas_kernels.retopk_step import Remembered
from pallas_kernels.retopk_step.types import SIGNALS
from retopk_jax.attention import AttentionMethod, ExactTopK, ReTopK
from retopk_jax.attention.checks import check_integer
from retopk_jax.decode import DecodeState, start, step_logits
from retopk_jax.errors import ConfigError
from retopk_jax.kv_cache import empty_kv_cache
from retopk_jax.prefill import Context
from retopk_jax.sharding import AXES, CACHE, HEADS, ROWS, specs_by_rank

NAME = "tpu_static"
TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "v4": "v4:2x2x1"}
QWEN2_5_7B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}

Shapes = Any
"""A pytree of `jax.ShapeDtypeStruct`."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of an op's arguments, by their letters; those of a layer of Qwen2.5-7B."""

    b: int = 1
    h: int = 28
    g: int = 4
    d: int = 128
    s: int = 131072
    k: int = 512
    c: int = 32
    r: int = 4
    w: int = 32
    dtype: Any = jnp.bfloat16


@dataclass(frozen=True)
class Program:
    """A function to compile.

    Attributes:
        run: the function.
        shapes: of its arguments.
        donated: positions of arguments that it may write into.
    """

    run: Callable[..., Any]
    shapes: tuple[Shapes, ...]
    donated: tuple[int, ...] = ()


def mesh_of(chip: str, devices: int = 1) -> Mesh:
    """A mesh of chips that need not be there.

    Args:
        chip: one of `TOPOLOGIES`.
        devices: how many, at most the topology's.
    """
    # Where there is no TPU, libtpu asks for these.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # a compiler alone needs no chip
    found = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices
    # Not `make_mesh`: it refuses the v4 topology, whose devices are single cores.
    return Mesh(np.array(found[:devices]).reshape(1, devices, 1), AXES)


def compile_for(
    mesh: Mesh, program: Program, specs: tuple[Any, ...] | None = None
) -> jax.stages.Compiled:
    """Compiles a program.

    Args:
        mesh: the devices.
        program: what to compile.
        specs: pytree of `PartitionSpec` for every argument; None for all on every device.
    """
    specs = jax.tree.map(lambda _: P(), program.shapes) if specs is None else specs
    shapes = jax.tree.map(
        lambda s, spec: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, spec)),
        program.shapes,
        specs,
    )
    with use_abstract_mesh(mesh.abstract_mesh):
        jitted = jax.jit(program.run, donate_argnums=program.donated)
        return jitted.trace(*shapes).lower().compile()


def op_program(op: str, sizes: Sizes = Sizes()) -> Program:
    """One op on the TPU kernels."""
    i32, f32 = jnp.int32, jnp.float32
    b, h, g, d, s, k, c, r, w = (getattr(sizes, name) for name in "bhgdskcrw")

    def shape(*dims: int, dtype: Any = i32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    q, ring = (shape(*dims, dtype=sizes.dtype) for dims in ((b, h, d), (b, h, c, d)))
    both = shape(b, g, s, 2, whole_lanes(d), dtype=sizes.dtype)
    flag = functools.partial(shape, dtype=jnp.bool_)
    counters = (shape(b, h, 3), shape(b, h), shape(b, h, *SIGNALS))
    remembered = Remembered(ring, shape(b, h, c, k), shape(b), *counters)  # pyright: ignore
    run = getattr(importlib.import_module(f"pallas_kernels.{op}"), op)
    run = functools.partial(run, implementation="mosaic_tpu")
    candidates = r * k + w
    keys_at = functools.partial(_with_rows, run, d, (0,))
    match op:
        case "recall":
            return Program(functools.partial(run, entries=r), (q, ring, shape(b)))
        case "candidates":
            shapes = (both, q, shape(b, h, c, k), shape(b, h, r), shape(b))
            return Program(functools.partial(keys_at, window=w), shapes)
        case "select":
            shapes = (shape(b, h, candidates), shape(b, h, candidates, dtype=f32))
            return Program(functools.partial(run, budget=k), shapes)
        case "top_k":
            return Program(functools.partial(run, budget=k), (shape(b, h, s, dtype=f32),))
        case "support_scores":
            return Program(keys_at, (both, q, shape(b, h, k)))
        case "sparse_attend":
            attend = lambda both, *rest: run(rows_of(both, d)[1], *rest)  # noqa: E731
            return Program(attend, (both, shape(b, h, k), shape(b, h, k, dtype=f32)))
        case "exact_support":
            shapes = (both, q, shape(b), flag(b, h))
            return Program(functools.partial(keys_at, budget=k), shapes)
        case "prefill_supports":
            return Program(functools.partial(keys_at, budget=k), (both, ring, shape(b, c)))
        case "retopk_step":
            step = functools.partial(_with_rows, run, d, (0, 1), entries=r, window=w)
            tail = (shape(b), flag(b), flag(b), shape(dtype=f32))
            return Program(step, (both, q, remembered, *tail), donated=(2,))
    raise ValueError(f"op={op!r}: has no TPU kernel")


OPS = (
    "recall",
    "candidates",
    "select",
    "top_k",
    "support_scores",
    "sparse_attend",
    "exact_support",
    "prefill_supports",
    "retopk_step",
)


def _with_rows(
    run: Callable[..., Any],
    dim: int,
    parts: tuple[int, ...],
    both: jax.Array,
    q: jax.Array,
    *rest: Any,
    **settings: Any,
) -> Any:
    """An op on a packed cache: of the keys, of the values, or of both after the queries."""
    rows = rows_of(both, dim)
    return run(q, *(rows[part] for part in parts), *rest, **settings)


def decode_step(method: AttentionMethod, mesh: Mesh, layers: int, slots: int) -> Program:
    """A whole decode step of Qwen2.5-7B, or of its first layers, for one row.

    Args:
        method: how to attend.
        mesh: one device, or several to shard weights and heads over.
        layers: of the model.
        slots: S.
    """
    config = ModelConfig.from_hf(QWEN2_5_7B | {"num_hidden_layers": layers})
    decoder = TransformerDecoder(
        config, jnp.dtype(jnp.bfloat16), mesh=mesh if mesh.size > 1 else None
    )
    geometry = decoder.geometry
    tail = (1, method.tail_queries, geometry.num_heads, geometry.head_dim)

    def build() -> DecodeState:
        context = Context(
            empty_kv_cache(geometry, 1, slots, jnp.bfloat16),
            tuple(jnp.zeros(tail, jnp.bfloat16) for _ in range(layers)),
            jnp.zeros((1, decoder.vocab_size)),
        )
        return start(method, context)

    with use_abstract_mesh(mesh.abstract_mesh):
        state = jax.eval_shape(build)
    run = functools.partial(step_logits, decoder, method)
    tokens = jax.ShapeDtypeStruct((1,), jnp.int32)
    return Program(run, (decoder.abstract_params, state, tokens), donated=(1,))


def decode_specs(program: Program, mesh: Mesh) -> tuple[Any, ...]:
    """How the arguments of a `decode_step` lie on a mesh."""
    params, state, _ = program.shapes
    weights = jax.tree_util.tree_map_with_path(
        lambda path, x: parameter_spec(dotted(path), x.shape, mesh), params
    )
    cache = specs_by_rank(state.cache, CACHE)
    return weights, replace(specs_by_rank(state, HEADS), cache=cache), ROWS


def copies_of(compiled: jax.stages.Compiled, elements: int) -> list[str]:
    """Instructions that copy or re-lay-out an array of at least as many elements."""
    pattern = r"= \w+\[([\d,]+)\]\S* (?:copy|copy-start|transpose|reshape|slice|pad)\("
    return [
        line.strip()
        for line in (compiled.as_text() or "").splitlines()
        if (found := re.search(pattern, line))
        and math.prod(map(int, found[1].split(","))) >= elements
    ]


def measures(compiled: jax.stages.Compiled, info: pltpu.TpuInfo) -> dict[str, Any]:
    """The compiler's figures of a program, beside what the memory of the chip allows."""
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    assert memory is not None
    assert cost is not None
    accessed = cost["bytes accessed"]
    return {
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "in_place_bytes": memory.alias_size_in_bytes,
        "bytes_accessed": accessed,
        # Negative where it has no figure for a part.
        "optimal_seconds": optimal if (optimal := cost["optimal_seconds"]) > 0 else None,
        "roofline_seconds": accessed / (info.mem_bw_bytes_per_second * info.num_cores),
    }


def programs(slots: int, layers: int) -> dict[str, tuple[Callable[[Mesh], Program], int]]:
    """What is compiled, by name: how it is built, and for how many devices."""
    sizes = Sizes(s=slots)
    named = {f"{op}, K=512": functools.partial(op_program, op, sizes) for op in OPS}
    longer, wider = replace(sizes, s=8 * slots), replace(sizes, k=1024)
    for op in ("exact_support", "retopk_step"):
        named[f"{op}, K=1024"] = functools.partial(op_program, op, wider)
        named[f"{op}, K=512, S={longer.s}"] = functools.partial(op_program, op, longer)
    ops = {name: ((lambda _, build=build: build()), 1) for name, build in named.items()}
    step = functools.partial(decode_step, layers=layers, slots=slots)
    steps = {
        f"decode step, {layers} layers, {name}": (functools.partial(step, method), devices)
        for name, method, devices in (
            ("ReTopK", ReTopK(), 1),
            ("Exact Top-K", ExactTopK(), 1),
            ("ReTopK on 4 devices", ReTopK(), 4),
        )
    }
    return ops | steps


def row_of(chip: str, name: str, build: Callable[[Mesh], Program], devices: int) -> dict[str, Any]:
    """One program on one chip; ``error`` says what the compiler or the kernels refuse."""
    mesh = mesh_of(chip, devices)
    row = {"chip": chip, "program": name, "devices": devices, "error": None}
    try:
        program = build(mesh)
        specs = decode_specs(program, mesh) if devices > 1 else None
        compiled = compile_for(mesh, program, specs)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        return {**row, "error": str(error).splitlines()[0]}
    with use_abstract_mesh(mesh.abstract_mesh):
        return {**row, **measures(compiled, pltpu.get_tpu_info())}


def chip_facts(chip: str) -> dict[str, Any]:
    """What a device of the topology has, by jax's own table, which counts by core."""
    with use_abstract_mesh(mesh_of(chip).abstract_mesh):
        info = pltpu.get_tpu_info()
    return {
        "cores": info.num_cores,
        "hbm_bytes_per_second": info.mem_bw_bytes_per_second * info.num_cores,
        "hbm_bytes": info.hbm_capacity_bytes * info.num_cores,
        "vmem_bytes_per_core": info.vmem_capacity_bytes,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles everything for every chip that libtpu knows here and writes the table."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {NAME}",
        description="What the TPU compiler says of kernels and decode steps: static estimates, "
        "not timings. Needs libtpu (extra `aot`), no TPU.",
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument("--chips", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES))
    parser.add_argument("--slots", type=int, default=131072, help="capacity of the cache")
    parser.add_argument("--layers", type=int, default=28, help="of the decode steps")
    parser.add_argument("--only", default="", help="programs whose name starts with this")
    args = parser.parse_args(argv)
    for name in ("slots", "layers"):
        check_integer(f"--{name}", getattr(args, name), minimum=1)
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError("tpu_static needs libtpu: pip install -e '.[aot]'")
    directory = prepare_directory(args.out)
    jax.config.update("jax_enable_compilation_cache", False)  # it cannot load without a device
    wanted = {
        name: how
        for name, how in programs(args.slots, args.layers).items()
        if name.startswith(args.only)
    }
    if not wanted:
        raise ConfigError(
            f"--only {args.only}: expected the start of one of {', '.join(programs(8, 1))}"
        )
    rows = []
    for chip in args.chips:
        for name, (build, devices) in wanted.items():
            row = row_of(chip, name, build, devices)
            rows.append(row)
            print(_line(row), flush=True)
    sizes = Sizes(s=args.slots)
    write_results(
        directory / f"{NAME}.json",
        NAME,
        {"slots": args.slots, "layers": args.layers},
        rows,
        kind="static estimates of the compiler, not timings: nothing here ran on a TPU",
        libtpu=importlib.metadata.version("libtpu"),
        chips={chip: chip_facts(chip) for chip in args.chips},
        row_copy={
            "bytes": 2 * whole_lanes(sizes.d) * jnp.dtype(sizes.dtype).itemsize,
            "most_of_a_head": sizes.r * sizes.k + sizes.w,
        },
    )


def _line(row: dict[str, Any]) -> str:
    start = f"{row['chip']:4} {row['program']:44}"
    if row["error"] is not None:
        return f"{start} {row['error'][:100]}"
    accessed, temp = row["bytes_accessed"] / 1e6, row["temp_bytes"] / 1e6
    roofline = row["roofline_seconds"] * 1e6
    optimal = "" if row["optimal_seconds"] is None else f"{row['optimal_seconds'] * 1e6:.1f} us"
    return (
        f"{start} {accessed:9.1f} MB  roofline {roofline:8.1f} us  optimal {optimal:>10}  "
        f"temp {temp:6.1f} MB"
    )
