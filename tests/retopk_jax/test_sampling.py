"""Sampling: filters against NumPy, seeds, limits, extremes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retopk_jax import generate
from retopk_jax.sampling import keep_likeliest, make_sampling, sample
from tests.retopk_jax.toy import toy_model

VOCAB = 12
LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(3, VOCAB)) * 2, jnp.float32)
FILTER = jax.jit(keep_likeliest)


def kept_by_numpy(logits: np.ndarray, top_k: int, top_p: float) -> set[int]:
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    order = order[: top_k or None]
    weights = np.exp(logits[order].astype(np.float64))
    weights /= weights.sum()
    kept, mass = set(), 0.0
    for token, weight in zip(order, weights, strict=True):
        if mass >= top_p:
            break
        kept.add(token)
        mass += weight
    return kept


@given(
    seed=st.integers(0, 2**32 - 1),
    top_k=st.integers(0, VOCAB + 3),
    top_p=st.sampled_from([0.01, 0.2, 0.5, 0.77, 0.95, 1.0]),
    ties=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_filters_equal_numpy(seed: int, top_k: int, top_p: float, ties: bool) -> None:
    logits = np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32)
    if ties:
        logits[[2, 5, 7]] = logits[1]
    kept = np.asarray(FILTER(jnp.asarray(logits)[None], jnp.int32(top_k), jnp.float32(top_p)))[0]
    assert set(np.flatnonzero(np.isfinite(kept))) == kept_by_numpy(logits, top_k, top_p)
    np.testing.assert_array_equal(kept[np.isfinite(kept)], logits[np.isfinite(kept)])


def test_top_p_of_one_keeps_a_tail_below_rounding() -> None:
    logits = jnp.concatenate([jnp.zeros((1, 3)), jnp.full((1, 4), -40.0)], axis=1)
    assert bool(jnp.all(jnp.isfinite(FILTER(logits, jnp.int32(0), jnp.float32(1.0)))))


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": 0.0},
        {"temperature": 1e-46},  # 0 in float32
        {"temperature": 1e-38},  # logits / temperature overflow
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.0, "top_p": 1e-60},  # 0 in float32
    ],
)
def test_extremes_are_greedy(setting: dict[str, float]) -> None:
    sampling = make_sampling(**setting)  # pyright: ignore[reportArgumentType]
    for seed in range(5):
        drawn = sample(LOGITS, sampling, jax.random.key(seed), jnp.zeros(3, jnp.int32))
        np.testing.assert_array_equal(drawn, np.argmax(LOGITS, axis=1))


def test_top_k_beyond_int32_keeps_all() -> None:
    assert int(make_sampling(1.0, 2**40).top_k) >= VOCAB


def test_frequencies_follow_the_softmax() -> None:
    draws, temperature = 4000, 1.5
    sampling = make_sampling(temperature)
    batch = jnp.broadcast_to(LOGITS[:1], (draws, VOCAB))
    drawn = sample(batch, sampling, jax.random.key(1), jnp.zeros(draws, jnp.int32))
    seen = np.bincount(np.asarray(drawn), minlength=VOCAB) / draws
    expected = np.asarray(jax.nn.softmax(LOGITS[0] / temperature))
    # Five standard deviations of a frequency; the key is fixed, so this cannot flicker.
    assert np.all(np.abs(seen - expected) <= 5 * np.sqrt(expected * (1 - expected) / draws))


def test_a_seed_repeats_itself_and_another_differs() -> None:
    model = toy_model(layers=1)
    runs = [
        generate(model, [[1, 2], [1, 2]], max_new_tokens=20, temperature=2.0, seed=seed).tokens
        for seed in (5, 5, 6)
    ]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1], "equal rows draw with streams of their own"
