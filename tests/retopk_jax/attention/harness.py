"""Runs a method over several decode steps of a ragged batch and hands out every row of each."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from retopk_jax.attention import AttentionMethod, Report, Step

DIM = 16
SLOTS, STEPS, ROWS = 48, 7, 4
GROUPS = {"g1": (2, 2), "g3": (6, 2), "g7": (7, 1)}
"""(H, G) by group size."""

UNIT = 2.0**-24
"""Rounding error of float32, relative."""

Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Prompts and the tokens after them; slots beyond a row's length hold later tokens."""

    lengths: list[int]  # [B] prompt tokens
    keys: NDArray[np.float32]  # [B, G, S, D]
    values: NDArray[np.float32]  # [B, G, S, D]
    queries: NDArray[np.float32]  # [T, B, H, D]
    active: NDArray[np.bool_]  # [T, B]


@dataclasses.dataclass(frozen=True)
class Row:
    """One active row of a step: what the oracle takes, and what the method gave."""

    index: int
    row: int
    q: Array  # [H, D]
    keys: Array  # [G, L, D]
    values: Array  # [G, L, D]
    out: NDArray[np.float32]  # [H, D]
    supports: list[tuple[int, ...]]  # per head
    path: NDArray[np.int32] | None  # [H]

    @property
    def length(self) -> int:
        return self.keys.shape[1]


def normal_problem(
    seed: int, shape: tuple[int, int], lengths: list[int], scale: float = 1.0
) -> Problem:
    """Standard normal content, queries times `scale`; a row is inactive in a fifth of its steps."""
    rng = np.random.default_rng(seed)
    heads, groups = shape
    batch = len(lengths)
    active = rng.random((STEPS, batch)) < 0.8
    active[0] = True
    return Problem(
        lengths,
        rng.normal(size=(batch, groups, SLOTS, DIM)).astype(np.float32),
        rng.normal(size=(batch, groups, SLOTS, DIM)).astype(np.float32),
        (scale * rng.normal(size=(STEPS, batch, heads, DIM))).astype(np.float32),
        active,
    )


def grid_problem(seed: int, shape: tuple[int, int], lengths: list[int]) -> Problem:
    """Small integers: float32 holds every score, bound and projection exactly, and many tie."""
    problem = normal_problem(seed, shape, lengths)
    rng = np.random.default_rng(seed)
    return dataclasses.replace(
        problem,
        keys=rng.integers(-2, 3, problem.keys.shape).astype(np.float32),
        values=rng.integers(-4, 5, problem.values.shape).astype(np.float32),
        queries=rng.integers(-3, 4, problem.queries.shape).astype(np.float32),
    )


def ragged(rows: int = ROWS) -> list[list[int]]:
    """Prompt lengths 1, 2, … in batches whose rows are far apart: every boundary is crossed."""
    batches = (SLOTS - STEPS) // rows
    return [[1 + batch + row * batches for row in range(rows)] for batch in range(batches)]


@functools.cache
def compiled():
    def prime(method, keys, values, tail, lengths):
        return method.prime(0, keys, values, tail, lengths)

    def attend(method, state, q, keys, values, step):
        return method.attend(0, state, q, keys, values, step)

    return jax.jit(prime), jax.jit(attend)


def without_later(cache: NDArray[np.float32], lengths: NDArray[np.int32]) -> jax.Array:
    """The cache as it is at prefill, later tokens replaced by large garbage."""
    slot = np.arange(cache.shape[2])[None, None, :, None]
    return jnp.asarray(np.where(slot < lengths[:, None, None, None], cache, np.float32(1e3)))


def walk(
    method: AttentionMethod, problem: Problem, rates: NDArray[np.float32] | None = None
) -> Iterator[Row]:
    """Every active row of every step; asserts that the others' state stays as it is."""
    prime, attend = compiled()
    lengths = np.array(problem.lengths, np.int32)
    batch, heads = problem.queries.shape[1:3]
    group = heads // problem.keys.shape[1]
    tail = jnp.zeros((batch, method.tail_queries, heads, problem.keys.shape[3]), jnp.float32)
    state = prime(
        method,
        without_later(problem.keys, lengths),
        without_later(problem.values, lengths),
        tail,
        jnp.asarray(lengths),
    )
    index = np.zeros(batch, np.int32)
    angles = None
    if rates is not None:
        angles = jnp.broadcast_to(jnp.asarray(rates)[None], (batch, rates.size))
    for queries, active in zip(problem.queries, problem.active, strict=True):
        lengths = lengths + active
        step = Step(jnp.asarray(lengths), jnp.asarray(index), jnp.asarray(active), angles)
        before = jax.tree.map(np.asarray, state)
        keys, values = without_later(problem.keys, lengths), without_later(problem.values, lengths)
        out, state, report = attend(method, state, jnp.asarray(queries), keys, values, step)
        assert isinstance(report, Report)
        for row in range(batch):
            if not active[row]:
                for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state), strict=True):
                    np.testing.assert_array_equal(old[row], new[row])
                continue
            valid = int(lengths[row])
            yield Row(
                int(index[row]),
                row,
                queries[row].astype(np.float64),
                problem.keys[row, :, :valid].astype(np.float64),
                problem.values[row, :, :valid].astype(np.float64),
                np.asarray(out[row]),
                [tokens(s, valid) for s in supports_of(report, row, heads)],
                None if report.path is None else np.asarray(report.path[row]),
            )
        index = index + active
    assert group * problem.keys.shape[1] == heads


def supports_of(report: Report, row: int, heads: int) -> list[NDArray[np.int32]]:
    assert report.support is not None, "dense"
    support = np.asarray(report.support[row])
    assert support.shape[0] == heads
    return list(support)


def tokens(support: NDArray[np.int32], length: int) -> tuple[int, ...]:
    """A support as a tuple; asserts that it is ascending, within the row, and padded with -1."""
    kept = [int(t) for t in support if t >= 0]
    assert support.tolist() == kept + [-1] * (support.size - len(kept))
    assert kept == sorted(set(kept))
    assert not kept or kept[-1] < length
    return tuple(kept)


def output_bound(row: Row, extra: float = 0.0) -> float:
    """Largest error of softmax attention in float32, of scores that are off by `extra` as well.

    A score is off by (D + 2) u |q| |k| / sqrt(D); a weight, relatively, by twice the scores' error,
    8u for each exponential, n u for either sum and 3u for the quotient and the product.
    """
    norms = np.linalg.norm(row.q, axis=-1).max() * np.linalg.norm(row.keys, axis=-1).max()
    dim = row.q.shape[1]
    scores = (dim + 2) * UNIT * norms / np.sqrt(dim) + extra
    return (2 * scores + (2 * row.length + 24) * UNIT) * float(np.abs(row.values).max())


def assert_same(
    row: Row, supports: list[tuple[int, ...]], output: Array, extra: float = 0.0
) -> None:
    assert row.supports == supports
    np.testing.assert_allclose(row.out, output, rtol=0, atol=output_bound(row, extra))
