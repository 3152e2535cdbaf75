"""Scoring given tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retopk_jax import CapacityError, ExactTopK, Full, PromptError, ReTopK, prefill
from retopk_jax.teacher_forcing import score_continuation
from tests.retopk_jax.toy import toy_model

MODEL = toy_model()
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, 97, n).tolist() for n in (70, 1, 33)]
TOKENS = jnp.asarray(RNG.integers(0, 97, (3, 12)), jnp.int32)


def read(tail: int = 8):
    return prefill(MODEL, PROMPTS, new_tokens=16, tail_queries=tail).context


def test_losses_equal_those_of_reading_prompt_and_continuation_at_once():
    nll = np.asarray(score_continuation(MODEL, read(), Full(), TOKENS).nll)
    for row, prompt in enumerate(PROMPTS):
        for step in (0, 5, 10):
            longer = prompt + TOKENS[row, : step + 1].tolist()
            logits = prefill(MODEL, [longer], new_tokens=1, tail_queries=0).context.logits[0]
            expected = -jax.nn.log_softmax(logits)[TOKENS[row, step + 1]]
            np.testing.assert_allclose(nll[row, step], expected, rtol=2e-5, atol=2e-5)


def test_methods_share_one_prefill_and_leave_the_prompts_as_they_were():
    context = read()
    before = [np.asarray(k[0, :, :70]) for k in context.cache.keys]
    first = score_continuation(MODEL, context, Full(), TOKENS)
    sparse = score_continuation(MODEL, first.context, ReTopK(16, 8, 2, 4), TOKENS)
    again = score_continuation(MODEL, sparse.context, Full(), TOKENS)
    np.testing.assert_array_equal(first.nll, again.nll)
    for old, new in zip(before, again.context.cache.keys, strict=True):
        np.testing.assert_array_equal(old, new[0, :, :70])
    assert np.abs(np.asarray(sparse.nll) - np.asarray(first.nll)).max() > 0


def test_a_budget_beyond_the_length_scores_like_full():
    full = score_continuation(MODEL, read(), Full(), TOKENS)
    exact = score_continuation(MODEL, full.context, ExactTopK(128), TOKENS)
    np.testing.assert_allclose(exact.nll, full.nll, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [(3, 1), (2, 5), (3,)])
def test_tokens_of_another_shape_are_refused(shape):
    with pytest.raises(PromptError, match=r"tokens of shape"):
        score_continuation(MODEL, read(), Full(), jnp.zeros(shape, jnp.int32))


def test_more_tokens_than_the_cache_holds_are_refused():
    context = read()
    room = context.cache.capacity - 70
    with pytest.raises(CapacityError, match=str(room)):
        score_continuation(MODEL, context, Full(), jnp.zeros((3, room + 2), jnp.int32))
