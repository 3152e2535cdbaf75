"""Time by part of one layer's decode attention, from the profiler's kernel times."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention import SETTINGS, exact_attend, full_attend
from benchmarks.kernel_times import kernel_times
from benchmarks.kernel_workload import (
    BUDGET,
    DIM,
    GROUPS,
    HEADS,
    REUSE_ALWAYS,
    SCAN_ALWAYS,
    Layer,
    build,
    forced_paths,
    fused_step,
)
from benchmarks.results_file import prepare_directory
from benchmarks.timed_rows import Row, Table, options
from benchmarks.timing import copy_bytes_per_microsecond
from pallas_kernels.retopk_step import Remembered
from retopk_jax.attention.checks import check_integer

PARTS = {
    "retopk_search": "recall, candidate scoring, scan, bound and filter",
    "retopk_recall": "recall",
    "retopk_candidates": "candidate scoring",
    "retopk_finish": "selection, output and push",
    "exact_scan": "scan",
    "exact_bound": "bound",
    "exact_filter": "filter",
    "exact_finish": "selection and output",
    "full_attention": "attention",
    "full_attention_combine": "combination",
}
"""Kernel name to the part of the method that it is; a kernel of these ops without a name here is a
part of its own, and all other kernels only feed the steps."""
OPS = ("retopk", "exact", "full_attention")
"""What names of the ops' kernels begin with."""


def kernel_microseconds(run: Callable[[], Any]) -> dict[str, float]:
    """Median device time of every kernel of `OPS` that ``run`` launches."""
    jax.block_until_ready(run())
    times = kernel_times(run)
    return {name: float(np.median(times[name])) for name in times if name.startswith(OPS)}


def _retopk_runs(
    layers: list[Layer], rings: list[Remembered], taus: np.ndarray
) -> Callable[[], Any]:
    def step(layer: Layer, remembered: Remembered, tau: jax.Array) -> jax.Array:
        return fused_step(layer.queries[0], layer, remembered, tau)[0]

    run = jax.jit(step).lower(layers[0], rings[0], jnp.asarray(taus[0])).compile()
    return lambda: [
        run(layer, ring, jnp.asarray(taus[i % len(taus)]))
        for _ in range(4)
        for i, (layer, ring) in enumerate(zip(layers, rings, strict=True))
    ]


def _method_runs(
    attend: Callable[[jax.Array, Layer], jax.Array], layers: list[Layer]
) -> Callable[[], Any]:
    run = jax.jit(lambda layer: attend(layer.queries[0], layer)).lower(layers[0]).compile()
    return lambda: [run(layer) for _ in range(4) for layer in layers]


def floor_rows(kernel: str, length: int, taus: np.ndarray | None) -> float | None:
    """Keys and values that a launch must read; None of a kernel that may read next to none.

    Args:
        kernel: its name.
        length: tokens stored.
        taus: `forced_paths` of ReTopK; None where all heads scan.
    """
    scans = np.ones((1, GROUPS), bool)
    if taus is not None:
        scans = (taus > REUSE_ALWAYS).reshape(-1, GROUPS, HEADS // GROUPS).any(-1)
    everything = float(scans.mean()) * GROUPS * (length - 5)
    kept = HEADS * BUDGET
    return {
        "exact_scan": everything,
        "full_attention": 2 * everything,
        "exact_finish": kept,
        "retopk_finish": kept,
    }.get(kernel)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Stacked parts of every method over length; nothing without matplotlib."""
    try:
        from matplotlib import pyplot
    except ImportError:
        return
    methods = list(dict.fromkeys(row["method"] for row in rows))
    parts = list(dict.fromkeys(row["part"] for row in rows))
    lengths = sorted({row["length"] for row in rows})
    figure, axes = pyplot.subplots(
        1,
        len(methods),
        figsize=(2.4 * len(methods) + 2, 3.6),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, method in zip(axes[0], methods, strict=True):
        under = np.zeros(len(lengths))
        for color, part in enumerate(parts):
            times = np.zeros(len(lengths))
            for row in rows:
                if (row["method"], row["part"]) == (method, part):
                    times[lengths.index(row["length"])] += row["microseconds"]
            ticks = [f"{length // 1024}K" for length in lengths]
            axis.bar(ticks, times, bottom=under, color=f"C{color}", label=part)
            under += times
        axis.set_title(method, fontsize=9)
    axes[0, 0].set_ylabel("µs of kernels")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=7, loc="outside right center")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def measure(table: Table, length: int, bandwidth: float) -> None:
    """Adds the parts of every method at a length."""
    if table.closed:
        return
    layers, rings = build(length, 1)
    mixture = forced_paths(1, 16)
    reuse, scan = (np.full_like(mixture[:1], tau) for tau in (REUSE_ALWAYS, SCAN_ALWAYS))
    paths = {
        "full": None,
        "exact": None,
        "retopk, all reuse": reuse,
        "retopk, all scan": scan,
        "retopk, mixture": mixture,
    }
    attends = {"full": full_attend("triton"), "exact": exact_attend(None)}

    def prepare(method: str) -> Callable[[], Any]:
        taus = paths[method]
        if taus is None:
            return _method_runs(attends[method], layers)
        return _retopk_runs(layers, rings, taus)

    wanted = [method for method in paths if table.wants(method, "")]
    with ThreadPoolExecutor() as pool:
        runs = dict(zip(wanted, pool.map(prepare, wanted), strict=True))
    for method, run in runs.items():
        taus = paths[method]
        for kernel, microseconds in kernel_microseconds(run).items():
            part = PARTS.get(kernel, kernel)
            rows = floor_rows(kernel, length, taus)
            floor = None if rows is None else round(rows * 2 * DIM / bandwidth, 2)
            table.put(
                {
                    "method": method,
                    "part": part,
                    "kernel": kernel,
                    "length": length,
                    "batch": 1,
                    "microseconds": round(microseconds, 2),
                    "floor_microseconds": floor,
                }
            )
            print(f"{method:18} {part:36} {length:8} {microseconds:8.2f} us", flush=True)


def main(argv: Sequence[str]) -> None:
    """Measures, prints and writes ``decomposition.json``, a table and a plot."""
    parser = options("decomposition", __doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 32768, 65536, 131072])
    args = parser.parse_args(argv)
    for length in args.lengths:
        check_integer("--lengths", length, minimum=1)
    prepare_directory(args.out)
    bandwidth = copy_bytes_per_microsecond()
    settings = {
        **SETTINGS,
        "time": "median kernel time in a profile, launches left out",
        "copy_bytes_per_microsecond": round(bandwidth),
    }
    table = Table("decomposition", settings, args)
    for length in args.lengths:
        measure(table, length, bandwidth)
    plot(table.rows, table.plot_path)
