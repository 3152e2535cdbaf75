"""Quest against its oracle, and its bound against the scores it bounds."""

import jax.numpy as jnp
import numpy as np
import pytest

from retopk_jax.attention import Quest, Step
from retopk_jax.attention.quest import PageBounds
from retopk_jax.errors import ConfigError
from retopk_jax.language_model import Geometry
from tests.oracle import baselines as oracle
from tests.retopk_jax.attention.harness import (
    DIM,
    GROUPS,
    SLOTS,
    assert_same,
    compiled,
    grid_problem,
    normal_problem,
    ragged,
    walk,
)

PAGE, BUDGET = 4, 14  # three pages, and two tokens that make no fourth


@pytest.mark.parametrize(
    ("group", "last_page", "select_per"),
    [
        ("g1", "always", "query_head"),
        ("g3", "always", "query_head"),
        ("g7", "always", "query_head"),
        ("g3", "competes", "query_head"),
        ("g3", "always", "kv_group"),
        ("g7", "always", "kv_group"),
        ("g3", "competes", "layer"),
    ],
)
def test_steps_equal_the_oracle(group: str, last_page: str, select_per: str) -> None:
    method = Quest(BUDGET, PAGE, last_page, select_per)
    # The mean query of a group of 3 or 7 isn't exact in float32: normal content, without ties.
    draw = grid_problem if select_per == "query_head" else normal_problem
    partial = 0
    for seed, lengths in enumerate(ragged()[::2]):
        for row in walk(method, draw(seed, GROUPS[group], lengths)):
            want = oracle.quest(
                row.q,
                row.keys,
                row.values,
                budget=BUDGET,
                page=PAGE,
                last_page=last_page,
                select_per=select_per,
            )
            if select_per != "query_head":
                assert want.margin > 1e-5, "bad test data"
            assert_same(row, want.supports, want.output)
            assert all(len(support) <= BUDGET for support in row.supports)
            if row.length <= BUDGET - BUDGET % PAGE:
                full = oracle.full(row.q, row.keys, row.values)
                assert_same(row, [tuple(range(row.length))] * len(row.q), full)
            partial += row.length > BUDGET
    assert partial > 30


@pytest.mark.parametrize(("page", "pages"), [(1, 4), (5, 1), (16, 3)])
def test_any_page_size(page: int, pages: int) -> None:
    """Pages of a token, pages that do not divide the capacity, as many as there are."""
    method = Quest(pages * page + page // 2, page)
    for seed, lengths in enumerate(ragged()[::3]):
        for row in walk(method, grid_problem(seed, (4, 2), lengths)):
            want = oracle.quest(row.q, row.keys, row.values, budget=method.budget, page=page)
            assert_same(row, want.supports, want.output)


def test_dense_layers_attend_to_everything() -> None:
    method = Quest(BUDGET, PAGE, dense_layers=1)
    problem = grid_problem(0, (4, 2), [30, 1, 17, 8])
    _, attend = compiled()
    state = method.prime(
        0,
        jnp.asarray(problem.keys),
        jnp.asarray(problem.values),
        jnp.zeros((4, 0, 4, DIM)),
        jnp.asarray(problem.lengths, jnp.int32),
    )
    assert state == ()
    lengths = jnp.asarray(problem.lengths, jnp.int32) + 1
    step = Step(lengths, jnp.zeros(4, jnp.int32), jnp.ones(4, jnp.bool_))
    keys, values = jnp.asarray(problem.keys), jnp.asarray(problem.values)
    out, _, report = attend(method, state, jnp.asarray(problem.queries[0]), keys, values, step)
    assert report.support is None
    for row, length in enumerate(np.asarray(lengths)):
        want = oracle.full(
            problem.queries[0, row].astype(np.float64),
            problem.keys[row, :, :length].astype(np.float64),
            problem.values[row, :, :length].astype(np.float64),
        )
        np.testing.assert_allclose(out[row], want, rtol=0, atol=4 * 120 * 2.0**-24)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bound_is_above_every_score_of_its_page(dtype) -> None:
    """After the prefill and after every update, for full, partly filled and empty pages."""
    rng = np.random.default_rng(0)
    method = Quest(12, 4)
    batch, groups, heads = 3, 2, 6
    keys = jnp.asarray(rng.normal(size=(batch, groups, SLOTS, DIM)), dtype)
    q = jnp.asarray(rng.normal(size=(batch, heads, DIM)), dtype)
    prime, attend = compiled()
    lengths = jnp.array([1, 20, 30], jnp.int32)
    state = prime(method, keys, keys, jnp.zeros((batch, 0, heads, DIM), dtype), lengths)

    def check(bounds: PageBounds) -> None:
        upper = np.asarray(method.page_scores(q, bounds))  # [B, H, P]
        queries = np.asarray(q, np.float64).reshape(batch, groups, heads // groups, DIM)
        scores = np.einsum("bgqd,bgsd->bgqs", queries, np.asarray(keys, np.float64))
        scores = scores.reshape(batch, heads, SLOTS)
        for row, length in enumerate(np.asarray(lengths)):
            for token in range(length):
                slack = upper[row, :, token // 4] - scores[row, :, token]
                assert slack.min() > -1e-5
                # A page of one token has its score as its bound.
                if token == length - 1 and token % 4 == 0:
                    np.testing.assert_allclose(slack, 0, atol=1e-5)

    check(state)
    for index in range(10):
        lengths = lengths + 1
        step = Step(lengths, jnp.full(batch, index, jnp.int32), jnp.ones(batch, jnp.bool_))
        _, state, _ = attend(method, state, q, keys, keys, step)
        check(state)


def test_bounds_after_updates_are_those_of_a_prefill() -> None:
    rng = np.random.default_rng(1)
    method = Quest(12, 4)
    keys = jnp.asarray(rng.normal(size=(2, 2, SLOTS, DIM)), jnp.float32)
    q = jnp.asarray(rng.normal(size=(2, 4, DIM)), jnp.float32)
    prime, attend = compiled()
    tail = jnp.zeros((2, 0, 4, DIM))
    lengths = jnp.array([1, 7], jnp.int32)
    state = prime(method, keys, keys, tail, lengths)
    for index in range(11):
        lengths = lengths + 1
        step = Step(lengths, jnp.full(2, index, jnp.int32), jnp.ones(2, jnp.bool_))
        _, state, _ = attend(method, state, q, keys, keys, step)
    again = prime(method, keys, keys, tail, lengths)
    np.testing.assert_array_equal(state.low, again.low)
    np.testing.assert_array_equal(state.high, again.high)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"budget": 15}, "budget=15.*a page of page_size=16"),
        ({"page_size": 0}, "page_size=0"),
        ({"last_page": "never"}, "last_page='never'.*always, competes"),
        ({"select_per": "head"}, "select_per='head'.*query_head, kv_group, layer"),
        ({"dense_layers": -1}, "dense_layers=-1"),
    ],
)
def test_refuses(settings: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Quest(**settings)


def test_defaults_are_the_matched_setting() -> None:
    method = Quest()
    assert (method.pages, method.page_size, method.dense_layers) == (32, 16, 0)
    assert (method.last_page, method.select_per) == ("always", "query_head")
    method.check(Geometry(2, 4, 2, 64))
