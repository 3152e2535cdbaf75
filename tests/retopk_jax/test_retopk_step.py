"""`ReTopK.prime` and `ReTopK.attend` against the float64 oracle, over several steps.

Slots beyond a row's length hold other tokens' keys throughout, so reading one shows.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.recall.reference import normalise
from retopk_jax.attention import ExactTopK, Full, ReTopK, Step
from retopk_jax.attention.retopk import ReTopKState
from tests.oracle import decode_step as oracle
from tests.retopk_jax.grid import APART, DIM, Run, draw_run, thresholds

SLOTS, STEPS = 32, 7
PATHS = (oracle.REUSE, oracle.FALLBACK, oracle.REFRESH)

# name: (H, G), sizes. Every group size of the supported models once, then the sizes' corners.
SHAPES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "qwen2.5-7b": ((28, 4), {"budget": 8, "capacity": 6, "recall": 3, "window": 5}),
    "llama-3.1-8b": ((32, 8), {"budget": 8, "capacity": 6, "recall": 3, "window": 5}),
    "qwen2.5-14b": ((40, 8), {"budget": 8, "capacity": 6, "recall": 3, "window": 5}),
    "smollm2": ((9, 3), {"budget": 8, "capacity": 6, "recall": 3, "window": 5}),
    "no-groups": ((12, 12), {"budget": 8, "capacity": 6, "recall": 3, "window": 5}),
    "one-kv-head": ((8, 1), {"budget": 8, "capacity": 6, "recall": 3, "window": 5}),
    "no-window": ((4, 2), {"budget": 4, "capacity": 6, "recall": 2, "window": 0}),
    "recall-everything": ((4, 2), {"budget": 4, "capacity": 4, "recall": 4, "window": 3}),
    "remember-one": ((4, 2), {"budget": 4, "capacity": 1, "recall": 1, "window": 1}),
    "window-above-budget": ((4, 2), {"budget": 3, "capacity": 3, "recall": 2, "window": 9}),
    "sizes-above-cache": ((4, 2), {"budget": 40, "capacity": 34, "recall": 2, "window": 50}),
}


@functools.cache
def compiled():
    def prime(method, keys, values, tail, lengths):
        return method.prime(0, keys, values, tail, lengths)

    def attend(method, state, q, keys, values, step):
        return method.attend(0, state, q, keys, values, step)

    return jax.jit(prime), jax.jit(attend)


def output_bound(tokens: int, values: np.ndarray) -> float:
    """Largest error of a float32 softmax over `tokens` exact scores and its weighted sum.

    With u = 2^-24: 8u for each of the two exponentials (4 ulp), tokens * u for either sum, and 3u
    for the division, the product and the final rounding, relative to the largest value.
    """
    return (16 + 2 * tokens + 3) * 2.0**-24 * float(np.abs(values).max())


def edge_lengths(method: ReTopK) -> list[int]:
    edges = {0, 1, 2, SLOTS - STEPS}  # with the current token: L = 1, 2, 3, S
    for size in (method.window, method.capacity, method.budget):
        edges |= {size - 2, size - 1, size, size + 1}
    return sorted(edge for edge in edges if 0 <= edge <= SLOTS - STEPS)


@dataclasses.dataclass
class Row:
    """What the oracle knows of one row."""

    length: int
    heads: list[oracle.Head]
    index: int = 0


def oracle_rows(run: Run, method: ReTopK, tau: float, refresh: int) -> list[Row]:
    settings = oracle.Method(
        method.budget, method.capacity, method.recall, method.window, tau, refresh
    )
    group = run.queries.shape[2] // run.keys.shape[1]
    rows = []
    for row, length in enumerate(run.lengths):
        heads = []
        for h in range(run.queries.shape[2]):
            head = oracle.Head(settings)
            kept = min(int(length), method.capacity)
            queries = np.zeros((length, DIM))  # only the last C are looked at
            if kept:
                queries[length - kept :] = run.tail[row, -kept:, h]
            head.prefill(queries, run.keys[row, h // group].astype(np.float64))
            heads.append(head)
        rows.append(Row(int(length), heads))
    return rows


def assert_ring(state: ReTopKState, rows: list[Row]) -> None:
    """Every remembered query and support lies in its slot, the oldest being overwritten next."""
    queries, supports = np.asarray(state.cache.queries), np.asarray(state.cache.supports)
    pushed, capacity = np.asarray(state.cache.pushed), state.cache.capacity
    for b, row in enumerate(rows):
        for h, head in enumerate(row.heads):
            assert min(pushed[b], capacity) == len(head.fifo)
            for age, entry in enumerate(reversed(head.fifo)):
                slot = (pushed[b] - 1 - age) % capacity
                np.testing.assert_array_equal(
                    supports[b, h, slot], padded(entry.support, supports.shape[-1])
                )
                # Norm and division: D + 3 roundings of a number of at most 1.
                np.testing.assert_allclose(
                    queries[b, h, slot], entry.query, rtol=0, atol=(DIM + 3) * 2.0**-24
                )


def padded(support: tuple[int, ...], budget: int) -> np.ndarray:
    return np.array([*support, *[-1] * (budget - len(support))], np.int32)


def check_against_oracle(run: Run, method: ReTopK, tau: float, refresh: int) -> dict[str, int]:
    """Runs both; returns how many head-steps took each path."""
    method = dataclasses.replace(method, tau=tau, refresh=refresh)
    prime, attend = compiled()
    group = run.queries.shape[2] // run.keys.shape[1]
    keys, values = jnp.asarray(run.keys), jnp.asarray(run.values)
    rows = oracle_rows(run, method, tau, refresh)
    state = prime(method, keys, values, jnp.asarray(run.tail), jnp.asarray(run.lengths))
    assert_ring(state, rows)

    counts = np.zeros((len(rows), run.queries.shape[2], 4), np.int64)
    for queries, active in zip(run.queries, run.active, strict=True):
        step = Step(
            jnp.asarray([row.length + int(on) for row, on in zip(rows, active, strict=True)]),
            jnp.asarray([row.index for row in rows]),
            jnp.asarray(active),
        )
        step = jax.tree.map(lambda x: x if x.dtype == jnp.bool_ else x.astype(jnp.int32), step)
        before = state
        out, state, report = attend(method, state, jnp.asarray(queries), keys, values, step)
        out, support = np.asarray(out), np.asarray(report.support)
        path, unique = np.asarray(report.path), np.asarray(report.candidates)
        for b, row in enumerate(rows):
            if not active[b]:
                for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state), strict=True):
                    np.testing.assert_array_equal(old[b], new[b])
                continue
            row.length += 1
            for h, head in enumerate(row.heads):
                want = head.step(
                    queries[b, h].astype(np.float64),
                    run.keys[b, h // group, : row.length].astype(np.float64),
                    run.values[b, h // group, : row.length].astype(np.float64),
                    row.index,
                )
                assert all(abs(rho - tau) > APART / 4 for rho in want.similarities), "bad test data"
                assert PATHS[path[b, h]] == want.path
                np.testing.assert_array_equal(support[b, h], padded(want.support, method.budget))
                if want.path == oracle.REUSE:
                    assert unique[b, h] == want.candidates
                counts[b, h, path[b, h]] += 1
                counts[b, h, 3] += want.candidates
                np.testing.assert_allclose(
                    out[b, h], want.output, rtol=0, atol=output_bound(len(want.support), run.values)
                )
            row.index += 1
        assert_ring(state, rows)
    np.testing.assert_array_equal(state.paths, counts[..., :3])
    np.testing.assert_array_equal(state.candidates, counts[..., 3])
    return dict(zip(PATHS, counts[..., :3].sum(axis=(0, 1)).tolist(), strict=True))


@pytest.mark.parametrize("name", SHAPES)
@given(data=st.data())
@settings(max_examples=6, deadline=None)
def test_steps_equal_the_oracle(name: str, data: st.DataObject) -> None:
    (heads, groups), sizes = SHAPES[name]
    method = ReTopK(**sizes)
    lengths = data.draw(st.lists(st.sampled_from(edge_lengths(method)), min_size=2, max_size=2))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    run = draw_run(
        rng,
        lengths,
        heads=heads,
        groups=groups,
        slots=SLOTS,
        capacity=method.capacity,
        steps=STEPS,
        broken=data.draw(st.booleans(), label="broken"),
    )
    tau = data.draw(st.sampled_from([*thresholds(run.pool), -1.0 + APART, 1.5]), label="tau")
    check_against_oracle(run, method, tau, data.draw(st.sampled_from([0, 1, 2, 3]), label="T_r"))


def fixed_run(broken: bool = False) -> Run:
    rng = np.random.default_rng(7)
    return draw_run(
        rng, [20, 3], heads=4, groups=2, slots=SLOTS, capacity=6, steps=STEPS, broken=broken
    )


FIXED = ReTopK(budget=4, capacity=6, recall=2, window=0)


@pytest.mark.parametrize("broken", [False, True])
def test_every_path_is_walked(broken: bool) -> None:
    run = fixed_run(broken)
    high = max(t for t in thresholds(run.pool) if t < 1)
    walked = check_against_oracle(run, FIXED, tau=high, refresh=3)
    assert all(walked.values()), walked


def test_tau_above_one_always_scans() -> None:
    walked = check_against_oracle(fixed_run(), FIXED, tau=1.001, refresh=0)
    assert walked == {oracle.REUSE: 0, oracle.FALLBACK: STEPS * 2 * 4, oracle.REFRESH: 0}


def test_opposite_queries_are_reused_at_tau_minus_one() -> None:
    """-1 means never to scan, though float32 cosines of opposite vectors pass below -1."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(1, 400, DIM)).astype(np.float32)
    keys = jnp.asarray(rng.normal(size=(1, 1, 8, DIM)), jnp.float32)
    method = dataclasses.replace(FIXED, tau=-1.0, refresh=0)
    tail = jnp.broadcast_to(-q[:, None], (1, FIXED.capacity, 400, DIM))
    prime, attend = compiled()
    state = prime(method, keys, keys, tail, jnp.array([7], jnp.int32))
    step = Step(jnp.array([8], jnp.int32), jnp.array([0], jnp.int32), jnp.array([True]))
    _, _, report = attend(method, state, jnp.asarray(q), keys, keys, step)
    qbar, ring = normalise(jnp.asarray(q))[0], state.cache.queries[:, :, 0]
    assert np.asarray(jnp.sum(qbar * ring, axis=-1)).min() < -1, "bad test data"
    assert np.asarray(report.rho_max).min() == -1
    np.testing.assert_array_equal(report.path, 0)


def test_tau_above_one_scans_though_bfloat16_cosines_pass_one() -> None:
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(1, 400, DIM)), jnp.bfloat16)
    keys = jnp.asarray(rng.normal(size=(1, 1, 8, DIM)), jnp.bfloat16)
    method = dataclasses.replace(FIXED, tau=1.0001, refresh=0)
    tail = jnp.broadcast_to(q[:, None], (1, FIXED.capacity, 400, DIM))
    prime, attend = compiled()
    state = prime(method, keys, keys, tail, jnp.array([7], jnp.int32))
    step = Step(jnp.array([8], jnp.int32), jnp.array([0], jnp.int32), jnp.array([True]))
    _, _, report = attend(method, state, q, keys, keys, step)
    qbar, ring = normalise(q)[0], state.cache.queries[:, :, 0].astype(jnp.float32)
    assert np.asarray(jnp.sum(qbar * ring, axis=-1)).max() > method.tau, "bad test data"
    assert np.asarray(report.rho_max).max() == 1
    np.testing.assert_array_equal(report.path, 1)


# ---- against the other methods -------------------------------------------------------------


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, SLOTS])
def test_exact_and_full_equal_the_oracle(length: int, broken: bool) -> None:
    run = fixed_run(broken)
    keys, values = jnp.asarray(run.keys), jnp.asarray(run.values)
    step = Step(jnp.array([length, 1], jnp.int32), jnp.zeros(2, jnp.int32), jnp.array([True, True]))
    exact, _, report = ExactTopK(8).attend(0, (), jnp.asarray(run.queries[0]), keys, values, step)
    full, _, _ = Full().attend(0, (), jnp.asarray(run.queries[0]), keys, values, step)
    for b, valid in enumerate((length, 1)):
        for h in range(4):
            q, k, v = (
                x.astype(np.float64)
                for x in (
                    run.queries[0, b, h],
                    run.keys[b, h // 2, :valid],
                    run.values[b, h // 2, :valid],
                )
            )
            support, out = oracle.exact_step(q, k, v, 8)
            assert report.support is not None
            np.testing.assert_array_equal(report.support[b, h], padded(support, 8))
            bound = output_bound(SLOTS, run.values)
            np.testing.assert_allclose(exact[b, h], out, rtol=0, atol=bound)
            np.testing.assert_allclose(full[b, h], oracle.full_step(q, k, v), rtol=0, atol=bound)


@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(1, SLOTS), min_size=3, max_size=3),
)
@settings(max_examples=25, deadline=None)
def test_budget_of_the_length_gives_full(seed: int, lengths: list[int]) -> None:
    """K >= L attends to every token on any path, given W >= C (as the defaults have it).

    A remembered support ends at its own token; the oldest one at L - 1 - C, where the window
    takes over. A smaller window leaves a gap that a reuse does not see.
    """
    rng = np.random.default_rng(seed)
    method = ReTopK(budget=SLOTS, capacity=6, recall=2, window=6, tau=0.0, refresh=0)
    q, keys, values, tail = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in (
            (3, 4, DIM),
            (3, 2, SLOTS, DIM),
            (3, 2, SLOTS, DIM),
            (3, 6, 4, DIM),
        )
    )
    prime, attend = compiled()
    before = jnp.array(lengths, jnp.int32)
    state = prime(method, keys, values, tail, before - 1)
    step = Step(before, jnp.zeros(3, jnp.int32), jnp.ones(3, jnp.bool_))
    sparse, _, report = attend(method, state, q, keys, values, step)
    exact, _, _ = attend(ExactTopK(SLOTS), (), q, keys, values, step)
    full, _, _ = attend(Full(), (), q, keys, values, step)
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(
            report.support[row], np.broadcast_to(padded(tuple(range(length)), SLOTS), (4, SLOTS))
        )
    # Scores of normal numbers err by |s| (D + 1) u in either, so a weight by twice that; |s| < 8.
    bound = output_bound(SLOTS, np.asarray(values)) + 4 * 8 * (DIM + 1) * 2.0**-24 * float(
        jnp.max(jnp.abs(values))
    )
    np.testing.assert_allclose(sparse, full, rtol=0, atol=bound)
    np.testing.assert_allclose(exact, full, rtol=0, atol=bound)
