"""SparQ against its oracle, and against selection by exact scores."""

import jax.numpy as jnp
import numpy as np
import pytest

from retopk_jax.attention import SparQ, Step
from retopk_jax.errors import ConfigError
from retopk_jax.language_model import Geometry
from tests.oracle import baselines as oracle
from tests.retopk_jax.attention.harness import (
    DIM,
    GROUPS,
    Row,
    assert_same,
    compiled,
    normal_problem,
    ragged,
    walk,
)

SEPARATE = 2e-5
"""Least relative distance of masses that float32 tells apart: their logits are below 16."""

CASES = {
    "defaults-scaled": {"budget": 12, "components": 4, "local": 3},
    "no-reallocation": {"budget": 12, "components": 4, "local": 3, "reallocate": False},
    "one-component": {"budget": 9, "components": 1, "local": 1},
    "all-local": {"budget": 7, "components": 5, "local": 7},
}


def check(method: SparQ, row: Row, **settings) -> None:
    want = oracle.sparq(row.q, row.keys, row.values, **settings)
    assert want.margin > SEPARATE, "bad test data"
    # The output mixes in the mean value by a mass that is off by `SEPARATE` at most.
    assert_same(row, want.supports, want.output, extra=SEPARATE if method.reallocate else 0.0)


@pytest.mark.parametrize(
    ("case", "group"),
    [
        *(("defaults-scaled", group) for group in GROUPS),
        *((case, "g3") for case in CASES if case != "defaults-scaled"),
    ],
)
def test_steps_equal_the_oracle(group: str, case: str) -> None:
    settings = CASES[case]
    method = SparQ(**settings)
    for seed, lengths in enumerate(ragged()[:: 2 if case == "defaults-scaled" else 4]):
        for row in walk(method, normal_problem(seed, GROUPS[group], lengths)):
            check(method, row, **settings)
            if row.length <= method.budget:
                full = oracle.full(row.q, row.keys, row.values)
                assert_same(row, [tuple(range(row.length))] * len(row.q), full)


@pytest.mark.parametrize("group", GROUPS)
def test_all_components_select_by_exact_scores(group: str) -> None:
    """r = D: the group's summed exact softmax ranks, the current token is in, and y is exact."""
    method = SparQ(budget=8, components=DIM, local=1, reallocate=False)
    heads, groups = GROUPS[group]
    for row in walk(method, normal_problem(5, GROUPS[group], [1, 8, 20, 40])):
        supports = []
        for c in range(groups):
            members = row.q[c * heads // groups : (c + 1) * heads // groups]
            scores = members @ row.keys[c].T / np.sqrt(DIM)
            total = np.sum([oracle.softmax(score) for score in scores], axis=0)
            total[-1] = np.inf
            supports += [oracle.largest(total, 8)] * len(members)
        want = oracle.attend_all(row.q, row.keys, row.values, supports)
        assert_same(row, supports, want)


def test_ties_go_to_the_lower_component_and_token() -> None:
    """Components 2 and 5 are as large, and tokens of two kinds alternate."""
    q = np.zeros((1, 1, DIM), np.float32)
    q[..., 2] = q[..., 5] = 1.0
    keys = np.zeros((1, 1, 24, DIM), np.float32)
    keys[0, 0, 1::2, 2] = 1.0  # odd tokens score by component 2
    keys[0, 0, ::2, 5] = 9.0  # even ones would by component 5, which is not looked at
    method = SparQ(budget=6, components=1, local=1)
    prime, attend = compiled()
    cache, lengths = jnp.asarray(keys), jnp.array([22], jnp.int32)
    state = prime(method, cache, cache, jnp.zeros((1, 0, 1, DIM)), lengths)
    step = Step(lengths + 1, jnp.array([0], jnp.int32), jnp.array([True]))
    _, _, report = attend(method, state, jnp.asarray(q), cache, cache, step)
    np.testing.assert_array_equal(report.support[0, 0], [1, 3, 5, 7, 9, 22])


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_unusable_queries_give_finite_outputs(bad: float) -> None:
    q = jnp.full((1, 2, DIM), bad, jnp.float32)
    rng = np.random.default_rng(0)
    cache = jnp.asarray(rng.normal(size=(1, 1, 24, DIM)), jnp.float32)
    method = SparQ(budget=6, components=4, local=2)
    prime, attend = compiled()
    lengths = jnp.array([20], jnp.int32)
    state = prime(method, cache, cache, jnp.zeros((1, 0, 2, DIM)), lengths)
    step = Step(lengths + 1, jnp.array([0], jnp.int32), jnp.array([True]))
    out, _, report = attend(method, state, q, cache, cache, step)
    assert np.isfinite(out).all()
    if bad == 0.0:  # every token alike: the local two and the first four
        np.testing.assert_array_equal(report.support[0, 0], [0, 1, 2, 3, 19, 20])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"local": 513}, "local=513.*at most budget=512"),
        ({"local": 0}, "local=0.*>= 1"),
        ({"components": 0}, "components=0"),
        ({"components": 65}, "components=65.*head dimension 64"),
    ],
)
def test_refuses(settings: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SparQ(**settings).check(Geometry(2, 4, 2, 64))


def test_defaults_are_the_matched_setting() -> None:
    method = SparQ()
    assert (method.budget, method._local, method.reallocate) == (512, 128, True)
    assert method._components(128) == 32
