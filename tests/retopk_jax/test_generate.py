"""Generation with a toy model: against a dense forward, rows alone, streaming."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from retopk_jax import (
    AttentionMethod,
    ExactTopK,
    Full,
    ReTopK,
    decode_step,
    generate,
    prefill,
    start_session,
)
from tests.retopk_jax.dense import dense_logits
from tests.retopk_jax.toy import ToyModel, toy_model

SMALL = ReTopK(budget=16, capacity=8, recall=2, window=4, tau=0.6, refresh=5)
RAGGED = (1, 3, 40, 511, 512, 513, 700)
LOGITS = 2e-4
"""Logits are about 7 (width 48), and float32 carries each through two layers of a few hundred
roundings of 6e-8: 1e-5 relative is generous, and far below what a wrong token would change."""


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, 97, length).tolist()


def decode(
    model: ToyModel, method: AttentionMethod, prompts: list[list[int]], steps: int, capacity=768
) -> tuple[list[list[int]], list[list[np.ndarray]], np.ndarray]:
    """Greedy tokens [steps][B], supports [steps][layers] of [B, H, K], logits [steps, B, V]."""
    context = prefill(
        model, prompts, new_tokens=steps, capacity=capacity, tail_queries=method.tail_queries
    ).context
    logits, session = context.logits, start_session(model, method, context)
    tokens, supports, all_logits = [], [], [np.asarray(logits)]
    for _ in range(steps):
        chosen = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits, session, reports = decode_step(session, chosen)
        tokens.append(chosen.tolist())
        all_logits.append(np.asarray(logits))
        if reports[0].support is not None:
            supports.append([np.asarray(report.support) for report in reports])
    return tokens, supports, np.stack(all_logits)


@pytest.mark.parametrize("method", [Full(), ExactTopK(16), SMALL], ids=lambda m: m.name)
def test_ragged_rows_equal_each_row_alone(method: AttentionMethod) -> None:
    model, steps = toy_model(), 12
    prompts = [prompt(length) for length in RAGGED]
    tokens, supports, _ = decode(model, method, prompts, steps)
    for row, alone in enumerate(prompts):
        its_tokens, its_supports, _ = decode(model, method, [alone], steps)
        assert [step[row] for step in tokens] == [step[0] for step in its_tokens]
        for step, its_step in zip(supports, its_supports, strict=True):
            for layer, its_layer in zip(step, its_step, strict=True):
                np.testing.assert_array_equal(layer[row], its_layer[0])


@pytest.mark.parametrize("length", [1, 2, 511, 512, 513, 1100])
def test_prefill_and_full_decode_equal_a_dense_forward(length: int) -> None:
    model, steps = toy_model(), 6
    tokens, _, logits = decode(model, Full(), [prompt(length)], steps, capacity=1280)
    fed = prompt(length) + [token for (token,) in tokens]
    dense = dense_logits(model, fed)[length - 1 :]
    np.testing.assert_allclose(logits[:, 0], dense, rtol=0, atol=LOGITS)


def test_budget_above_the_context_equals_full() -> None:
    model, prompts = toy_model(layers=1), [prompt(n) for n in (30, 1, 17)]
    full, _, full_logits = decode(model, Full(), prompts, 10)
    for method in (ExactTopK(400), ReTopK(budget=400, capacity=32, recall=4, window=32, tau=-1)):
        tokens, _, logits = decode(model, method, prompts, 10)
        assert tokens == full
        np.testing.assert_allclose(logits, full_logits, rtol=0, atol=LOGITS)


def test_always_exact_retopk_equals_exact_top_k() -> None:
    model, prompts = toy_model(layers=1), [prompt(n) for n in (90, 5)]
    exact, retopk = (
        decode(model, method, prompts, 12)
        for method in (ExactTopK(16), replace(SMALL, tau=1.5, refresh=0))
    )
    assert exact[0] == retopk[0]
    np.testing.assert_array_equal(np.array(exact[1]), np.array(retopk[1]))


@pytest.mark.parametrize("method", [Full(), SMALL], ids=lambda m: m.name)
def test_loop_stream_and_single_steps_agree(method: AttentionMethod) -> None:
    model, prompts = toy_model(layers=1), [prompt(20), prompt(7), prompt(1)]
    shown: dict[int, str] = {0: "", 1: "", 2: ""}

    def on_text(row: int, text: str) -> None:
        shown[row] += text

    loop = generate(model, prompts, attention=method, max_new_tokens=15)
    stream = generate(model, prompts, attention=method, max_new_tokens=15, on_text=on_text)
    single, _, _ = decode(model, method, prompts, 15)
    assert loop.tokens == stream.tokens == np.array(single).T.tolist()
    assert [shown[row] for row in range(3)] == stream.texts == loop.texts
    assert [c.paths for c in loop.completions] == [c.paths for c in stream.completions]


def test_continuing_a_context_equals_reading_it_again() -> None:
    model, prompts = toy_model(layers=1), [prompt(20), prompt(60)]
    context = prefill(model, prompts, new_tokens=20, tail_queries=8).context
    for method in (SMALL, Full(), SMALL):
        run = generate(model, context=context, donate=True, attention=method, max_new_tokens=20)
        context = run.context
        fresh = generate(model, prompts, attention=method, max_new_tokens=20)
        assert run.tokens == fresh.tokens
        assert [c.paths for c in run.completions] == [c.paths for c in fresh.completions]


def test_statistics_count_every_head_step_once() -> None:
    model = toy_model()
    run = generate(model, [prompt(30), prompt(2)], attention=SMALL, max_new_tokens=12)
    for completion in run.completions:
        paths = completion.paths
        assert paths is not None
        # The first token is the prefill's; refresh at t = 5 and 10; 2 layers of 6 heads.
        assert paths.reuse + paths.fallback + paths.refresh == 11 * 2 * 6
        assert paths.refresh == 2 * 2 * 6
        assert paths.reuse > 0
        assert paths.fallback > 0
        by_head = np.array(paths.by_head)
        assert by_head.shape == (2, 6, 4)
        assert by_head.sum(axis=(0, 1)).tolist() == [
            paths.reuse,
            paths.fallback,
            paths.refresh,
            paths.candidates,
        ]


def test_a_row_that_ended_is_not_counted() -> None:
    model = toy_model(layers=1)
    prompts = [prompt(30), prompt(2)]
    free = generate(model, prompts, attention=SMALL, max_new_tokens=12)
    eos = free.tokens[0][3]
    ended = generate(
        replace(model, eos_token_ids=frozenset({eos})), prompts, attention=SMALL, max_new_tokens=12
    )
    for mine, other in zip(ended.completions, free.completions, strict=True):
        stop = other.tokens.index(eos) + 1 if eos in other.tokens else 12
        assert mine.tokens == other.tokens[:stop]
        assert mine.paths is not None
        assert mine.paths.reuse + mine.paths.fallback + mine.paths.refresh == (stop - 1) * 6


# ---- corners -------------------------------------------------------------------------------


def test_capacity_of_exactly_the_tokens() -> None:
    model = toy_model(layers=1)
    for length, new in ((1, 1), (60, 4)):
        tight = generate(
            model, [prompt(length)], attention=SMALL, max_new_tokens=new, capacity=length + new
        )
        wide = generate(model, [prompt(length)], attention=SMALL, max_new_tokens=new)
        assert tight.context.cache.capacity == length + new
        assert tight.tokens == wide.tokens


@pytest.mark.parametrize(
    "method",
    [
        ReTopK(budget=8, capacity=32, recall=4, window=2),  # C above the prompt
        ReTopK(budget=64, capacity=4, recall=4, window=70),  # K and W above the cache
    ],
)
def test_sizes_above_the_cache_change_nothing(method: AttentionMethod) -> None:
    model = toy_model(layers=1)
    prompts = [prompt(1), prompt(2)]
    tight = generate(model, prompts, attention=method, max_new_tokens=9, capacity=11)
    wide = generate(model, prompts, attention=method, max_new_tokens=9, capacity=300)
    assert tight.tokens == wide.tokens
    assert [c.paths for c in tight.completions] == [c.paths for c in wide.completions]


def test_bfloat16_cache_decodes() -> None:
    model = toy_model(layers=1, dtype="bfloat16")
    run = generate(model, [prompt(50), prompt(3)], attention=SMALL, max_new_tokens=8)
    assert run.context.cache.keys[0].dtype == jnp.bfloat16
    for completion in run.completions:
        assert completion.paths is not None
        assert completion.paths.reuse + completion.paths.fallback + completion.paths.refresh == 42
