"""The kernels beside plain XLA over sizes and dtypes, and their times, on a GPU."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.results_file import prepare_directory
from benchmarks.timed_rows import Measure, Measured, Table, check_only, options
from benchmarks.timing import after, call_microseconds, chain_of, copy_bytes_per_microsecond
from pallas_kernels.exact_support import exact_support
from pallas_kernels.prefill_supports import prefill_supports
from pallas_kernels.retopk_step import Remembered, ReTopKStep, retopk_step

STEPS_TIMED = 200
"""In a call, whose dispatch takes as long as a few of them."""
VARIANTS = 8
"""Queries that a timed call takes in turn."""
TAU = 0.85


@dataclass(frozen=True)
class Case:
    """Sizes of a problem by their letters; ``each`` is H / G.

    Attributes:
        scores: how they are distributed: ``spread`` over the keys; ``clustered``, the larger ones
            all in the first quarter of the keys; ``equal``. More keys than a selection holds in
            registers may be among the best of the latter two.
    """

    b: int = 2
    g: int = 2
    each: int = 4
    d: int = 128
    s: int = 16384
    k: int = 512
    c: int = 32
    r: int = 4
    w: int = 32
    dtype: str = "bfloat16"
    scores: str = "spread"

    @property
    def h(self) -> int:
        """H."""
        return self.g * self.each


STEPS = {
    "base": Case(),
    "D=64": Case(d=64),
    "D=80": Case(d=80),
    "D=96": Case(d=96),
    "D=256": Case(d=256),
    "K=64": Case(k=64),
    "K=2048": Case(k=2048),
    "C=128": Case(c=128),
    "R=16": Case(r=16),
    "R=1, W=0": Case(r=1, w=0),
    "B=1": Case(b=1),
    "B=16": Case(b=16, s=8192),
    "B=64": Case(b=64, s=4096),
    "H/G=1": Case(each=1),
    "H/G=3": Case(each=3),
    "H/G=5": Case(each=5),
    "H/G=7": Case(each=7),
    "H/G=8": Case(each=8),
    "float16": Case(dtype="float16"),
    "float32": Case(dtype="float32"),
    "clustered": Case(scores="clustered"),
    "equal": Case(scores="equal"),
    "float32, D=256, K=2048": Case(dtype="float32", d=256, k=2048),
    "float16, D=80, K=64, C=128, R=16, H/G=5": Case(
        dtype="float16", d=80, k=64, c=128, r=16, each=5
    ),
}
SCANS = {name: STEPS[name] for name in ("base", "D=256", "K=2048", "float32", "clustered", "equal")}
PREFILLS = {"base": Case(b=1), "C=128": Case(b=1, c=128)}


class Problem(NamedTuple):
    """Arguments of an op.

    Attributes:
        queries: ``[VARIANTS, ...]``, of which a step takes one.
        fixed: what else it takes, and does not change.
        carried: what a step takes and returns; None for an op without state.
    """

    queries: jax.Array
    fixed: tuple[jax.Array, ...]
    carried: Remembered | None


class Op(NamedTuple):
    """An op as it is checked.

    Attributes:
        cases: by name.
        problem: arguments of a case.
        call: the op on one query; gives its result and what is carried.
    """

    cases: dict[str, Case]
    problem: Callable[[Case], Problem]
    call: Callable[..., tuple[Any, Remembered | None]]


def _whole(key: jax.Array, shape: tuple[int, ...], largest: int) -> jax.Array:
    return jax.random.randint(key, shape, -largest, largest + 1).astype(jnp.float32) / 64


@partial(jax.jit, static_argnums=(0, 1))
def _arrays(case: Case, queries_of: int) -> tuple[jax.Array, ...]:
    """Queries ``[VARIANTS, B, H, n, D]``, keys, values and lengths.

    Numbers are whole 64ths so small that float32 sums of products are exact in any order: supports
    must be equal, not nearly so.
    """
    q, n, k, v, length = jax.random.split(jax.random.key(0), 5)
    cache = (case.b, case.g, case.s, case.d)
    shape = (case.b, case.h, queries_of, case.d)
    queries = _whole(q, (1, *shape), 100) + _whole(n, (VARIANTS, *shape), 20)
    keys, values = _whole(k, cache, 128), _whole(v, cache, 128)
    if case.scores == "equal":
        keys = jnp.broadcast_to(keys[:, :, :1], cache)
    elif case.scores == "clustered":
        token = jnp.arange(case.s)[:, None]
        keys = jnp.where((token < case.s // 4)[None, None], keys, jnp.round(keys * 4) / 64)
    lengths = jax.random.randint(length, (case.b,), case.s * 3 // 4, case.s + 1)
    lengths = lengths.at[0].set(case.s)
    return (*(x.astype(case.dtype) for x in (queries, keys, values)), lengths)


@partial(jax.jit, static_argnums=0)
def _remembered(case: Case, q: jax.Array, lengths: jax.Array) -> Remembered:
    """A full ring whose entries have known, well-separated similarities to a query."""
    n, p, u, s = jax.random.split(jax.random.key(1), 4)
    shape = (case.b, case.h, case.c)
    q = q.astype(jnp.float32)
    unit = (q / jnp.linalg.norm(q, axis=-1, keepdims=True))[:, :, None]
    noise = jax.random.normal(n, (*shape, case.d))
    noise -= jnp.sum(noise * unit, axis=-1, keepdims=True) * unit
    noise /= jnp.linalg.norm(noise, axis=-1, keepdims=True)
    order = jnp.argsort(jax.random.uniform(p, shape), axis=-1)
    cosine = (0.99 - 0.6 / case.c * order.astype(jnp.float32))[..., None]
    ring = cosine * unit + jnp.sqrt(1 - cosine**2) * noise
    # A support has one token of each of K equal stretches, often that of the head's other entries.
    place = jax.random.uniform(u, (*shape, case.k))
    often = jax.random.uniform(s, (*shape, case.k)) < 0.6
    place = jnp.where(often, place[:, :, :1], place)
    k = jnp.arange(case.k, dtype=jnp.int32)[None, None, None]
    stretch = ((lengths - 1) // case.k)[:, None, None, None]
    tokens = k * stretch + (place * stretch.astype(jnp.float32)).astype(jnp.int32)
    last = (jnp.arange(case.c) == case.c - 1)[None, None, :, None]
    return Remembered.of(
        ring.astype(case.dtype),
        jnp.where(last & (k >= case.k - 3), -1, tokens),
        jnp.full((case.b,), 2 * case.c + 3, jnp.int32),
    )


def _step_problem(case: Case) -> Problem:
    queries, keys, values, lengths = _arrays(case, 1)
    queries = queries[:, :, :, 0]
    scans = jax.random.uniform(jax.random.key(2), (case.b, case.h)) < 0.2
    tau = jnp.where(scans.at[0, 0].set(True), 2.0, TAU)
    ring = _remembered(case, queries[0], lengths)
    return Problem(queries, (keys, values, lengths, tau), ring)


def _step(
    case: Case, implementation: str, q: jax.Array, fixed: Sequence[jax.Array], ring: Remembered
) -> tuple[ReTopKStep, Remembered]:
    keys, values, lengths, tau = fixed
    no = jnp.zeros((case.b,), jnp.bool_)
    done = retopk_step(
        *(q, keys, values, ring, lengths, no, ~no, tau),
        entries=case.r,
        window=case.w,
        implementation=implementation,
    )
    return done, done.remembered


def _scan_problem(case: Case) -> Problem:
    queries, keys, _, lengths = _arrays(case, 1)
    wanted = jax.random.uniform(jax.random.key(2), (case.b, case.h)) < 0.7
    return Problem(queries[:, :, :, 0], (keys, lengths, wanted.at[0, 0].set(True)), None)


def _scan(
    case: Case, implementation: str, q: jax.Array, fixed: Sequence[jax.Array], _: None
) -> tuple[Any, None]:
    return exact_support(q, *fixed, budget=case.k, implementation=implementation), None


def _prefill_problem(case: Case) -> Problem:
    queries, keys, _, lengths = _arrays(case, case.c)
    positions = lengths[:, None] - case.c + jnp.arange(case.c, dtype=jnp.int32)[None]
    return Problem(queries, (keys, positions), None)


def _prefill(
    case: Case, implementation: str, q: jax.Array, fixed: Sequence[jax.Array], _: None
) -> tuple[Any, None]:
    return prefill_supports(q, *fixed, budget=case.k, implementation=implementation), None


OPS = {
    "retopk_step": Op(STEPS, _step_problem, _step),
    "exact_support": Op(SCANS, _scan_problem, _scan),
    "prefill_supports": Op(PREFILLS, _prefill_problem, _prefill),
}


def once(op: Op, case: Case) -> Callable[[Problem], Any]:
    """The plain XLA form on the first query."""
    return lambda p: op.call(case, "reference", p.queries[0], p.fixed, p.carried)[0]


def repeated(op: Op, case: Case) -> Callable[[Problem], tuple[Any, jax.Array]]:
    """The kernels on the first query, and then in a chain: one program checks and times."""
    call = jax.jit(partial(op.call, case, "triton"))

    def run(p: Problem) -> tuple[Any, jax.Array]:
        first, carried = call(p.queries[0], p.fixed, p.carried)

        def body(i: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            chain, carried = carry
            result, carried = call(after(chain, p.queries[i % VARIANTS]), p.fixed, carried)
            return chain_of(jax.tree.leaves(result)[0]), carried

        start = chain_of(jax.tree.leaves(first)[0])
        return first, lax.fori_loop(1, STEPS_TIMED, body, (start, carried))[0]

    return run


def differences(expected: Any, got: Any) -> dict[str, float]:
    """Leaves that differ by more than rounding, with the largest difference; integers may not."""
    wrong = {}
    for (path, want), have in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(got), strict=True
    ):
        a, b = (np.asarray(x, np.float64) for x in (want, have))
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        error = float(np.max(np.abs(np.where(same, 0.0, a) - np.where(same, 0.0, b)), initial=0.0))
        # Kernels and XLA sum in float32, in different orders; 16 bits round the sum once more.
        bound = 0.0
        if jnp.issubdtype(want.dtype, jnp.floating):
            largest = float(np.max(np.abs(a), where=np.isfinite(a), initial=0.0))
            bound = (2 * float(jnp.finfo(want.dtype).eps) + 1e-5) * largest
        if not error <= bound:
            wrong[jax.tree_util.keystr(path) or "result"] = error
    return wrong


def floor_bytes(case: Case, op: str, problem: Problem, result: Any) -> float:
    """Bytes of the keys and values that one call must read."""
    row = case.d * jnp.dtype(case.dtype).itemsize
    if isinstance(result, ReTopKStep):
        scans = np.asarray(result.path) > 0
        unique = float(np.sum(result.unique))
        kept = float(np.sum(np.asarray(result.support) >= 0))
        lengths = np.asarray(problem.fixed[2])
    else:
        wanted = np.ones((case.b, case.h), bool) if op != "exact_support" else problem.fixed[2]
        scans, unique, kept = np.asarray(wanted), 0.0, 0.0
        last = problem.fixed[1]
        lengths = np.asarray(last if last.ndim == 1 else last[:, -1] + 1)
    groups = scans.reshape(case.b, case.g, case.each).any(-1).sum(-1)
    return row * (float(np.sum(groups * lengths)) + unique + kept)


def main(argv: Sequence[str]) -> None:
    """Checks, times and prints; writes ``kernel_matrix.json`` and a table.

    Raises:
        SystemExit: a kernel differs from plain XLA, or did not run; after everything is written.
    """
    args = options("kernel_matrix", __doc__).parse_args(argv)
    check_only(args.only, [*OPS, *(part for op in OPS.values() for part in op.cases)])
    prepare_directory(args.out)
    bandwidth = copy_bytes_per_microsecond()
    settings = {
        "time": f"a step of {STEPS_TIMED} in one jit; one layer, which may stay in the L2 cache",
        "tau": f"{TAU}, of which 20 % of the heads scan always",
        "copy_bytes_per_microsecond": round(bandwidth),
    }
    table = Table("kernel_matrix", settings, args)
    wanted = [
        (name, part, case)
        for name, op in OPS.items()
        for part, case in op.cases.items()
        if table.wants(name, part)
    ]

    def prepare(name: str, case: Case) -> Measure:
        op = OPS[name]
        shapes = jax.eval_shape(partial(op.problem, case))
        programs = repeated(op, case), once(op, case)
        kernels, reference = (jax.jit(program).lower(shapes).compile() for program in programs)

        def run() -> Measured:
            problem = op.problem(case)
            result = kernels(problem)[0]
            wrong = differences(reference(problem), result)
            microseconds = call_microseconds(kernels, problem) / STEPS_TIMED
            floor = floor_bytes(case, name, problem, result) / bandwidth
            return microseconds, floor, {"equal": not wrong, "wrong": wrong, "sizes": asdict(case)}

        return run

    for name, part, case in wanted:
        table.add(name, part, (case.s, case.b), partial(prepare, name, case))
    table.measure()
    failed = [f"{r['method']}, {r['part']}" for r in table.rows if not r.get("equal")]
    print(f"{len(table.rows) - len(failed)} of {len(wanted)} cases equal plain XLA")
    if failed:
        raise SystemExit(f"not equal to plain XLA: {'; '.join(failed)}")
