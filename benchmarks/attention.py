"""Decode attention of one layer by every method and length, on one GPU."""

import argparse
import statistics
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
    build,
    forced_paths,
    time_method,
    time_retopk,
)
from benchmarks.results_file import prepare_directory, write_results
from benchmarks.timing import copy_bytes_per_microsecond
from pallas_kernels.exact_support import exact_support
from pallas_kernels.full_attention import full_attention
from pallas_kernels.sparse_attend import sparse_attend

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


def measure(length: int, batch: int, bandwidth: float) -> list[dict[str, Any]]:
    """Rows of one length and batch."""
    layers, rings = build(length, batch)
    rows: list[dict[str, Any]] = []
    tokens = batch * (length - 5)
    scan = tokens * GROUPS * DIM * 2 / bandwidth
    row_bytes = batch * HEADS * DIM * 2 / bandwidth

    def add(method: str, part: str, microseconds: float, floor: float, **more: Any) -> None:
        rows.append(
            {
                "method": method,
                "part": part,
                "length": length,
                "batch": batch,
                "microseconds": round(microseconds, 2),
                "floor_microseconds": round(floor, 2),
                **more,
            }
        )
        print(
            f"{method:8} {part:10} {length:8} {batch:3} {microseconds:10.2f} us, "
            f"floor {floor:8.2f} {more or ''}",
            flush=True,
        )

    empty = time_method(lambda q, _: q * 1.5, layers)
    reuse, unique = time_retopk(np.full((1, batch, HEADS), REUSE_ALWAYS, np.float32), layers, rings)
    reuse_floor = (unique + BUDGET) * row_bytes
    add("retopk", "reuse", reuse - empty, reuse_floor, unique=round(unique, 1))
    taus = forced_paths(batch, 16)
    scans = taus > 0
    groups = scans.reshape(16, batch, GROUPS, -1).any(-1).mean()
    mixed, _ = time_retopk(taus, layers, rings)
    mixed_floor = scan * groups + (1 - scans.mean()) * reuse_floor
    mixed_floor += scans.mean() * BUDGET * row_bytes
    add(
        "retopk",
        "mixture",
        mixed - empty,
        mixed_floor,
        scanning_heads=round(float(scans.mean()), 4),
        scanning_groups=round(float(groups), 4),
    )
    exact_floor = scan + BUDGET * row_bytes
    add("exact", "ours", time_method(exact_attend(None), layers) - empty, exact_floor)
    if tokens <= 2**18:
        time = time_method(exact_attend("reference"), layers) - empty
        add("exact", "lax.top_k", time, exact_floor)
    add("full", "triton", time_method(full_attend("triton"), layers) - empty, 2 * scan)
    turned = [
        Layer(jnp.swapaxes(x.keys, 1, 2), jnp.swapaxes(x.values, 1, 2), x.queries, x.lengths)
        for x in layers
    ]
    add("full", "cudnn", time_method(cudnn_attend, turned) - empty, 2 * scan)
    del turned
    sdpa = torch_microseconds(length, batch, len(layers))
    if sdpa is not None:
        add("full", "torch", sdpa, 2 * scan)
    return rows


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Time over length at batch 1; nothing without matplotlib."""
    try:
        from matplotlib import pyplot
    except ImportError:
        return
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    for method, part in dict.fromkeys((r["method"], r["part"]) for r in rows):
        line = [r for r in rows if (r["method"], r["part"], r["batch"]) == (method, part, 1)]
        axes.plot(
            [r["length"] for r in line],
            [r["microseconds"] for r in line],
            marker="o",
            label=f"{method}, {part}",
        )
    axes.set(xscale="log", yscale="log", xlabel="context (tokens)", ylabel="µs per layer and step")
    axes.set_xscale("log", base=2)
    axes.legend(fontsize=8)
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
        default=[16384, 32768, 65536, 131072, 1048576],
        help="tokens stored, batch 1",
    )
    parser.add_argument("--batch", type=int, default=16, help="a second batch, at --batch-lengths")
    parser.add_argument("--batch-lengths", type=int, nargs="*", default=[16384, 131072])
    args = parser.parse_args(argv)
    out = prepare_directory(args.out)
    bandwidth = copy_bytes_per_microsecond()
    print(f"copy {bandwidth * 1e-6:.2f} TB/s", flush=True)
    rows: list[dict[str, Any]] = []
    cases = [(n, 1) for n in args.lengths] + [(n, args.batch) for n in args.batch_lengths]
    settings = {**SETTINGS, "copy_bytes_per_microsecond": round(bandwidth)}
    for length, batch in cases:
        rows += measure(length, batch, bandwidth)
        write_results(out / "attention.json", "attention", settings, rows)
    plot(rows, out / "attention.png")
