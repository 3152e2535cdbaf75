"""One decode step of ReTopK, Exact Top-K and Full, for one query head, in float64 NumPy.

Written from the method's description alone, with Python loops where they are the clearest, and
sharing no code with the package. Where the description is silent:

- a score that is not finite is never selected, on any path;
- a query whose norm is zero or not finite is remembered as a zero vector, so that its cosine with
  every later query is 0, and takes the exact path;
- an empty support gives a zero output;
- of two remembered queries equally similar to the current one, the more recent is recalled first.
"""

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
REUSE, FALLBACK, REFRESH = "reuse", "fallback", "refresh"


@dataclasses.dataclass(frozen=True)
class Method:
    budget: int  # K
    capacity: int  # C
    recall: int  # R
    window: int  # W
    tau: float
    refresh: int  # T_r


@dataclasses.dataclass(frozen=True)
class Remembered:
    query: Array  # [D], of norm 1, or zero
    support: tuple[int, ...]  # ascending


@dataclasses.dataclass(frozen=True)
class Step:
    path: str
    support: tuple[int, ...]  # ascending
    candidates: int  # unique candidates; 0 when the path is exact
    output: Array  # [D]
    similarities: tuple[float, ...]  # with every remembered query, the oldest first


def normalise(query: Array) -> Array | None:
    """The query over its norm; None when the norm is zero or not finite."""
    with np.errstate(all="ignore"):
        norm = np.sqrt(np.sum(query * query))
    if norm == 0.0 or not np.isfinite(norm):
        return None
    return query / norm


def scores_of(query: Array, keys: Array, tokens: list[int]) -> Array:
    with np.errstate(all="ignore"):
        return np.sum(keys[tokens] * query, axis=1) / np.sqrt(query.size)


def top(query: Array, keys: Array, tokens: list[int], budget: int) -> tuple[int, ...]:
    """The tokens with the `budget` largest finite scores, ties to the lower token; ascending."""
    scores = dict(zip(tokens, scores_of(query, keys, tokens).tolist(), strict=True))
    finite = [token for token in tokens if math.isfinite(scores[token])]
    best = sorted(finite, key=lambda token: (-scores[token], token))[:budget]
    return tuple(sorted(best))


def attend_to(query: Array, keys: Array, values: Array, support: tuple[int, ...]) -> Array:
    """Softmax over the support's scores, and the values weighted by it."""
    if not support:
        return np.zeros(values.shape[1])
    scores = scores_of(query, keys, list(support))
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    return np.sum(weights[:, None] * values[list(support)], axis=0)


def exact_step(
    query: Array, keys: Array, values: Array, budget: int
) -> tuple[tuple[int, ...], Array]:
    """Exact Top-K over every key of `keys`, the current token's among them."""
    support = top(query, keys, list(range(len(keys))), budget)
    return support, attend_to(query, keys, values, support)


def full_step(query: Array, keys: Array, values: Array) -> Array:
    return exact_step(query, keys, values, len(keys))[1]


class Head:
    """The recall cache of one query head: a list, the oldest entry first."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.fifo: list[Remembered] = []

    def push(self, query: Array | None, dims: int, support: tuple[int, ...]) -> None:
        remembered = np.zeros(dims) if query is None else query
        self.fifo.append(Remembered(remembered, support))
        self.fifo = self.fifo[-self.method.capacity :]

    def prefill(self, queries: Array, keys: Array) -> None:
        """Remembers the last prompt tokens' queries [L, D], each with its causal exact support."""
        length, dims = queries.shape
        for position in range(max(0, length - self.method.capacity), length):
            support = top(queries[position], keys, list(range(position + 1)), self.method.budget)
            self.push(normalise(queries[position]), dims, support)

    def step(self, query: Array, keys: Array, values: Array, decode_step: int) -> Step:
        """`keys` and `values` [L, D] hold the current token as their last row."""
        method, length = self.method, len(keys)
        unit = normalise(query)

        similarities = []
        for entry in self.fifo:
            similarities.append(-np.inf if unit is None else float(np.sum(unit * entry.query)))

        if method.refresh > 0 and decode_step > 0 and decode_step % method.refresh == 0:
            path = REFRESH
        elif not similarities or max(similarities) < method.tau or unit is None:
            path = FALLBACK
        else:
            path = REUSE

        if path == REUSE:
            newest_first = range(len(self.fifo) - 1, -1, -1)
            recalled = sorted(newest_first, key=lambda index: -similarities[index])[: method.recall]
            candidates = set(range(max(0, length - method.window), length))
            for index in recalled:
                candidates |= set(self.fifo[index].support)
            support = top(query, keys, sorted(candidates), method.budget)
            count = len(candidates)
        else:
            support = top(query, keys, list(range(length)), method.budget)
            count = 0

        output = attend_to(query, keys, values, support)
        self.push(unit, query.size, support)
        return Step(path, support, count, output, tuple(similarities))
