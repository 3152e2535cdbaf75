"""ReTopK's ablations: recall by recency, no fallback, no refresh.

No window and other C and R are shapes of `tests.retopk_jax.test_retopk_step`.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from retopk_jax.attention import ReTopK, Step
from retopk_jax.attention.retopk import FALLBACK, REFRESH, REUSE
from retopk_jax.errors import ConfigError
from tests.oracle import decode_step as oracle
from tests.retopk_jax.attention.harness import DIM, compiled

SLOTS, STEPS, HEADS, GROUPS = 40, 9, 4, 2


class RecencyHead(oracle.Head):
    """Merges the supports of the last R queries, whatever the similarity."""

    def step(self, query, keys, values, decode_step) -> oracle.Step:
        similar = super().step(query, keys, values, decode_step)
        if similar.path != oracle.REUSE:
            return similar
        before, length = self.fifo_before, len(keys)
        candidates = set(range(max(0, length - self.method.window), length))
        for entry in before[-self.method.recall :]:
            candidates |= set(entry.support)
        support = oracle.top(query, keys, sorted(candidates), self.method.budget)
        self.fifo[-1] = oracle.Remembered(self.fifo[-1].query, support)
        output = oracle.attend_to(query, keys, values, support)
        return dataclasses.replace(
            similar, support=support, candidates=len(candidates), output=output
        )

    def push(self, query, dims, support) -> None:
        self.fifo_before = list(self.fifo)
        super().push(query, dims, support)


ABLATIONS = {
    "recency": {"recall_by": "recency"},
    "recency-all-entries": {"recall_by": "recency", "recall": 5},
    "recency-no-window": {"recall_by": "recency", "window": 0},
    "no-fallback": {"tau": -1.0},
    "no-refresh": {"refresh": 0},
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_steps_equal_the_oracle(name: str) -> None:
    method = dataclasses.replace(
        ReTopK(budget=6, capacity=5, recall=2, window=3, tau=0.3, refresh=4), **ABLATIONS[name]
    )
    lengths = np.array([2, 9, 30], np.int32)  # the first has fewer tokens than R, W and C
    rng = np.random.default_rng(1)
    keys, values = (rng.normal(size=(3, GROUPS, SLOTS, DIM)).astype(np.float32) for _ in range(2))
    queries = rng.normal(size=(STEPS, 3, HEADS, DIM)).astype(np.float32)
    queries[1::2] = queries[::2][: len(queries[1::2])] + 0.3 * queries[1::2]  # some are alike
    tail = rng.normal(size=(3, method.capacity, HEADS, DIM)).astype(np.float32)
    head_class = RecencyHead if method.recall_by == "recency" else oracle.Head
    sizes = {f.name: getattr(method, f.name) for f in dataclasses.fields(oracle.Method)}
    heads = [[head_class(oracle.Method(**sizes)) for _ in range(HEADS)] for _ in lengths]
    for row, length in enumerate(lengths):
        filled = min(length, method.capacity)
        for h, head in enumerate(heads[row]):
            whole = np.zeros((length, DIM))
            whole[length - filled :] = tail[row, method.capacity - filled :, h]
            head.prefill(whole, keys[row, h // 2, :length].astype(np.float64))
    prime, attend = compiled()
    cache = jnp.asarray(keys), jnp.asarray(values)
    state = prime(method, *cache, jnp.asarray(tail), jnp.asarray(lengths))
    walked = set()
    for index in range(STEPS):
        lengths = lengths + 1
        step = Step(jnp.asarray(lengths), jnp.full(3, index, jnp.int32), jnp.ones(3, jnp.bool_))
        q = jnp.asarray(queries[index])
        out, state, report = attend(method, state, q, *cache, step)
        for row, length in enumerate(lengths):
            for h, head in enumerate(heads[row]):
                want = head.step(
                    queries[index, row, h].astype(np.float64),
                    keys[row, h // 2, :length].astype(np.float64),
                    values[row, h // 2, :length].astype(np.float64),
                    index,
                )
                path = (oracle.REUSE, oracle.FALLBACK, oracle.REFRESH)[report.path[row, h]]
                walked.add(path)
                assert path == want.path
                support = np.asarray(report.support[row, h])
                assert tuple(support[support >= 0]) == want.support
                if path == oracle.REUSE:
                    assert report.candidates[row, h] == want.candidates
                # The largest similarity to any entry, however entries are recalled.
                np.testing.assert_allclose(
                    report.rho_max[row, h], max(want.similarities), rtol=0, atol=1e-5
                )
                np.testing.assert_allclose(out[row, h], want.output, rtol=0, atol=2e-5)
    paths = {oracle.REUSE, oracle.FALLBACK, oracle.REFRESH}
    paths -= {oracle.FALLBACK} if method.tau == -1 else set()
    paths -= {oracle.REFRESH} if method.refresh == 0 else set()
    assert walked == paths
    counted = np.asarray(state.paths).sum(axis=(0, 1))
    assert (counted[FALLBACK] == 0) == (method.tau == -1)
    assert (counted[REFRESH] == 0) == (method.refresh == 0)
    assert counted[REUSE] > 0


def test_recency_and_similarity_recall_different_entries() -> None:
    """The two oldest entries are like the query, the two newest are not."""
    base = ReTopK(budget=1, capacity=4, recall=2, window=0, tau=-1.0, refresh=0)
    q = np.zeros((1, 1, DIM), np.float32)
    q[..., 0] = 1.0
    tail = np.zeros((1, 4, 1, DIM), np.float32)
    for age, (component, size) in enumerate([(0, 1.0), (1, 0.1), (2, 1.0), (3, 1.0)]):
        tail[0, age, 0, component] = size
        tail[0, age, 0, 0] += 1.0 if age < 2 else 0.0
    keys = np.zeros((1, 1, 12, DIM), np.float32)
    for token, component in enumerate([0, 1, 2, 3]):
        keys[0, 0, token, component] = 5.0
    prime, attend = compiled()
    lengths = jnp.array([8], jnp.int32)
    supports = {}
    for recall_by in ("similarity", "recency"):
        method = dataclasses.replace(base, recall_by=recall_by)
        state = prime(method, jnp.asarray(keys), jnp.asarray(keys), jnp.asarray(tail), lengths)
        step = Step(lengths + 1, jnp.array([0], jnp.int32), jnp.array([True]))
        _, _, report = attend(
            method, state, jnp.asarray(q), jnp.asarray(keys), jnp.asarray(keys), step
        )
        supports[recall_by] = int(report.support[0, 0, 0])
    assert supports == {"similarity": 0, "recency": 2}


def test_unknown_recall() -> None:
    with pytest.raises(ConfigError, match=r"recall_by='newest'.*similarity, recency"):
        ReTopK(recall_by="newest")
