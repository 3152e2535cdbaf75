"""Decode steps of whole models, random weights and caches: Full, Exact Top-K and ReTopK."""

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import path_patterns
from benchmarks.model_shapes import SHAPES
from benchmarks.path_patterns import Pattern
from benchmarks.results_file import commit, prepare_directory, write_results
from benchmarks.synthetic_decode import (
    Forced,
    NoAttention,
    Program,
    Sizes,
    cache_of,
    compile_steps,
)
from benchmarks.timed_rows import check_only, exit_if_all_failed, options
from benchmarks.timing import copy_bytes_per_microsecond
from models import (
    CausalLM,
    ModelConfig,
    TransformerDecoder,
    parameter_bytes,
    random_model,
    shard_model,
)
from models.sharding import shard_decoder
from retopk_jax.attention import AttentionMethod, ExactTopK, Full, ReTopK
from retopk_jax.attention.checks import check_integer
from retopk_jax.cli_files import write_text
from retopk_jax.device_memory import free_bytes, human_bytes
from retopk_jax.errors import CapacityError, ConfigError
from retopk_jax.kv_cache import kv_cache_bytes
from retopk_jax.sharding import DATA, SEQUENCE, TENSOR, check_sizes, parse_mesh

Row = dict[str, Any]
NAME = "end_to_end"
SLACK = 0.85
"""Share of the free memory that caches may take; the rest is for temporaries."""


class Measurements:
    """Rows of this benchmark, those of an earlier run of the same settings and commit included."""

    def __init__(self, out: Path, settings: Mapping[str, Any], given_commit: str | None):
        self._path = out / f"{NAME}.json"
        self._settings = dict(settings)
        self._commit = given_commit or commit()
        self.rows: list[Row] = self._earlier()

    def _earlier(self) -> list[Row]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        same = json.loads(json.dumps(self._settings)) == found.get("settings")
        if not same or found.get("commit") != self._commit:
            print(f"{self._path}: of another commit or settings, measured anew", flush=True)
            return []
        return [row for row in found["rows"] if row["milliseconds"] is not None]

    def has(self, **at: Any) -> bool:
        """Whether a row was measured."""
        return any(all(row.get(name) == value for name, value in at.items()) for row in self.rows)

    def put(self, row: Row) -> None:
        """Takes a row, and writes all with what follows from them."""
        self.rows.append(row)
        if jax.process_index() != 0:
            return
        rows = derive(self.rows)
        write_results(self._path, NAME, self._settings, rows, commit=self._commit)
        write_text(self._path.with_suffix(".md"), markdown(rows))


def derive(rows: Sequence[Row]) -> list[Row]:
    """Adds what compares the rows of a model and length with each other.

    ``attention_milliseconds`` is a step less one without attention; ``predicted`` of a mixture is
    reuse + share of groups scanned x exact, each attention measured alone.
    """
    derived = []
    for row in sorted(rows, key=lambda row: (row["model"], row["mesh"], row["length"])):
        of_model = [r for r in rows if (r["model"], r["mesh"]) == (row["model"], row["mesh"])]
        alone = [
            r["milliseconds"]
            for r in rows
            if (r["model"], r["mesh"], r["length"], r["part"])
            == (row["model"], "", row["length"], row["part"])
        ]
        beside = {r["part"]: r["milliseconds"] for r in of_model if r["length"] == row["length"]}
        beside |= {r["part"]: r["milliseconds"] for r in of_model if r["part"] == "none"}
        mine, more = row["milliseconds"], {}
        if mine is not None and row["mesh"] and alone and alone[0]:
            more["speedup_over_one_device"] = round(alone[0] / mine, 3)
            more["efficiency"] = round(alone[0] / mine / row["devices"], 3)
        if mine is not None and row["part"] != "none":
            for other in ("exact", "full"):
                if beside.get(other):
                    more[f"speedup_over_{other}"] = round(beside[other] / mine, 3)
            if beside.get("none"):
                none = beside["none"]
                more["non_attention_share"] = round(none / mine, 4)
                more["attention_milliseconds"] = round(mine - none, 4)
                scanned = row.get("group_share")
                if scanned and beside.get("exact") and beside.get("reuse"):
                    predicted = beside["reuse"] - none + scanned * (beside["exact"] - none)
                    more["predicted_attention_milliseconds"] = round(predicted, 4)
                    more["attention_over_predicted"] = round((mine - none) / predicted, 3)
        derived.append({**row, **more})
    return derived


def markdown(rows: Sequence[Row]) -> str:
    """A table of the rows."""
    columns = {
        "model": "model",
        "mesh": "mesh",
        "length": "context",
        "part": "method",
        "milliseconds": "ms a token",
        "non_attention_share": "non-attention",
        "speedup_over_exact": "over Exact",
        "speedup_over_full": "over Full",
        "group_share": "groups scanned",
        "attention_over_predicted": "attention / predicted",
        "efficiency": "efficiency",
        "kv_bytes": "KV",
        "recall_bytes": "recall cache",
        "kv_buffers": "buffers of layers",
    }
    lines = [list(columns.values()), ["---"] * len(columns)]
    for row in rows:
        cells = {name: row.get(name) for name in columns}
        for name in ("kv_bytes", "recall_bytes"):
            cells[name] = human_bytes(row[name]) if row.get(name) else None
        cells["length"] = f"{row['length']:,}"
        lines.append(["" if cell is None else str(cell) for cell in cells.values()])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def parts_of(
    config: ModelConfig, retopk: ReTopK, steps: int, recordings: Sequence[Path]
) -> dict[str, tuple[AttentionMethod, Pattern | None]]:
    """Every row of a length by name: the method and its pattern of scans."""
    sizes = (steps, config.num_layers, config.num_heads, config.num_kv_heads)
    nothing = Pattern("every head reuses", np.zeros(sizes[:3], np.bool_), config.num_kv_heads)
    patterns = {
        "reuse": nothing,
        "independent": path_patterns.independent(*sizes),
        "traced": path_patterns.traced(*sizes),
        "risk": path_patterns.risk(*sizes),
    }
    for path in recordings:
        patterns[path.stem] = path_patterns.recorded(path, *sizes)
    return {
        "none": (NoAttention(), None),
        "exact": (ExactTopK(retopk.budget), None),
        **{
            name: (Forced(retopk, jnp.asarray(found.scans)), found)
            for name, found in patterns.items()
        },
        "full": (Full(), None),
    }


def buffers_for(decoder: TransformerDecoder, length: int) -> int:
    """Layers whose keys and values fit the devices beside the weights.

    Raises:
        CapacityError: not even one does.
    """
    config, device = decoder.config, jax.local_devices()[0]
    free = free_bytes(device)
    if free is None:
        return config.num_layers
    tensor, sequence = _ways(decoder)
    weights = parameter_bytes(config, decoder.dtype) // tensor
    layer = 4 * config.num_kv_heads * length * config.head_dim // (tensor * sequence)
    fitting = int(free * SLACK - weights) // layer
    if fitting < 1:
        raise CapacityError(
            f"{length} tokens need {human_bytes(layer)} of keys and values a layer beside "
            f"{human_bytes(weights)} of weights: {device.device_kind} has {human_bytes(free)} free"
        )
    return min(config.num_layers, fitting)


def _ways(decoder: TransformerDecoder) -> tuple[int, int]:
    """Devices over which heads and positions are sharded."""
    mesh = decoder.mesh
    return (1, 1) if mesh is None else (mesh.shape[TENSOR], mesh.shape[SEQUENCE])


def _distribute(args: argparse.Namespace) -> None:
    """Joins the processes of several hosts."""
    if args.coordinator is not None:
        jax.distributed.initialize(args.coordinator, args.processes, args.process)


def main(argv: Sequence[str]) -> None:
    """Measures, prints and writes ``end_to_end.json`` and ``end_to_end.md``."""
    parser = options(NAME, __doc__)
    parser.add_argument("--model", choices=list(SHAPES), default="qwen2.5-7b")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[2**17, 2**14, 2**20],
        help="slots of the cache, in the order of measuring",
    )
    parser.add_argument("--steps", type=int, default=32, help="of a timed call (%(default)s)")
    parser.add_argument("--calls", type=int, default=3, help="timed; one warms up (%(default)s)")
    parser.add_argument(
        "--mesh", default="", help="shard over devices: tensor=N, sequence=N or tensor=N,sequence=M"
    )
    hosts = parser.add_argument_group(
        "several hosts", "the same command on each, with its number; the first writes the results"
    )
    hosts.add_argument("--coordinator", metavar="HOST:PORT", help="of the first process")
    hosts.add_argument("--processes", type=int, metavar="N")
    hosts.add_argument("--process", type=int, metavar="I", help="of this one, from 0")
    parser.add_argument(
        "--kernels", action="store_true", help="also the time of every kernel, from the profiler"
    )
    parser.add_argument(
        "--pattern",
        type=Path,
        nargs="+",
        default=[],
        help="recorded scans, .npz; see path_patterns",
    )
    args = parser.parse_args(argv)
    for name in ("steps", "calls"):
        check_integer(f"--{name}", getattr(args, name), minimum=1)
    written = args.steps * (args.calls + 1)
    for length in args.lengths:
        check_integer("--lengths", length, minimum=written + 1)
    if args.coordinator is None and (args.processes, args.process) != (None, None):
        raise ConfigError("--processes and --process are of several hosts: give --coordinator")
    _distribute(args)
    mesh = parse_mesh(args.mesh)
    if mesh is not None and mesh.shape[DATA] > 1:
        raise ConfigError(f"--mesh {args.mesh}: one row is not sharded by {DATA}")
    out, retopk, config = prepare_directory(args.out), ReTopK(), SHAPES[args.model]
    decoder = TransformerDecoder(config, jnp.dtype(jnp.bfloat16))
    if mesh is not None:
        decoder = shard_decoder(decoder, mesh)
    parts = parts_of(decoder.config, retopk, args.steps, args.pattern)
    check_only(args.only, parts)
    for length in args.lengths:
        check_sizes(1, length, mesh)
    contexts = {n: Sizes(n, written, buffers_for(decoder, n)) for n in args.lengths}
    settings = {
        "budget": retopk.budget,
        "capacity": retopk.capacity,
        "recall": retopk.recall,
        "window": retopk.window,
        "dtype": "bfloat16",
        "batch": 1,
        "steps": args.steps,
        "calls": args.calls,
        "time": "median call of a loop of decode steps in one jit, over its steps",
    }
    table = Measurements(out, settings, args.commit)
    end = time.monotonic() + args.seconds
    wanted = [
        (length, part)
        for length in args.lengths
        for part, (_, pattern) in parts.items()
        if part in (args.only or parts)
        and (part != "none" or length == args.lengths[0])
        and not table.has(
            model=args.model,
            mesh=args.mesh,
            part=part,
            pattern=None if pattern is None else pattern.source,
            **({} if part == "none" else {"length": length}),
        )
    ]
    if not wanted:
        print(f"{out}: nothing left to measure", flush=True)
        return
    with ThreadPoolExecutor(max_workers=8) as pool:
        programs = _compiling(pool, decoder, parts, contexts, wanted, args.calls)
        model = random_model(config, dtype=decoder.dtype)
        if mesh is not None:
            model = shard_model(model, mesh)
        jax.block_until_ready(model.params)
        _wait(programs, end)
    bandwidth = copy_bytes_per_microsecond()
    print(f"copy {bandwidth * 1e-6:.2f} TB/s", flush=True)
    for length, sizes in contexts.items():
        rows = [part for at, part in wanted if at == length]
        if rows and time.monotonic() < end:
            at = {"model": args.model, "mesh": args.mesh}
            chosen = {part: parts[part] for part in rows}
            _measure(table, model, chosen, programs, sizes, bandwidth, at, end, args.kernels)
    exit_if_all_failed([row for row in table.rows if row["mesh"] == args.mesh], "milliseconds")


def _compiling(
    pool: ThreadPoolExecutor,
    decoder: TransformerDecoder,
    parts: Mapping[str, tuple[AttentionMethod, Pattern | None]],
    contexts: Mapping[int, Sizes],
    wanted: Sequence[tuple[int, str]],
    calls: int,
) -> dict[tuple[int, type[AttentionMethod]], Future[Program]]:
    """Programs by length and method; every mixture is the same program."""
    programs: dict[tuple[int, type[AttentionMethod]], Future[Program]] = {}
    for length, part in wanted:
        method = parts[part][0]
        at = (length, type(method))
        if at not in programs:
            programs[at] = pool.submit(
                compile_steps,
                decoder,
                method,
                decoder.abstract_params,
                contexts[length],
                calls=calls,
            )
    return programs


def _wait(programs: Mapping[Any, Future[Program]], end: float) -> None:
    """Waits until nothing compiles any more, so that it disturbs no measurement."""
    began = time.monotonic()
    for future in programs.values():
        if time.monotonic() > end:
            future.cancel()
        elif not future.cancelled():
            future.exception()
    print(f"compiled {len(programs)} programs in {time.monotonic() - began:.1f} s", flush=True)


def _measure(
    table: Measurements,
    model: CausalLM,
    parts: Mapping[str, tuple[AttentionMethod, Pattern | None]],
    programs: Mapping[tuple[int, type[AttentionMethod]], Future[Program]],
    sizes: Sizes,
    bandwidth: float,
    at: Row,
    end: float,
    kernels: bool,
) -> None:
    """Adds the rows of one length."""
    config, decoder = model.config, model.decoder
    cache = cache_of(decoder.geometry, sizes, decoder.dtype, decoder.mesh)
    name = " ".join(filter(None, at.values()))
    jax.block_until_ready(cache)
    for part, (method, pattern) in parts.items():
        if time.monotonic() > end:
            return
        row: Row = {
            **at,
            "devices": math.prod(_ways(decoder)),
            "length": sizes.length,
            "method": method.name,
            "part": part,
            "kv_bytes": kv_cache_bytes(decoder.geometry, 1, sizes.length, decoder.dtype),
            "recall_bytes": _state_bytes(method, model, sizes.length),
            "kv_buffers": sizes.buffers,
        }
        if sizes.buffers < config.num_layers:
            row["shared"] = f"{config.num_layers} layers take {sizes.buffers} buffers in turn"
        if pattern is not None:
            row["pattern"] = pattern.source
            row["head_share"] = round(pattern.head_share, 4)
            row["group_share"] = round(pattern.group_share, 4)
        began = time.monotonic()
        try:
            program = programs[sizes.length, type(method)].result()
            timing, cache = program.time(method, model.params, cache)
            if kernels:
                row["kernels"], cache = program.kernels(method, model.params, cache)
        except Exception as error:  # any: the other rows are worth having
            message = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            print(f"{name} {sizes.length:9,} {part:12} failed: {message}", flush=True)
            table.put({**row, "milliseconds": None, "error": message})
            if jax.tree.leaves(cache)[0].is_deleted():
                cache = cache_of(decoder.geometry, sizes, decoder.dtype, decoder.mesh)
            continue
        row |= {"milliseconds": round(timing.milliseconds, 4), "spread": round(timing.spread, 4)}
        if timing.candidates is not None:
            row["candidates"] = round(timing.candidates, 1)
        if part == "none":
            row |= _floor(model, bandwidth, timing.milliseconds)
        table.put(row)
        took = time.monotonic() - began
        print(
            f"{name} {sizes.length:9,} {part:12} {timing.milliseconds:9.3f} ms a token "
            f"({took:.1f} s)",
            flush=True,
        )


def _state_bytes(method: AttentionMethod, model: CausalLM, length: int) -> int:
    inner = method.inner if isinstance(method, Forced) else method
    return inner.state_bytes(model.decoder.geometry, 1, length, model.decoder.dtype)


def _floor(model: CausalLM, bandwidth: float, milliseconds: float) -> Row:
    """The time to read all weights once, and only those that a step reads."""
    config, weights = model.config, model.parameter_bytes
    embedding = config.vocab_size * config.hidden_size * model.decoder.dtype.itemsize
    read = weights if config.tied else weights - embedding
    rate = bandwidth * 1e3 * _ways(model.decoder)[0]  # bytes a millisecond
    return {
        "weight_bytes": weights,
        "floor_milliseconds": round(weights / rate, 4),
        "floor_milliseconds_without_embedding": round(read / rate, 4),
        "over_floor": round(milliseconds / (weights / rate), 3),
        "copy_bytes_per_microsecond": round(bandwidth),
    }
