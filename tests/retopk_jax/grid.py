"""Attention problems on a grid of small integers: float32 holds every product and sum exactly.

D is a power of four, so the scores' scaling by D^-1/2 is exact as well: scores tie often, and two
implementations that differ in one support differ in the method, not in a rounding.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

DIM = 16
APART = 1e-4
"""Least distance between similarities that are not the same; a float32 one errs by D * 2^-24."""

Array = NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Run:
    """A prompt and the decode steps after it, for B rows."""

    lengths: NDArray[np.int32]  # [B] prompt tokens, 0 allowed
    tail: Array  # [B, C, H, D]
    keys: Array  # [B, G, S, D], the tokens of the prompts and of all steps
    values: Array  # [B, G, S, D]
    queries: Array  # [T, B, H, D]
    active: NDArray[np.bool_]  # [T, B]
    pool: Array  # [P, D], the queries that were drawn from


def query_pool(rng: np.random.Generator, size: int) -> Array:
    """Integer directions; from each of them, no two others are equally similar, nor at 0."""
    while True:
        pool = rng.integers(-3, 4, (size, DIM))
        # A close relative of the first, so that high thresholds have something to pass.
        pool[1] = pool[0]
        pool[1, rng.integers(DIM)] += 1
        norms = np.linalg.norm(pool, axis=1)
        if np.any(norms == 0):
            continue
        cosine = pool @ pool.T / np.outer(norms, norms)
        rows = np.sort(np.concatenate([cosine, np.zeros((size, 1))], axis=1), axis=1)
        if np.min(np.diff(rows, axis=1)) > APART:
            return pool.astype(np.float32)


def thresholds(pool: Array) -> list[float]:
    """Values of tau between the similarities that occur, none nearer to one than APART / 2."""
    unit = pool.astype(np.float64) / np.linalg.norm(pool, axis=1, keepdims=True)
    attained = np.unique(np.concatenate([(unit @ unit.T).ravel(), [0.0]]))
    middles = (attained[1:] + attained[:-1]) / 2
    return [float(m) for m in middles[np.diff(attained) > APART]]


def draw_run(
    rng: np.random.Generator,
    lengths: list[int],
    *,
    heads: int,
    groups: int,
    slots: int,
    capacity: int,
    steps: int,
    broken: bool,
) -> Run:
    """Random content; `broken` adds zero queries, and NaN and infinities in queries and keys."""
    batch = len(lengths)
    pool = query_pool(rng, 5)

    def queries(*shape: int) -> Array:
        drawn = pool[rng.integers(len(pool), size=shape)]
        # Powers of two leave the normalised query the same to the last bit.
        drawn = drawn * rng.choice(np.array([0.5, 1, 2], np.float32), (*shape, 1))
        if broken:
            drawn[rng.random(shape) < 0.1] = 0.0
            for bad in (np.nan, np.inf, -np.inf):
                drawn[rng.random(shape) < 0.03, rng.integers(DIM)] = bad
        return drawn

    keys = rng.integers(-1, 2, (batch, groups, slots, DIM)).astype(np.float32)
    if broken:
        for bad in (np.nan, np.inf, -np.inf):
            keys[rng.random(keys.shape[:3]) < 0.05, rng.integers(DIM)] = bad
    active = np.ones((steps, batch), np.bool_)
    if broken:
        active[1:] = rng.random((steps - 1, batch)) < 0.8
    return Run(
        np.array(lengths, np.int32),
        queries(batch, capacity, heads),
        keys,
        rng.integers(-4, 5, (batch, groups, slots, DIM)).astype(np.float32),
        queries(steps, batch, heads),
        active,
        pool,
    )
