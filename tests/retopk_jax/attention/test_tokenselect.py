"""TokenSelect against its oracle: the vote, and what the selection cache keeps."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from retopk_jax.attention import Step, TokenSelect
from retopk_jax.attention.tokenselect import HIT, MISS, WHOLE
from retopk_jax.errors import ConfigError
from tests.oracle import baselines as oracle
from tests.retopk_jax.attention.harness import (
    DIM,
    GROUPS,
    SLOTS,
    STEPS,
    Problem,
    Row,
    assert_same,
    compiled,
    normal_problem,
    ragged,
    walk,
)

SIZES = {"initial": 2, "selected": 5, "local": 3}
PATHS = {"hit": HIT, "selected": MISS, "all": WHOLE}


def path_of(row: Row) -> int:
    assert row.path is not None
    assert len(set(row.path.tolist())) == 1
    return int(row.path[0])


def similar_queries(problem: Problem) -> Problem:
    """Queries that drift from step to step, so that some are like the last and some are not."""
    rng = np.random.default_rng(problem.lengths)
    drift = rng.choice(np.array([0.15, 0.5, 2.0]), (STEPS, len(problem.lengths), 1, 1))
    queries = problem.queries.copy()
    for step in range(1, STEPS):
        queries[step] = queries[step - 1] + (drift[step] * queries[step]).astype(np.float32)
    return dataclasses.replace(problem, queries=queries / 2)


def check(method: TokenSelect, problem: Problem) -> dict[str, int]:
    """Compares every step with the oracle; returns steps by how their tokens were found."""
    theta = float(method.theta)
    heads = {
        row: oracle.TokenSelect(
            initial=method.initial, selected=method.selected, local=method.local, theta=theta
        )
        for row in range(len(problem.lengths))
    }
    counts = dict.fromkeys(PATHS, 0)
    for row in walk(method, problem):
        want, how, cosine = heads[row.row].step(row.q, row.keys, row.values)
        assert want.margin > 2e-5, "bad test data"
        assert np.isnan(cosine) or abs(cosine - theta) > 1e-5, "bad test data"
        assert path_of(row) == PATHS[how]
        assert_same(row, want.supports, want.output)
        counts[how] += 1
    return counts


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("theta", [0.9, 0.6])
def test_steps_equal_the_oracle(group: str, theta: float) -> None:
    """Lengths from 1 over K = 10 and on: whole, then selections, hits and misses."""
    method = TokenSelect(**SIZES, theta=theta)
    total = dict.fromkeys(PATHS, 0)
    for seed, lengths in enumerate(ragged()[::2]):
        problem = similar_queries(normal_problem(seed, GROUPS[group], lengths))
        for how, count in check(method, problem).items():
            total[how] += count
    assert min(total.values()) > 8, total


@pytest.mark.parametrize(
    "sizes",
    [
        {"initial": 0, "selected": 1, "local": 1},
        {"initial": 0, "selected": 6, "local": 2},
        {"initial": 5, "selected": 1, "local": 6},
    ],
)
def test_corners_of_the_sizes(sizes: dict[str, int]) -> None:
    method = TokenSelect(**sizes, theta=0.8)
    for seed, lengths in enumerate(ragged()[::4]):
        check(method, similar_queries(normal_problem(seed + 20, (6, 2), lengths)))


def test_k_of_the_length_is_full_and_one_token_more_is_not() -> None:
    method = TokenSelect(**SIZES)
    problem = normal_problem(2, (6, 2), [5, 6, 7, 8])
    lengths = set()
    for row in walk(method, problem):
        lengths.add(row.length)
        full = oracle.full(row.q, row.keys, row.values)
        if row.length <= 10:
            assert_same(row, [tuple(range(row.length))] * 6, full)
        else:
            assert {len(support) for support in row.supports} == {10}
    assert {9, 10, 11} <= lengths


def test_theta_above_one_never_keeps_a_selection() -> None:
    problem = normal_problem(3, (6, 2), [12, 20, 30, 40])
    same = np.broadcast_to(problem.queries[:1], problem.queries.shape)
    counts = check(TokenSelect(**SIZES, theta=1.0001), dataclasses.replace(problem, queries=same))
    assert counts["hit"] == 0 < counts["selected"]


def test_theta_of_minus_one_selects_once() -> None:
    """Also when a query is the opposite of the selecting one, whose float32 cosine may be < -1."""
    problem = normal_problem(4, (6, 2), [12, 20, 30, 40])
    queries = problem.queries.copy()
    queries[1:] = -queries[:1] * np.linspace(0.3, 3, STEPS - 1)[:, None, None, None]
    method = TokenSelect(**SIZES, theta=-1.0)
    selections = np.zeros(4, int)
    for row in walk(method, dataclasses.replace(problem, queries=queries.astype(np.float32))):
        selections[row.row] += path_of(row) == MISS
        assert path_of(row) == (MISS if row.index == 0 else HIT)
    assert selections.tolist() == [1, 1, 1, 1]


def test_compares_with_the_query_that_selected_last() -> None:
    """Each query is like the one before, but the third is no longer like the first."""
    problem = normal_problem(5, (2, 2), [20, 20, 20, 20])
    queries = np.zeros_like(problem.queries)
    for step in range(STEPS):  # cos 30 degrees = 0.87 from step to step, 0.5 over two
        queries[step, ..., 0] = np.cos(np.pi / 6 * step)
        queries[step, ..., 1] = np.sin(np.pi / 6 * step)
    problem = dataclasses.replace(problem, queries=queries, active=np.ones_like(problem.active))
    rows = walk(TokenSelect(**SIZES, theta=0.8), problem)
    paths = [path_of(row) for row in rows if row.row == 0]
    assert paths == [MISS, HIT, MISS, HIT, MISS, HIT, MISS]


def test_a_token_that_left_the_window_is_not_seen_until_the_next_selection() -> None:
    problem = normal_problem(6, (2, 2), [20, 20, 20, 20])
    queries = np.broadcast_to(problem.queries[:1], problem.queries.shape).copy()
    queries[5:] *= -1
    problem = dataclasses.replace(problem, queries=queries, active=np.ones_like(problem.active))
    rows = [row for row in walk(TokenSelect(**SIZES), problem) if row.row == 0]
    middle = [set(row.supports[0]) - set(range(row.length - 3, row.length)) for row in rows]
    assert all(tokens == middle[0] for tokens in middle[:5])
    assert all(18 not in row.supports[0] for row in rows[1:5])  # local at the first step
    assert [path_of(row) for row in rows] == [MISS, HIT, HIT, HIT, HIT, MISS, HIT]


def test_votes_tie_to_the_lower_token() -> None:
    problem = normal_problem(7, (6, 2), [12, 20, 30, 40])
    keys = np.broadcast_to(problem.keys[:, :, :1], problem.keys.shape).copy()
    for row in walk(TokenSelect(**SIZES), dataclasses.replace(problem, keys=keys)):
        if path_of(row) == MISS:
            local = range(row.length - 3, row.length)
            assert row.supports == [(0, 1, 2, 3, 4, 5, 6, *local)] * 6


def test_rows_vote_for_themselves() -> None:
    """A row's steps are the same whether another row of the batch selects anew or not."""
    problem = similar_queries(normal_problem(8, (6, 2), [15, 15, 30, 40]))
    alone = dataclasses.replace(
        problem,
        queries=np.broadcast_to(problem.queries[:, 1:2], problem.queries.shape),
        keys=np.broadcast_to(problem.keys[1:2], problem.keys.shape),
        values=np.broadcast_to(problem.values[1:2], problem.values.shape),
        active=np.broadcast_to(problem.active[:, 1:2], problem.active.shape),
        lengths=[15] * 4,
    )
    method = TokenSelect(**SIZES, theta=0.8)
    ours = [row for row in walk(method, problem) if row.row == 1]
    theirs = [row for row in walk(method, alone) if row.row == 1]
    for a, b in zip(ours, theirs, strict=True):
        assert a.supports == b.supports
        np.testing.assert_array_equal(a.out, b.out)


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_a_query_without_direction_is_like_none(bad: float) -> None:
    """It selects for itself, and what comes after it selects again."""
    rng = np.random.default_rng(0)
    cache = jnp.asarray(rng.normal(size=(1, 1, SLOTS, DIM)), jnp.float32)
    good = jnp.asarray(rng.normal(size=(1, 2, DIM)), jnp.float32)
    method = TokenSelect(**SIZES, theta=0.5)
    prime, attend = compiled()
    lengths = jnp.array([20], jnp.int32)
    state = prime(method, cache, cache, jnp.zeros((1, 0, 2, DIM)), lengths)
    paths = []
    for index, q in enumerate([good, jnp.full_like(good, bad), good, good]):
        lengths = lengths + 1
        step = Step(lengths, jnp.array([index], jnp.int32), jnp.array([True]))
        out, state, report = attend(method, state, q, cache, cache, step)
        assert np.isfinite(out).all()
        paths.append(int(report.path[0, 0]))
    assert paths == [MISS, MISS, MISS, HIT]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"initial": -1}, "initial=-1"),
        ({"selected": 0}, "selected=0"),
        ({"local": 0}, "local=0"),
        ({"theta": -1.5}, "theta=-1.5"),
        ({"theta": float("nan")}, "theta=nan"),
    ],
)
def test_refuses(settings: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TokenSelect(**settings)


def test_defaults_are_the_matched_setting() -> None:
    method = TokenSelect()
    assert (method.initial, method.selected, method.local) == (64, 416, 32)
    assert (method.budget, method.theta) == (512, 0.9)
