"""Decode attention of one layer by every method and length, on one GPU."""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_workload import (
    BUDGET,
    CAPACITY,
    DIM,
    ENTRIES,
    GROUPS,
    HEADS,
    MIXTURE,
    NOISE,
    REUSE_ALWAYS,
    WINDOW,
    Layer,
    Timed,
    build,
    eight_methods,
    forced_paths,
    time_attend,
    time_method,
    time_retopk,
)
from benchmarks.results_file import prepare_directory, write_results
from benchmarks.timing import copy_bytes_per_microsecond
from pallas_kernels.exact_support import exact_support
from pallas_kernels.full_attention import full_attention
from pallas_kernels.sparse_attend import sparse_attend
from retopk_jax.attention import ReTopK

Row = dict[str, Any]

SETTINGS = {
    "heads": HEADS,
    "groups": GROUPS,
    "dim": DIM,
    "budget": BUDGET,
    "capacity": CAPACITY,
    "recall": ENTRIES,
    "window": WINDOW,
    "dtype": "bfloat16",
    "mixture": MIXTURE,
    "query_noise": NOISE,
    "time": "device time of a step in a chained loop inside one jit, less that of an empty step",
}


def exact_attend(implementation: str | None) -> Callable[[jax.Array, Layer], jax.Array]:
    """Exact Top-K attention of all heads."""

    def attend(q: jax.Array, layer: Layer) -> jax.Array:
        wanted = jnp.ones(q.shape[:2], jnp.bool_)
        support, scores = exact_support(
            q, layer.keys, layer.lengths, wanted, budget=BUDGET, implementation=implementation
        )
        return sparse_attend(layer.values, support, scores)

    return attend


def full_attend(implementation: str) -> Callable[[jax.Array, Layer], jax.Array]:
    """Full attention by one implementation."""

    def attend(q: jax.Array, layer: Layer) -> jax.Array:
        return full_attention(
            q, layer.keys, layer.values, layer.lengths, implementation=implementation
        )

    return attend


def cudnn_attend(q: jax.Array, layer: Layer) -> jax.Array:
    """Full attention by cuDNN on a cache in the layout that it wants, ``[B, S, G, D]``."""
    return jax.nn.dot_product_attention(
        q[:, None],
        layer.keys,
        layer.values,
        query_seq_lengths=jnp.ones_like(layer.lengths),
        key_value_seq_lengths=layer.lengths,
        implementation="cudnn",
    )[:, 0]


def torch_microseconds(length: int, batch: int, layers: int) -> float | None:
    """Full attention by PyTorch's SDPA; None without it."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(batch, HEADS, 1, DIM, **options)
    shape = (batch, GROUPS, length - 5, DIM)
    caches = [(torch.randn(shape, **options), torch.randn(shape, **options)) for _ in range(layers)]
    attend = torch.nn.functional.scaled_dot_product_attention
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(4):
            for k, v in caches:
                attend(q, k, v, enable_gqa=True)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (4 * layers))
    del caches
    torch.cuda.empty_cache()
    return statistics.median(times[1:])


class Table:
    """Rows of the results, written as they come; one that fails is a row with its error.

    Attributes:
        rows: so far.
    """

    def __init__(self, write: Callable[[list[Row]], None], only: Sequence[str], seconds: float):
        self.rows: list[Row] = []
        self._write = write
        self._only = only
        self._end = time.monotonic() + seconds

    @property
    def closed(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() >= self._end

    def add(
        self,
        method: str,
        part: str,
        case: tuple[int, int],
        run: Callable[[], tuple[float, float, dict[str, Any]] | None],
    ) -> None:
        """Measures a row; ``run`` gives its time, its floor and what else is to be said."""
        if self.closed or method not in (self._only or (method,)):
            return
        length, batch = case
        row = {"method": method, "part": part, "length": length, "batch": batch}
        start = time.monotonic()
        try:
            measured = run()
        except Exception as error:  # any: the other rows are worth having
            message = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            self.rows.append({**row, "microseconds": None, "error": message})
            print(f"{method:11} {part:10} {length:8} {batch:3} failed: {message}", flush=True)
        else:
            if measured is None:
                return
            microseconds, floor, more = measured
            times = {
                "microseconds": round(microseconds, 2),
                "floor_microseconds": round(floor, 2),
            }
            self.rows.append({**row, **times, **more})
            print(
                f"{method:11} {part:10} {length:8} {batch:3} {microseconds:10.2f} us, "
                f"floor {floor:8.2f} ({time.monotonic() - start:.1f} s) {more or ''}",
                flush=True,
            )
        self._write(sorted(self.rows, key=lambda r: (r["batch"], r["length"])))


def measure(table: Table, case: tuple[int, int], bandwidth: float, *, each_method: bool) -> None:
    """Adds the rows of one length and batch.

    Args:
        table: of the results.
        case: length and batch.
        bandwidth: of a copy, bytes a microsecond.
        each_method: also through the methods' own interface.
    """
    if table.closed:
        return
    length, batch = case
    layers, rings = build(length, batch)
    tokens = batch * (length - 5)
    scan = tokens * GROUPS * DIM * 2 / bandwidth
    row_bytes = batch * HEADS * DIM * 2 / bandwidth
    exact_floor = scan + BUDGET * row_bytes
    reuse_floor = 2 * BUDGET * row_bytes  # until a reuse has been measured
    empty = time_method(lambda q, _: q * 1.5, layers)

    def reuse() -> tuple[float, float, dict[str, Any]]:
        nonlocal reuse_floor
        taus = np.full((1, batch, HEADS), REUSE_ALWAYS, np.float32)
        microseconds, unique = time_retopk(taus, layers, rings)
        reuse_floor = (unique + BUDGET) * row_bytes
        return microseconds - empty, reuse_floor, {"unique": round(unique, 1)}

    def mixture() -> tuple[float, float, dict[str, Any]]:
        taus = forced_paths(batch, 16)
        scans = taus > 0
        groups = scans.reshape(16, batch, GROUPS, -1).any(-1).mean()
        microseconds, _ = time_retopk(taus, layers, rings)
        floor = scan * groups + (1 - scans.mean()) * reuse_floor
        floor += scans.mean() * BUDGET * row_bytes
        shares = {
            "scanning_heads": round(float(scans.mean()), 4),
            "scanning_groups": round(float(groups), 4),
        }
        return microseconds - empty, floor, shares

    def stateless(
        attend: Callable[[jax.Array, Layer], jax.Array], floor: float
    ) -> Callable[[], tuple[float, float, dict[str, Any]]]:
        return lambda: (time_method(attend, layers) - empty, floor, {})

    def cudnn() -> tuple[float, float, dict[str, Any]]:
        turned = [
            Layer(jnp.swapaxes(x.keys, 1, 2), jnp.swapaxes(x.values, 1, 2), x.queries, x.lengths)
            for x in layers
        ]
        return time_method(cudnn_attend, turned) - empty, 2 * scan, {}

    def sdpa() -> tuple[float, float, dict[str, Any]] | None:
        microseconds = torch_microseconds(length, batch, len(layers))
        return None if microseconds is None else (microseconds, 2 * scan, {})

    def step(timed: Timed) -> Callable[[], tuple[float, float, dict[str, Any]]]:
        numbers = tokens * GROUPS * timed.scanned + batch * BUDGET * timed.attended
        floor = reuse_floor if isinstance(timed.method, ReTopK) else 2 * numbers / bandwidth
        return lambda: (time_attend(timed.method, layers, rings) - empty, floor, {})

    table.add("retopk", "reuse", case, reuse)
    table.add("retopk", "mixture", case, mixture)
    table.add("exact", "ours", case, stateless(exact_attend(None), exact_floor))
    table.add("full", "triton", case, stateless(full_attend("triton"), 2 * scan))
    table.add("full", "cudnn", case, cudnn)
    table.add("full", "torch", case, sdpa)
    for timed in eight_methods() if each_method else ():
        table.add(timed.name, timed.part, case, step(timed))
    if tokens <= 2**18:
        table.add("exact", "lax.top_k", case, stateless(exact_attend("reference"), exact_floor))


def plot(rows: Sequence[Row], path: Path) -> None:
    """Time over length at batch 1; nothing without matplotlib."""
    try:
        from matplotlib import pyplot
    except ImportError:
        return
    rows = [r for r in rows if r["microseconds"] is not None and r["batch"] == 1]
    figure, axes = pyplot.subplots(figsize=(6.4, 4.8), layout="constrained")
    for method, part in dict.fromkeys((r["method"], r["part"]) for r in rows):
        line = [r for r in rows if (r["method"], r["part"]) == (method, part)]
        axes.plot(
            [r["length"] for r in line],
            [r["microseconds"] for r in line],
            marker="o",
            linestyle="--" if part.startswith("step") else "-",
            label=f"{method}, {part}",
        )
    axes.set(xscale="log", yscale="log", xlabel="context (tokens)", ylabel="µs per layer and step")
    axes.set_xscale("log", base=2)
    axes.legend(fontsize=7, ncols=2)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(argv: Sequence[str]) -> None:
    """Measures, prints and writes ``attention.json`` and ``attention.png``."""
    parser = argparse.ArgumentParser(prog="benchmarks attention", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for the results")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[131072, 16384, 65536, 32768, 1048576],
        help="tokens stored, batch 1, in the order of measuring",
    )
    parser.add_argument(
        "--method-lengths",
        type=int,
        nargs="*",
        default=[16384, 131072],
        help="those of --lengths at which all eight methods are measured by their own interface",
    )
    parser.add_argument("--batch", type=int, default=16, help="a second batch, at --batch-lengths")
    parser.add_argument("--batch-lengths", type=int, nargs="*", default=[16384, 131072])
    parser.add_argument("--only", nargs="+", default=[], help="methods (all)")
    parser.add_argument("--seconds", type=float, default=1e9, help="no new row after that long")
    parser.add_argument("--commit", help="of these files, where they are not in git")
    args = parser.parse_args(argv)
    out = prepare_directory(args.out)
    bandwidth = copy_bytes_per_microsecond()
    print(f"copy {bandwidth * 1e-6:.2f} TB/s", flush=True)
    settings = {**SETTINGS, "copy_bytes_per_microsecond": round(bandwidth)}
    more = {} if args.commit is None else {"commit": args.commit}

    def write(rows: list[Row]) -> None:
        write_results(out / "attention.json", "attention", settings, rows, **more)

    table = Table(write, args.only, args.seconds)
    for length in args.lengths:
        each = length in args.method_lengths
        measure(table, (length, 1), bandwidth, each_method=each)
    for length in args.batch_lengths:
        measure(table, (length, args.batch), bandwidth, each_method=False)
    plot(sorted(table.rows, key=lambda r: r["length"]), out / "attention.png")
