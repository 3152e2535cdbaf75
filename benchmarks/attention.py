"""Decode attention of one layer by every method and length, on one GPU."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
    SCAN_ALWAYS,
    WINDOW,
    Layer,
    Timed,
    attend_loop,
    build,
    eight_methods,
    empty_microseconds,
    forced_paths,
    mean_candidates,
    method_loop,
    mixture_floor,
    neighbours_alike,
    retopk_loop,
)
from benchmarks.path_patterns import Pattern, recorded, representative
from benchmarks.results_file import prepare_directory
from benchmarks.timed_rows import Measure, Measured, Row, Table, exit_if_all_failed, options
from benchmarks.timing import StepLoop, call_microseconds, copy_bytes_per_microsecond
from pallas_kernels.exact_attention import exact_attention
from pallas_kernels.full_attention import full_attention
from pallas_kernels.prefill_supports import prefill_supports
from retopk_jax.attention import ReTopK
from retopk_jax.attention.checks import check_integer
from retopk_jax.prefill_attention import prompt_attention

RECORDED_STEPS = 64
"""Steps of a recorded mixture in the body of the loop."""
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
        return exact_attention(
            q,
            layer.keys,
            layer.values,
            layer.lengths,
            wanted,
            budget=BUDGET,
            implementation=implementation,
        )[0]

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


def measure(
    table: Table,
    case: tuple[int, int],
    bandwidth: float,
    *,
    each_method: bool,
    patterns: Sequence[Pattern] = (),
) -> None:
    """Adds the rows of one length and batch.

    Args:
        table: of the results.
        case: length and batch.
        bandwidth: of a copy, bytes a microsecond.
        each_method: also through the methods' own interface.
        patterns: recorded mixtures of paths, measured at batch 1.
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
    empty = empty_microseconds(layers)

    def of_loop(loop: StepLoop, floor: float) -> Measure:
        return lambda: (loop.time()[0] - empty, floor, {})

    def reuse() -> Measure:
        loop = retopk_loop(np.full((1, batch, HEADS), REUSE_ALWAYS, np.float32), layers, rings)

        def run() -> Measured:
            nonlocal reuse_floor
            microseconds, states = loop.time()
            unique = mean_candidates(states)
            reuse_floor = (unique + BUDGET) * row_bytes
            return microseconds - empty, reuse_floor, {"unique": round(unique, 1)}

        return run

    def of_paths(taus: np.ndarray, more: Mapping[str, str]) -> Measure:
        loop = retopk_loop(taus, layers, rings)

        def run() -> Measured:
            microseconds, states = loop.time()
            floor, shares = mixture_floor(taus, length, mean_candidates(states), bandwidth)
            return microseconds - empty, floor, {**shares, **more}

        return run

    def of_pattern(pattern: Pattern) -> Measure:
        scans = representative(pattern, RECORDED_STEPS)[:, None]  # [steps, 1, H]
        taus = np.where(scans, SCAN_ALWAYS, REUSE_ALWAYS).astype(np.float32)
        return of_paths(taus, {"pattern": pattern.source})

    def stateless(attend: Callable[[jax.Array, Layer], jax.Array], floor: float) -> Measure:
        return of_loop(method_loop(attend, layers), floor)

    def alike() -> Measure:
        smooth = [neighbours_alike(layer) for layer in layers]
        return of_loop(method_loop(exact_attend(None), smooth), exact_floor)

    def cudnn() -> Measure:
        turned = [
            Layer(jnp.swapaxes(x.keys, 1, 2), jnp.swapaxes(x.values, 1, 2), x.queries, x.lengths)
            for x in layers
        ]
        return of_loop(method_loop(cudnn_attend, turned), 2 * scan)

    def sdpa() -> Measured | None:
        microseconds = torch_microseconds(length, batch, len(layers))
        return None if microseconds is None else (microseconds, 2 * scan, {})

    def step(timed: Timed) -> Measure:
        loop = attend_loop(timed.method, layers, rings)

        def run() -> Measured:
            numbers = tokens * GROUPS * timed.scanned + batch * BUDGET * timed.attended
            floor = reuse_floor if isinstance(timed.method, ReTopK) else 2 * numbers / bandwidth
            return loop.time()[0] - empty, floor, {}

        return run

    table.add("retopk", "reuse", case, reuse)
    table.add("retopk", "mixture", case, partial(of_paths, forced_paths(batch, 16), {}))
    for pattern in patterns if batch == 1 else ():
        table.add("retopk", Path(pattern.source).stem, case, partial(of_pattern, pattern))
    table.add("exact", "ours", case, partial(stateless, exact_attend(None), exact_floor))
    table.add("exact", "ours, neighbours alike", case, alike)
    table.add("full", "triton", case, partial(stateless, full_attend("triton"), 2 * scan))
    table.add("full", "cudnn", case, cudnn)
    table.add("full", "torch", case, lambda: sdpa)
    for timed in eight_methods() if each_method else ():
        table.add(timed.name, timed.part, case, partial(step, timed))
    if tokens <= 2**18:
        plain = partial(stateless, exact_attend("reference"), exact_floor)
        table.add("exact", "lax.top_k", case, plain)
    table.measure()


def measure_prefill(table: Table, length: int, bandwidth: float) -> None:
    """Adds what prefill takes at a length: causal attention by cuDNN, and the tail's supports."""
    if not (table.wants("prefill", "attention") or table.wants("prefill", "supports")):
        return
    case = (length, 1)
    keys = iter(jax.random.split(jax.random.key(0), 5))
    attention_time: float | None = None

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    def attention() -> Measured:
        nonlocal attention_time
        q, k, v = (
            normal(length, HEADS, DIM),
            normal(length, GROUPS, DIM),
            normal(length, GROUPS, DIM),
        )
        attention_time = call_microseconds(jax.jit(prompt_attention), q, k, v)
        return attention_time, 2 * (q.nbytes + k.nbytes) / bandwidth, {}

    def supports() -> Measured:
        cache = normal(1, GROUPS, length, DIM)
        queries = normal(1, HEADS, CAPACITY, DIM)
        positions = jnp.arange(length - CAPACITY, length, dtype=jnp.int32)[None]
        run = jax.jit(partial(prefill_supports, budget=BUDGET))
        microseconds = call_microseconds(run, queries, cache, positions)
        share = {} if attention_time is None else {"of_attention": microseconds / attention_time}
        return microseconds, cache.nbytes / bandwidth, share

    table.add("prefill", "attention", case, lambda: attention)
    table.add("prefill", "supports", case, lambda: supports)
    table.measure()


def plot(rows: Sequence[Row], path: Path) -> None:
    """Time over length at batch 1; nothing without matplotlib."""
    try:
        from matplotlib import pyplot
    except ImportError:
        return
    rows = [r for r in rows if r["microseconds"] is not None and r["batch"] == 1]
    rows = [r for r in rows if r["method"] != "prefill"]
    if not rows:
        return
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
    """Measures, prints and writes ``attention.json``, a table and a plot."""
    parser = options("attention", __doc__)
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
        help="those of --lengths at which all eight methods are measured by their own interface, "
        "and prefill",
    )
    parser.add_argument("--batch", type=int, default=16, help="a second batch, at --batch-lengths")
    parser.add_argument("--batch-lengths", type=int, nargs="*", default=[16384, 131072])
    parser.add_argument("--pattern", type=Path, nargs="+", default=[], help="recorded scans, .npz")
    args = parser.parse_args(argv)
    patterns = [recorded(path, RECORDED_STEPS, 32, HEADS, GROUPS) for path in args.pattern]
    for name in ("lengths", "method_lengths", "batch_lengths"):
        for length in getattr(args, name):
            check_integer(f"--{name.replace('_', '-')}", length, minimum=1)
    check_integer("--batch", args.batch, minimum=1)
    prepare_directory(args.out)
    bandwidth = copy_bytes_per_microsecond()
    print(f"copy {bandwidth * 1e-6:.2f} TB/s", flush=True)
    settings = {**SETTINGS, "copy_bytes_per_microsecond": round(bandwidth)}
    table = Table("attention", settings, args)
    for length in args.lengths:
        each = length in args.method_lengths
        measure(table, (length, 1), bandwidth, each_method=each, patterns=patterns)
        if each:
            measure_prefill(table, length, bandwidth)
    for length in args.batch_lengths:
        measure(table, (length, args.batch), bandwidth, each_method=False)
    plot(sorted(table.rows, key=lambda r: r["length"]), table.plot_path)
    exit_if_all_failed(table.rows)
