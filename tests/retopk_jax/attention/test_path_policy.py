"""Policies by which KV groups scan whole: the rule, its limits, and the decode step under it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pallas_kernels.retopk_step import Remembered
from pallas_kernels.retopk_step import retopk_step as fused_step
from retopk_jax.attention import ExactTopK, ReTopK, Risk, Step
from retopk_jax.attention.path_policy import scanning
from retopk_jax.attention.retopk import FALLBACK, REFRESH, REUSE, ReTopKState
from retopk_jax.calibration.shadow import Shadow
from retopk_jax.errors import ConfigError
from retopk_jax.language_model import Geometry

BATCH, HEADS, GROUPS, SLOTS, DIM, STEPS, KNOTS = 3, 6, 2, 40, 8, 6, 4
GEOMETRY = Geometry(1, HEADS, GROUPS, DIM)
PLAIN = ReTopK(budget=6, capacity=5, recall=2, window=3, tau=0.6, refresh=4)


def draw_risk(rng: np.random.Generator, theta: float = 0.0, layers: int = 1) -> Risk:
    shape = (layers, HEADS, KNOTS)
    x = np.sort(rng.uniform(-0.2, 1.0, shape), axis=2).astype(np.float32)
    y = -np.sort(-rng.uniform(0, 1, shape), axis=2).astype(np.float32)
    return Risk(jnp.asarray(x), jnp.asarray(y), theta)


# ---- the rule ------------------------------------------------------------------------------


def expected_by_numpy(x: np.ndarray, y: np.ndarray, rho: np.ndarray) -> np.ndarray:
    """float64 ``[B, H]`` of knots ``[H, N]``."""
    return np.array([[np.interp(r, x[h], y[h]) for h, r in enumerate(row)] for row in rho])


@functools.cache
def jitted():
    def decide(risk, rho, tau):
        expected = risk.expected(0, rho)
        return (
            expected,
            scanning(rho, GROUPS, tau, expected, risk.theta),
            scanning(rho, GROUPS, tau),
        )

    return jax.jit(decide)


@given(seed=st.integers(0, 2**32 - 1), theta=st.floats(0, 3), tau=st.floats(-1, 1.5))
@settings(max_examples=60, deadline=None)
def test_jitted_policies_equal_numpy(seed: int, theta: float, tau: float) -> None:
    rng = np.random.default_rng(seed)
    rho = rng.uniform(-1, 1, (BATCH, HEADS)).astype(np.float32)
    rho[rng.uniform(size=rho.shape) < 0.05] = -np.inf
    risk = draw_risk(rng, theta)
    x, y = np.asarray(risk.similarity[0], np.float64), np.asarray(risk.error[0], np.float64)
    want = expected_by_numpy(x, y, rho.astype(np.float64))
    sums = want.reshape(BATCH, GROUPS, -1).sum(axis=2)
    assume((np.abs(sums - theta) > 1e-4).all())
    assume((np.abs(rho - tau) > 1e-6).all())
    expected, by_risk, by_tau = jitted()(risk, jnp.asarray(rho), tau)
    # A narrow segment loses 2^-24 of the similarity over its width, in each of a few steps.
    width = np.diff(x, axis=1)
    steep = (-np.diff(y, axis=1) / np.maximum(width, 1e-12)).max()
    np.testing.assert_allclose(expected, want, rtol=0, atol=min(2.0**-22 * (steep + 4), 1))
    assume(2.0**-22 * (steep + 4) * 3 < 1e-4)
    lost = np.isneginf(rho).reshape(BATCH, GROUPS, -1).any(axis=2)
    low = (rho < tau).reshape(BATCH, GROUPS, -1).any(axis=2)
    each = HEADS // GROUPS
    np.testing.assert_array_equal(by_risk, np.repeat((sums > theta) | lost, each, axis=1))
    np.testing.assert_array_equal(by_tau, np.repeat(low | lost, each, axis=1))


@given(seed=st.integers(0, 2**32 - 1), repeated=st.booleans())
@settings(max_examples=30, deadline=None)
def test_maps_are_monotone_and_finite(seed: int, repeated: bool) -> None:
    risk = draw_risk(np.random.default_rng(seed))
    if repeated:  # a step, and knots that pad
        x = risk.similarity.at[..., 1].set(risk.similarity[..., 2])
        risk = Risk(x.at[..., -1].set(x[..., -2]), risk.error.at[..., -1].set(risk.error[..., -2]))
    risk.check(GEOMETRY)
    rho = np.concatenate([[-np.inf, -1.0], np.linspace(-0.3, 1.0, 400)]).astype(np.float32)
    found = np.asarray(risk.expected(0, jnp.broadcast_to(jnp.asarray(rho)[:, None], (402, HEADS))))
    assert np.isfinite(found).all()
    assert (np.diff(found, axis=0) <= 0).all()
    np.testing.assert_array_equal(found[0], risk.error[0, :, 0])
    np.testing.assert_allclose(found[-1], risk.error[0, :, -1], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"similarity": jnp.zeros((2, HEADS, KNOTS))}, "risk.similarity of shape"),
        ({"error": jnp.zeros((1, HEADS, 3))}, "expected that of similarity"),
        ({"error": jnp.zeros((1, HEADS, KNOTS), jnp.bfloat16)}, "risk.error of dtype bfloat16"),
        ({"error": jnp.full((1, HEADS, KNOTS), jnp.nan)}, "risk.error: expected finite"),
        ({"error": jnp.broadcast_to(jnp.arange(4.0), (1, HEADS, KNOTS))}, "errors that descend"),
    ],
)
def test_bad_maps_are_refused(changes, words) -> None:
    risk = dataclasses.replace(draw_risk(np.random.default_rng(0)), **changes)
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(PLAIN, risk=risk).check(GEOMETRY)


def test_bad_settings_are_refused() -> None:
    risk = draw_risk(np.random.default_rng(0))
    for theta in (float("nan"), "high", True):
        with pytest.raises(ConfigError, match="theta="):
            dataclasses.replace(risk, theta=theta)
    with pytest.raises(ConfigError, match="share_scan=1"):
        ReTopK(share_scan=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="groups scan whole under risk"):
        ReTopK(share_scan=True, risk=risk)
    assert ReTopK().shards == {"tensor", "sequence"}
    assert ReTopK(share_scan=True).shards == ReTopK(risk=risk).shards == {"sequence"}


# ---- the step ------------------------------------------------------------------------------


@dataclasses.dataclass
class Walk:
    """What every step of a decode gave; the first row ends before its fourth step."""

    outs: list[np.ndarray]
    reports: list
    before: list[ReTopKState]
    state: ReTopKState
    active: np.ndarray


@functools.cache
def compiled():
    return jax.jit(lambda method, state, *args: method.attend(0, state, *args))


@functools.cache
def data():
    rng = np.random.default_rng(3)
    keys, values = (
        jnp.asarray(rng.normal(size=(BATCH, GROUPS, SLOTS, DIM)), jnp.float32) for _ in range(2)
    )
    tail = rng.normal(size=(BATCH, PLAIN.capacity, HEADS, DIM))
    # Half of the queries resemble one of the prompt's.
    near = tail[:, rng.integers(PLAIN.capacity, size=STEPS)] + 0.3 * rng.normal(
        size=(BATCH, STEPS, HEADS, DIM)
    )
    far = rng.normal(size=near.shape)
    queries = np.where(rng.uniform(size=(BATCH, STEPS, HEADS, 1)) < 0.7, near, far)
    queries[1, 2, 0] = 0.0  # resembles nothing
    lengths = np.array([0, 9, 30], np.int32)  # the first remembers nothing
    return keys, values, jnp.asarray(tail, jnp.float32), jnp.asarray(queries, jnp.float32), lengths


def step_of(lengths: np.ndarray, index: np.ndarray, active: np.ndarray) -> Step:
    return Step(
        jnp.asarray(lengths + index + active, jnp.int32),
        jnp.asarray(index, jnp.int32),
        jnp.asarray(active),
    )


def walk(method: ReTopK | ExactTopK) -> Walk:
    keys, values, tail, queries, lengths = data()
    state = method.prime(0, keys, values, tail, jnp.asarray(lengths))
    active = np.ones((STEPS, BATCH), bool)
    active[3:, 0] = False
    index = np.zeros(BATCH, np.int32)
    outs, reports, before = [], [], []
    for t in range(STEPS):
        step = step_of(lengths, index, active[t])
        before.append(state)
        out, state, report = compiled()(method, state, queries[:, t], keys, values, step)
        outs.append(np.asarray(out))
        reports.append(report)
        index = index + active[t].astype(np.int32)
    return Walk(outs, reports, before, state, active)


def risk_of(theta: float) -> ReTopK:
    return dataclasses.replace(PLAIN, risk=draw_risk(np.random.default_rng(5), theta))


POLICIES = {
    "threshold": PLAIN,
    "share": dataclasses.replace(PLAIN, share_scan=True),
    "risk": risk_of(0.9),
}


def test_the_threshold_is_the_fused_step_bit_for_bit() -> None:
    keys, values, _, queries, lengths = data()
    found = walk(PLAIN)
    fused = jax.jit(functools.partial(fused_step, entries=PLAIN.recall, window=PLAIN.window))
    index = np.zeros(BATCH, np.int32)
    for t, state in enumerate(found.before):
        step = step_of(lengths, index, found.active[t])
        done = fused(
            queries[:, t],
            keys,
            values,
            Remembered(
                state.cache.queries,
                state.cache.supports,
                state.cache.pushed,
                state.paths,
                state.candidates,
                state.signals,
            ),
            step.lengths,
            jnp.asarray((index > 0) & (index % 4 == 0)),
            step.active,
            jnp.float32(PLAIN.tau),
        )
        np.testing.assert_array_equal(done.out, found.outs[t])
        after = found.before[t + 1] if t + 1 < STEPS else found.state
        assert after.predicted is None
        cache = (after.cache.queries, after.cache.supports, after.cache.pushed)
        for want, got in zip(
            done.remembered, (*cache, after.paths, after.candidates, after.signals), strict=True
        ):
            np.testing.assert_array_equal(want, got)
        index = index + found.active[t].astype(np.int32)


@pytest.mark.parametrize("name", POLICIES)
def test_paths_follow_the_policy_and_scanned_heads_are_exact(name: str) -> None:
    method = POLICIES[name]
    keys, values, _, queries, lengths = data()
    found, each = walk(method), HEADS // GROUPS
    index, scanned, predicted = np.zeros(BATCH, np.int64), 0, np.zeros(BATCH)
    seen = set()
    for t, report in enumerate(found.reports):
        rho, path, active = np.asarray(report.rho_max), np.asarray(report.path), found.active[t]
        due = (index > 0) & (index % 4 == 0)
        lost = np.isneginf(rho)
        assert lost[0].all() == (t == 0)
        expected = np.zeros_like(rho)
        if name == "risk":
            assert method.risk is not None
            x, y = np.asarray(method.risk.similarity[0]), np.asarray(method.risk.error[0])
            expected = expected_by_numpy(x, y, rho)
            risky = expected.reshape(BATCH, GROUPS, each).sum(axis=2) > 0.9
            wanted = np.repeat(risky, each, axis=1)
        else:
            wanted = rho < method.tau
        wanted = wanted | lost
        if name != "threshold":
            wanted = np.repeat(wanted.reshape(BATCH, GROUPS, each).any(axis=2), each, axis=1)
        want = np.where(due[:, None], REFRESH, np.where(wanted, FALLBACK, REUSE))
        np.testing.assert_array_equal(path[active], want[active])
        step = step_of(lengths, index, active)
        exact, _, best = compiled()(ExactTopK(6), (), queries[:, t], keys, values, step)
        scans = (path != REUSE) & active[:, None]
        np.testing.assert_array_equal(
            np.asarray(report.support)[scans], np.asarray(best.support)[scans]
        )
        np.testing.assert_array_equal(found.outs[t][scans], np.asarray(exact)[scans])
        scanned += scans.reshape(BATCH, GROUPS, each).any(axis=2).sum(axis=1)
        predicted += np.where((path == REUSE) & active[:, None], expected, 0).sum(axis=1)
        index = index + active
        seen |= set(path[active].ravel().tolist())
    assert seen == {REUSE, FALLBACK, REFRESH}
    rows = method.path_statistics((found.state,))
    np.testing.assert_array_equal([row.groups_scanned for row in rows], scanned)
    assert [row.group_steps for row in rows] == [3 * GROUPS, STEPS * GROUPS, STEPS * GROUPS]
    assert sum(rows[0].by_head[0][h][p] for h in range(HEADS) for p in range(3)) == 3 * HEADS
    if name == "risk":
        counted = np.array([row.predicted_error for row in rows], np.float64)
        np.testing.assert_allclose(counted, predicted, rtol=1e-5)
        assert predicted[1:].min() > 0
    else:
        assert rows[0].predicted_error is None


def test_a_shadow_keeps_the_error_of_a_reuse_taken_or_not() -> None:
    keys, values, tail, queries, lengths = data()
    shadow = Shadow(POLICIES["risk"], STEPS)
    anyway = dataclasses.replace(PLAIN, tau=-1.0, refresh=0)
    state = shadow.prime(0, keys, values, tail, jnp.asarray(lengths))
    on, index = np.array([True, True, False]), np.array([2, 1, 2], np.int32)
    step = step_of(lengths, index, on)
    args = (queries[:, 0], keys, values, step)
    out, after, report = compiled()(shadow, state, *args)
    alone, _, _ = compiled()(shadow.inner, state.inner, *args)
    np.testing.assert_array_equal(out, alone)
    reused, _, _ = compiled()(anyway, state.inner, *args)
    exact, _, _ = compiled()(ExactTopK(6), (), *args)
    reused, exact = (np.asarray(x, np.float64) for x in (reused, exact))
    error = np.linalg.norm(reused - exact, axis=-1)[:2] / np.linalg.norm(exact, axis=-1)[:2]
    assert error[1].max() > 0.01
    for row in (0, 1):
        np.testing.assert_allclose(after.error[row, :, index[row]], error[row], atol=1e-5)
        np.testing.assert_array_equal(after.similarity[row, :, index[row]], report.rho_max[row])
        np.testing.assert_array_equal(after.path[row, :, index[row]], report.path[row])
    assert not np.asarray(after.error[2]).any()  # not active
    assert not np.asarray(after.error[:2, :, 3:]).any()


def test_minus_infinity_is_exact_and_infinity_scans_only_when_it_must() -> None:
    always, never, exact = walk(risk_of(-np.inf)), walk(risk_of(np.inf)), walk(ExactTopK(6))
    for t in range(STEPS):
        on = always.active[t]
        np.testing.assert_array_equal(always.outs[t][on], exact.outs[t][on])
    (ended, *rows) = PLAIN.path_statistics((never.state,))
    assert (ended.fallback, ended.refresh) == (HEADS, 0)  # its first step, with an empty ring
    assert rows[0].fallback == HEADS // GROUPS  # the group of the query without a norm
    assert rows[1].fallback == 0
    assert {row.refresh for row in rows} == {HEADS}


def test_theta_and_maps_do_not_recompile() -> None:
    keys, values, tail, queries, lengths = data()
    run: Any = jax.jit(lambda method, state, *args: method.attend(0, state, *args))
    step = step_of(lengths, np.zeros(BATCH, np.int32), np.ones(BATCH, bool))
    for seed, theta in enumerate((0.3, 1.0, np.inf, -np.inf)):
        risk = draw_risk(np.random.default_rng(seed), float(theta))
        method = dataclasses.replace(PLAIN, risk=risk, tau=0.1 * seed)
        state = method.prime(0, keys, values, tail, jnp.asarray(lengths))
        run(method, state, queries[:, 0], keys, values, step)
    assert run._cache_size() == 1
