"""Time by part of one layer's decode attention, from the profiler's kernel times."""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention import SETTINGS, exact_attend, full_attend
from benchmarks.kernel_workload import (
    ENTRIES,
    REUSE_ALWAYS,
    SCAN_ALWAYS,
    WINDOW,
    Layer,
    build,
    forced_paths,
)
from benchmarks.results_file import prepare_directory, write_results
from pallas_kernels.retopk_step import Remembered, retopk_step

PARTS = {
    "retopk_recall": "recall and candidate scoring",
    "retopk_finish": "selection, output and push",
    "exact_scan": "scan",
    "exact_filter": "filter",
    "exact_select": "selection",
    "sparse_attend": "output",
    "full_attention": "attention",
    "full_attention_combine": "combination",
}
"""Kernel name to the part of the method that it is; other kernels only feed the steps."""


def kernel_microseconds(run: Callable[[], Any]) -> dict[str, float]:
    """Median device time of every kernel in `PARTS` that ``run`` launches."""
    jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (trace,) = Path(folder).rglob("*.xplane.pb")
        times: dict[str, list[float]] = defaultdict(list)
        for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
            for line in plane.lines if "GPU" in plane.name else ():
                for event in line.events if "tream" in line.name else ():
                    if event.name in PARTS:
                        times[event.name].append(event.duration_ns / 1e3)
    return {name: float(np.median(durations)) for name, durations in times.items()}


def _retopk_runs(
    layers: list[Layer], rings: list[Remembered], taus: np.ndarray
) -> Callable[[], Any]:
    batch = layers[0].keys.shape[0]
    no = jnp.zeros((batch,), jnp.bool_)

    @jax.jit
    def step(layer: Layer, remembered: Remembered, tau: jax.Array, q: jax.Array) -> jax.Array:
        return retopk_step(
            q,
            layer.keys,
            layer.values,
            remembered,
            layer.lengths,
            no,
            ~no,
            tau,
            entries=ENTRIES,
            window=WINDOW,
        ).out

    return lambda: [
        step(layer, ring, jnp.asarray(taus[i % len(taus)]), layer.queries[0])
        for _ in range(4)
        for i, (layer, ring) in enumerate(zip(layers, rings, strict=True))
    ]


def _method_runs(
    attend: Callable[[jax.Array, Layer], jax.Array], layers: list[Layer]
) -> Callable[[], Any]:
    step = jax.jit(lambda layer: attend(layer.queries[0], layer))
    return lambda: [step(layer) for _ in range(4) for layer in layers]


def main(argv: Sequence[str]) -> None:
    """Measures, prints and writes ``decomposition.json``."""
    parser = argparse.ArgumentParser(prog="benchmarks decomposition", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for the results")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 32768, 65536, 131072])
    parser.add_argument("--commit", help="of these files, where they are not in git")
    args = parser.parse_args(argv)
    more = {} if args.commit is None else {"commit": args.commit}
    out = prepare_directory(args.out)
    rows: list[dict[str, Any]] = []
    for length in args.lengths:
        layers, rings = build(length, 1)
        paths = forced_paths(1, 16)
        runs = {
            "full": _method_runs(full_attend("triton"), layers),
            "exact": _method_runs(exact_attend(None), layers),
            "retopk, all reuse": _retopk_runs(layers, rings, np.full_like(paths[:1], REUSE_ALWAYS)),
            "retopk, all scan": _retopk_runs(layers, rings, np.full_like(paths[:1], SCAN_ALWAYS)),
            "retopk, mixture": _retopk_runs(layers, rings, paths),
        }
        for method, run in runs.items():
            for kernel, microseconds in kernel_microseconds(run).items():
                rows.append(
                    {
                        "method": method,
                        "part": PARTS[kernel],
                        "kernel": kernel,
                        "length": length,
                        "batch": 1,
                        "microseconds": round(microseconds, 2),
                        "floor_microseconds": None,
                    }
                )
                print(f"{method:18} {PARTS[kernel]:36} {length:8} {microseconds:8.2f} us")
        settings = {**SETTINGS, "time": "median kernel time in a profile, launches left out"}
        write_results(out / "decomposition.json", "decomposition", settings, rows, **more)
