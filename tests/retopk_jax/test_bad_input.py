"""Every refusal names the argument, its value and what would be accepted, before any work."""

import re
from typing import Any

import pytest

from retopk_jax import (
    CapacityError,
    ConfigError,
    ExactTopK,
    Full,
    PromptError,
    ReTopK,
    SparQ,
    decode_step,
    generate,
    prefill,
    start_session,
)
from retopk_jax.sampling import make_sampling
from tests.retopk_jax.toy import toy_model

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ReTopK(budget=0), "budget=0: expected an integer >= 1"),
        (lambda: ReTopK(budget=True), "budget=True: expected an integer >= 1"),
        (lambda: ReTopK(capacity=0), "capacity=0: expected an integer >= 1"),
        (lambda: ReTopK(recall=0), "recall=0: expected an integer >= 1"),
        (lambda: ReTopK(recall=33), "recall=33: expected at most capacity=32"),
        (lambda: ReTopK(window=-1), "window=-1: expected an integer >= 0"),
        (lambda: ReTopK(tau=-1.5), "tau=-1.5: expected a finite number >= -1.0"),
        (lambda: ReTopK(tau=NAN), "tau=nan: expected a finite number >= -1.0"),
        (lambda: ReTopK(tau=INF), "tau=inf: expected a finite number >= -1.0"),
        (lambda: ReTopK(tau="x"), "tau='x': expected a finite number >= -1.0"),  # pyright: ignore
        (lambda: ReTopK(refresh=-1), "refresh=-1: expected an integer >= 0"),
        (lambda: ReTopK(refresh=1.5), "refresh=1.5: expected an integer >= 0"),  # pyright: ignore
        (lambda: ExactTopK(0), "budget=0: expected an integer >= 1"),
        (lambda: ExactTopK(2.0), "budget=2.0: expected an integer >= 1"),  # pyright: ignore
        (lambda: make_sampling(-1.0), "temperature=-1.0: expected a finite number >= 0.0"),
        (lambda: make_sampling(NAN), "temperature=nan: expected a finite number >= 0.0"),
        (lambda: make_sampling(1.0, -1), "top_k=-1: expected an integer >= 0"),
        (lambda: make_sampling(1.0, 0, 0.0), "top_p=0.0: expected above 0 and at most 1"),
        (lambda: make_sampling(1.0, 0, 1.1), "top_p=1.1: expected above 0 and at most 1"),
    ],
)
def test_settings(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("prompts", "kwargs", "error", "message"),
    [
        ([], {}, PromptError, "prompts=[]: expected at least one"),
        ("", {}, PromptError, "prompt 0 is empty: expected at least one token"),
        (["a", ""], {}, PromptError, "prompt 1 is empty: expected at least one token"),
        ([[1], []], {}, PromptError, "prompt 1 is empty: expected at least one token"),
        ([1, 2], {}, PromptError, "prompt 0 is 1: expected a text or a list of token ids"),
        ([[1.5]], {}, PromptError, "prompt 0 is [1.5]: expected a text or a list of token ids"),
        ([[1, 97]], {}, PromptError, "prompt 0 holds token id 97: expected 0 to 96"),
        ([[1], [-1]], {}, PromptError, "prompt 1 holds token id -1: expected 0 to 96"),
        ([[1]], {"max_new_tokens": 0}, ConfigError, "max_new_tokens=0: expected an integer >= 1"),
        ([[1]], {"max_new_tokens": 1.5}, ConfigError, "max_new_tokens=1.5: expected an integer"),
        ([[1]], {"seed": -1}, ConfigError, "seed=-1: expected an integer from 0 to"),
        ([[1]], {"seed": 2**70}, ConfigError, f"seed={2**70}: expected an integer from 0 to"),
        ([[1]], {"stop": "x"}, ConfigError, "stop='x': expected a list of texts"),
        ([[1]], {"stop": [""]}, ConfigError, "stop=['']: expected a list of texts, none of them"),
        ([[1]], {"capacity": "9"}, ConfigError, "capacity='9': expected an integer >= 1"),
        (
            [[1, 2], [1]],
            {"capacity": 6, "max_new_tokens": 5},
            CapacityError,
            "capacity=6: expected at least 7, a prompt of 2 tokens + 5 new tokens",
        ),
        (
            [[1] * 4000],
            {"max_new_tokens": 97},
            CapacityError,
            "prompt of 4000 tokens + 97 new tokens = 4097: the model has 4096 positions",
        ),
    ],
)
def test_generate(prompts: Any, kwargs: Any, error: type[Exception], message: str) -> None:
    def progress(done: int, total: int) -> None:
        raise AssertionError("work began before the refusal")

    with pytest.raises(error, match=re.escape(message)):
        generate(toy_model(), prompts, progress=progress, **kwargs)


def test_a_full_context_and_a_full_session() -> None:
    model = toy_model(layers=1)
    context = prefill(model, [[1, 2], [3]], new_tokens=2, capacity=4).context
    with pytest.raises(CapacityError, match=r"expected at least 5, a context of 2 tokens"):
        generate(model, context=context, capacity=4, attention=Full(), max_new_tokens=3)
    with pytest.raises(ConfigError, match=r"last 200 prompt tokens.*tail_queries=200"):
        start_session(model, ReTopK(capacity=200), context)
    with pytest.raises(ConfigError, match="components=99: expected at most"):
        start_session(model, SparQ(components=99), context)
    session = start_session(model, ExactTopK(2), context)
    with pytest.raises(PromptError, match=r"tokens of shape \(3,\): expected one a row, \(2,\)"):
        decode_step(session, [1, 2, 3])
    first = session
    for _ in range(2):
        _, session, _ = decode_step(session, [1, 2])
    with pytest.raises(ConfigError, match="session: a step was taken from it"):
        decode_step(first, [1, 2])
    with pytest.raises(CapacityError, match="cache of 4 tokens a row is full"):
        decode_step(session, [1, 2])
    assert session.state.cache.lengths.tolist() == [4, 3]
