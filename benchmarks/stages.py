"""ReTopK in five cumulative stages of optimisation, at one input and mixture of paths, on a GPU."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.attention import SETTINGS
from benchmarks.kernel_workload import (
    ENTRIES,
    WINDOW,
    Layer,
    RetopkStep,
    build,
    empty_microseconds,
    forced_paths,
    fused_step,
    mean_candidates,
    mixture_floor,
    retopk_loop,
)
from benchmarks.results_file import prepare_directory
from benchmarks.timed_rows import (
    Measure,
    Measured,
    Row,
    Table,
    check_only,
    exit_if_all_failed,
    options,
)
from benchmarks.timing import copy_bytes_per_microsecond
from pallas_kernels.candidates import candidates
from pallas_kernels.exact_support import exact_support
from pallas_kernels.recall import recall
from pallas_kernels.retopk_step import Remembered
from pallas_kernels.retopk_step.types import FALLBACK, REUSE
from pallas_kernels.select import select
from pallas_kernels.sparse_attend import sparse_attend
from retopk_jax.attention.checks import check_integer


class Parts(NamedTuple):
    """A step of separate ops.

    Attributes:
        search: implementation of recall and candidates.
        output: implementation of selection and sparse attention.
        in_place: whether a push writes one entry of the ring, not a new ring.
    """

    search: str
    output: str
    in_place: bool


STAGES: dict[str, tuple[str, Parts | None]] = {
    "L1": ("retrieval and sparse output apart, in XLA", Parts("reference", "reference", False)),
    "L2": ("union and indexed scoring in one kernel", Parts("triton", "reference", False)),
    "L3": ("selection without a sort, output kernel", Parts("triton", "triton", False)),
    "L4": ("ring of a layer updated in place", Parts("triton", "triton", True)),
    "L5": ("search fused with scoring, selection with output and push", None),
}
"""What a stage adds to the one before, and its parts; None is the fused step.

Heads that do not reuse scan by the same kernels in every stage.
"""


def step_of(parts: Parts) -> RetopkStep:
    """The ReTopK step as separate ops."""

    def take(
        q: jax.Array, layer: Layer, remembered: Remembered, tau: jax.Array
    ) -> tuple[jax.Array, Remembered]:
        queries, supports, pushed, paths, total, signals = remembered
        budget = supports.shape[3]
        found = recall(q, queries, pushed, entries=ENTRIES, implementation=parts.search)
        reuse = (found.rho_max >= tau) & (found.rho_max > -jnp.inf)
        scored = candidates(
            q,
            layer.keys,
            supports,
            found.slots,
            layer.lengths,
            window=WINDOW,
            implementation=parts.search,
        )
        chosen = select(scored.ids, scored.scores, budget=budget, implementation=parts.output)
        exact = exact_support(
            q, layer.keys, layer.lengths, ~reuse, budget=budget, implementation="triton"
        )
        support, scores = (
            jnp.where(reuse[..., None], ours, theirs)
            for ours, theirs in zip(chosen, exact, strict=True)
        )
        out = sparse_attend(layer.values, support, scores, implementation=parts.output)
        qbar = found.qbar.astype(queries.dtype)
        if parts.in_place:
            # Makes the ring's write wait for its reads; free to overlap, XLA would copy it first.
            qbar, support = lax.optimization_barrier((qbar, support))
        path = jnp.where(reuse, REUSE, FALLBACK)
        taken = (path[..., None] == jnp.arange(3)[None, None]).astype(jnp.int32)
        return out, Remembered(
            _push(queries, qbar, pushed, in_place=parts.in_place),
            _push(supports, support, pushed, in_place=parts.in_place),
            pushed + 1,
            paths + taken,
            total + jnp.where(reuse, scored.unique, 0),
            signals,
        )

    return take


def _push(ring: jax.Array, entry: jax.Array, pushed: jax.Array, *, in_place: bool) -> jax.Array:
    """The ring ``[B, H, C, n]`` with ``entry`` ``[B, H, n]`` in place of its oldest."""
    batch, _, capacity, _ = ring.shape
    slot = pushed % capacity
    if in_place:
        return ring.at[jnp.arange(batch), :, slot].set(entry)
    here = jnp.arange(capacity, dtype=jnp.int32)[None] == slot[:, None]  # [B, C]
    return jnp.where(here[:, None, :, None], entry[:, :, None], ring)


@jax.jit
def shared_tokens(ours: jax.Array, theirs: jax.Array) -> jax.Array:
    """Share of the tokens of supports that are in other supports as well."""
    tokens = jnp.sort(jnp.concatenate([ours, theirs], axis=-1), axis=-1)
    both = (tokens[..., 1:] == tokens[..., :-1]) & (tokens[..., 1:] >= 0)
    return jnp.sum(both) / jnp.sum(ours >= 0)


def measure(table: Table, length: int, bandwidth: float) -> None:
    """Adds the stages at a length."""
    if table.closed:
        return
    layers, rings = build(length, 1)
    taus = forced_paths(1, 16)
    empty = empty_microseconds(layers)
    first: tuple[float, list[Remembered]] | None = None

    def prepare(parts: Parts | None) -> Measure:
        take = fused_step if parts is None else step_of(parts)
        loop = retopk_loop(taus, layers, rings, take)

        def run() -> Measured:
            nonlocal first
            microseconds, states = loop.time()
            microseconds -= empty
            floor, more = mixture_floor(taus, length, mean_candidates(states), bandwidth)
            if first is None:
                first = microseconds, states
            shared = [
                float(shared_tokens(a.supports, b.supports))
                for a, b in zip(states, first[1], strict=True)
            ]
            speedup = round(first[0] / microseconds, 3)
            agreement = round(float(np.mean(shared)), 5)
            return microseconds, floor, {**more, "speedup": speedup, "same_support": agreement}

        return run

    for name, (what, parts) in STAGES.items():
        table.add(name, what, (length, 1), partial(prepare, parts))
    table.measure()


def plot(rows: Sequence[Row], path: Path) -> None:
    """Bars of the stages by length; nothing without matplotlib."""
    try:
        from matplotlib import pyplot
    except ImportError:
        return
    rows = [row for row in rows if row["microseconds"] is not None]
    if not rows:
        return
    lengths = sorted({row["length"] for row in rows})
    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    for i, length in enumerate(lengths):
        these = [row for row in rows if row["length"] == length]
        at = [list(STAGES).index(row["method"]) + 0.8 * i / len(lengths) for row in these]
        bars = axes.bar(
            at,
            [row["microseconds"] for row in these],
            width=0.8 / len(lengths),
            align="edge",
            label=f"{length:,} tokens",
        )
        axes.bar_label(bars, [f"{row['speedup']:.2f}x" for row in these], fontsize=7)
    axes.set_xticks([i + 0.4 for i in range(len(STAGES))], list(STAGES))
    axes.set_ylabel("µs per layer and step")
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(argv: Sequence[str]) -> None:
    """Measures, prints and writes ``stages.json``, a table and a plot."""
    parser = options("stages", __doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536, 131072])
    args = parser.parse_args(argv)
    check_only(args.only, [*STAGES, *(what for what, _ in STAGES.values())])
    for length in args.lengths:
        check_integer("--lengths", length, minimum=1)
    prepare_directory(args.out)
    bandwidth = copy_bytes_per_microsecond()
    print(f"copy {bandwidth * 1e-6:.2f} TB/s", flush=True)
    settings: dict[str, Any] = {
        **SETTINGS,
        "stages": {name: what for name, (what, _) in STAGES.items()},
        "speedup": "over the first stage measured at the length",
        "same_support": "share of the tokens remembered at the end that the first stage has, too",
        "copy_bytes_per_microsecond": round(bandwidth),
    }
    table = Table("stages", settings, args)
    for length in args.lengths:
        measure(table, length, bandwidth)
    plot(table.rows, table.plot_path)
    exit_if_all_failed(table.rows)
