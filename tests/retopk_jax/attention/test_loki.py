"""Loki against its oracle, and at full rank against Exact Top-K."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from retopk_jax.attention import ExactTopK, Loki
from retopk_jax.errors import ConfigError
from retopk_jax.language_model import Geometry
from tests.oracle import baselines as oracle
from tests.retopk_jax.attention.harness import (
    DIM,
    GROUPS,
    Problem,
    assert_same,
    grid_problem,
    normal_problem,
    ragged,
    walk,
)

BUDGET = 7


def exact_basis(rng: np.random.Generator, groups: int) -> np.ndarray:
    """Orthonormal ``[1, G, D, D]`` of entries ±1/4: projections of small integers are exact."""
    hadamard = np.ones((1, 1))
    while len(hadamard) < DIM:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    heads = [
        hadamard[rng.permutation(DIM)][:, rng.permutation(DIM)] * rng.choice([-1, 1], DIM)
        for _ in range(groups)
    ]
    return (np.stack(heads)[None] / np.sqrt(DIM)).astype(np.float32)


def random_basis(rng: np.random.Generator, groups: int) -> np.ndarray:
    heads = [np.linalg.qr(rng.normal(size=(DIM, DIM)))[0] for _ in range(groups)]
    return np.stack(heads)[None].astype(np.float32)


@pytest.mark.parametrize(("group", "rank"), [("g1", 8), ("g3", 8), ("g7", 8), ("g3", 1)])
def test_steps_equal_the_oracle(group: str, rank: int) -> None:
    basis = exact_basis(np.random.default_rng(3), GROUPS[group][1])
    method = Loki(BUDGET, rank, jnp.asarray(basis))
    differs = 0
    for seed, lengths in enumerate(ragged()[::2]):
        for row in walk(method, grid_problem(seed, GROUPS[group], lengths)):
            want = oracle.loki(
                row.q, row.keys, row.values, budget=BUDGET, rank=rank, basis=basis[0]
            )
            assert_same(row, want.supports, want.output)
            exact = oracle.exact_top_k(row.q, row.keys, row.values, BUDGET)
            differs += want.supports != exact.supports
            if row.length <= BUDGET:
                full = oracle.full(row.q, row.keys, row.values)
                assert_same(row, [tuple(range(row.length))] * len(row.q), full)
    assert differs > 30, "the rank makes no difference to this test"


@pytest.mark.parametrize("group", GROUPS)
def test_full_rank_equals_exact_top_k(group: str) -> None:
    """Any orthonormal basis keeps scores: the float64 margin says where rounding could not."""
    basis = random_basis(np.random.default_rng(4), GROUPS[group][1])
    problem = normal_problem(11, GROUPS[group], [1, 6, 21, 40])
    ours = walk(Loki(BUDGET, DIM, jnp.asarray(basis)), problem)
    theirs = walk(ExactTopK(BUDGET), problem)
    for row, exact in zip(ours, theirs, strict=True):
        want = oracle.exact_top_k(row.q, row.keys, row.values, BUDGET)
        assert want.margin > 1e-5, "bad test data"
        assert_same(row, want.supports, want.output)
        assert_same(exact, want.supports, want.output)


def test_ties_go_to_the_lower_token() -> None:
    """Keys that differ in the components left out only."""
    basis = exact_basis(np.random.default_rng(5), 2)
    problem = grid_problem(0, (6, 2), [12, 20, 30, 40])
    left_out = np.swapaxes(basis[0, :, :, 2:], 1, 2)  # [G, D - 2, D]
    rng = np.random.default_rng(6)
    weights = 4 * rng.integers(-2, 3, (4, 2, problem.keys.shape[2], DIM - 2))
    keys = np.einsum("bgsr,grd->bgsd", weights, left_out).astype(np.float32)
    tied: Problem = dataclasses.replace(problem, keys=keys)
    for row in walk(Loki(BUDGET, 2, jnp.asarray(basis)), tied):
        assert row.supports == [tuple(range(min(BUDGET, row.length)))] * 6


# ---- settings ---------------------------------------------------------------------------------

GEOMETRY = Geometry(1, 4, 2, DIM)


def test_without_a_basis_the_error_says_how_to_get_one() -> None:
    with pytest.raises(ConfigError, match="retopk calibrate --method loki --model MODEL --text"):
        Loki().check(GEOMETRY)


@pytest.mark.parametrize(
    ("shape", "dtype", "rank", "words"),
    [
        ((2, 2, DIM, DIM), jnp.float32, 8, r"basis of shape \(2, 2, 16, 16\).*\(1, 2, 16, 16\)"),
        ((1, 1, DIM, DIM), jnp.float32, 8, r"needs \(1, 2, 16, 16\)"),
        ((1, 2, DIM, DIM), jnp.bfloat16, 8, "basis of dtype bfloat16.*float32"),
        ((1, 2, DIM, DIM), jnp.float32, 17, "rank=17.*head dimension 16"),
    ],
)
def test_refuses(shape: tuple[int, ...], dtype, rank: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Loki(BUDGET, rank, jnp.zeros(shape, dtype)).check(GEOMETRY)


def test_rank_of_zero() -> None:
    with pytest.raises(ConfigError, match="rank=0"):
        Loki(rank=0)


def test_defaults_are_the_matched_setting() -> None:
    assert Loki().budget == 512
    assert Loki()._rank(128) == 64
