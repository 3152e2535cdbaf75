"""One context, many generations: nothing is read twice, and the context stays what it was."""

import sys
from dataclasses import replace

import jax
import numpy as np
import pytest

from retopk_jax import (
    CapacityError,
    ConfigError,
    Context,
    ExactTopK,
    Full,
    PromptError,
    ReTopK,
    device_memory,
    extend,
    generate,
    prefill,
    save_context,
    start_session,
)
from tests.retopk_jax.toy import ToyModel, toy_model

RETOPK = ReTopK(budget=16, capacity=8, recall=2, window=4, tau=0.6, refresh=5)
METHODS = (RETOPK, ExactTopK(16), Full())
NEW = 8


def tokens(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, 97, length).tolist()


BOOK = tokens(700)
QUESTIONS = [tokens(3, 1), tokens(40, 1), tokens(1, 1)]


@pytest.fixture(scope="module")
def model() -> ToyModel:
    return toy_model()


@pytest.fixture(scope="module")
def book(model: ToyModel) -> Context:
    return prefill(model, [BOOK], new_tokens=1).context


def content(context: Context) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(context)]  # a view would forbid donation


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_questions_in_a_batch_equal_reading_everything_anew(model, book, method) -> None:
    before = content(book)
    read = []

    def progress(done: int, total: int) -> None:
        read.append(total)

    run = generate(
        model, QUESTIONS, context=book, attention=method, max_new_tokens=NEW, progress=progress
    )
    anew = generate(model, [BOOK + q for q in QUESTIONS], attention=method, max_new_tokens=NEW)
    assert run.tokens == anew.tokens
    assert [c.paths for c in run.completions] == [c.paths for c in anew.completions]
    assert [c.prompt_tokens for c in run.completions] == [700 + len(q) for q in QUESTIONS]
    assert set(read) == {sum(map(len, QUESTIONS))}, "the book was read again"
    assert run.context is book
    for now, then in zip(content(book), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_a_question_alone_equals_itself_in_a_batch(model, book) -> None:
    batch = generate(model, QUESTIONS, context=book, attention=RETOPK, max_new_tokens=NEW)
    for row, question in enumerate(QUESTIONS):
        alone = generate(model, [question], context=book, attention=RETOPK, max_new_tokens=NEW)
        assert alone.tokens[0] == batch.tokens[row]


def test_a_donated_context_comes_back_unchanged(model, monkeypatch) -> None:
    given = prefill(model, [BOOK], new_tokens=60).context
    before = content(given)
    monkeypatch.delattr(sys.modules["retopk_jax.prefill"], "_copy_cache")  # whoever copies it fails
    for question in QUESTIONS:
        run = generate(
            model, [question], context=given, donate=True, attention=RETOPK, max_new_tokens=NEW
        )
        anew = generate(model, [BOOK + question], attention=RETOPK, max_new_tokens=NEW)
        assert run.tokens == anew.tokens
        assert given.cache.keys[0].is_deleted()
        given = run.context
    assert given.cache.lengths.tolist() == [700]
    for layer in range(2):  # what lies beyond the 700 tokens is nobody's
        np.testing.assert_array_equal(
            np.asarray(given.cache.keys[layer])[:, :, :700], before[layer][:, :, :700]
        )
    for now, then in zip(content(replace(given, cache=None)), before[5:], strict=True):
        np.testing.assert_array_equal(now, then)


def test_donating_what_does_not_suffice_copies(model, book) -> None:
    run = generate(model, QUESTIONS, context=book, donate=True, max_new_tokens=NEW)
    assert run.context is book
    assert not book.cache.keys[0].is_deleted()


def test_a_row_each_and_no_question(model) -> None:
    rows = prefill(model, [BOOK, tokens(5)], new_tokens=1).context
    run = generate(model, [[1, 2], [3]], context=rows, attention=Full(), max_new_tokens=NEW)
    anew = generate(model, [[*BOOK, 1, 2], [*tokens(5), 3]], attention=Full(), max_new_tokens=NEW)
    assert run.tokens == anew.tokens
    run = generate(model, context=rows, attention=Full(), max_new_tokens=NEW)
    anew = generate(model, [BOOK, tokens(5)], attention=Full(), max_new_tokens=NEW)
    assert run.tokens == anew.tokens
    assert run.prefill_seconds < 0.1


def test_a_conversation_goes_on(model, book) -> None:
    read = extend(model, book, [QUESTIONS[1]], new_tokens=NEW).context
    assert read.cache.lengths.tolist() == [740]
    more = extend(model, read, [QUESTIONS[0]], new_tokens=NEW).context
    whole = prefill(model, [BOOK + QUESTIONS[1] + QUESTIONS[0]], new_tokens=NEW).context
    runs = [
        generate(model, context=c, attention=Full(), max_new_tokens=NEW).tokens
        for c in (more, whole)
    ]
    assert runs[0] == runs[1]


# ---- refusals ------------------------------------------------------------------------------


def test_refusals_come_before_anything_is_read(model, book) -> None:
    two = prefill(model, [[1], [2]], new_tokens=1).context
    with pytest.raises(PromptError, match="3 prompts after a context of 2 rows: expected 2"):
        generate(model, QUESTIONS, context=two)
    with pytest.raises(PromptError, match="prompts=None and context=None"):
        generate(model)
    with pytest.raises(
        CapacityError, match=r"context of 700 tokens \+ prompt of 40 tokens \+ 4000"
    ):
        generate(model, QUESTIONS, context=book, max_new_tokens=4000)
    with pytest.raises(ConfigError, match="last 129 prompt tokens: the context kept 128"):
        generate(model, QUESTIONS, context=book, attention=ReTopK(capacity=129))
    assert not book.cache.keys[0].is_deleted()


def test_what_cannot_be_continued_is_refused(model, book, tmp_path) -> None:
    copy = extend(model, book, [[]], new_tokens=1).context
    copy.cache.keys[0].delete()
    for use in (
        lambda: generate(model, context=copy),
        lambda: generate(model, [[1]], context=copy, donate=True),
        lambda: extend(model, copy, [[1]], new_tokens=1),
        lambda: start_session(model, RETOPK, copy),
        lambda: save_context(tmp_path / "ctx", model, copy, [BOOK]),
    ):
        with pytest.raises(ConfigError, match="context: its cache was donated; go on with"):
            use()
    assert not list(tmp_path.iterdir())
    for other, message in (
        (toy_model(layers=1), "a model of layers 2, this one has 1"),
        (toy_model(heads=4), "a model of query heads 6, this one has 4"),
        (toy_model(kv_heads=3), "a model of KV heads 2, this one has 3"),
        (toy_model(dtype="bfloat16"), "a model of dtype float32, this one has bfloat16"),
    ):
        with pytest.raises(ConfigError, match=message):
            generate(other, [[1]], context=book)
    with pytest.raises(ConfigError, match="context is a list: expected a Context"):
        generate(model, [[1]], context=BOOK)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("given", "slots", "size"), [(True, 1792, 2.6), (False, 1536, 2.2)])
def test_what_does_not_fit_the_device_is_refused_with_the_numbers(
    model, book, given, slots, size, monkeypatch
) -> None:
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: 3 << 20)

    def progress(done: int, total: int) -> None:
        raise AssertionError("work began before the refusal")

    # 2 layers of keys and values, 3 rows of 2 heads of 16 numbers.
    assert round(2 * 2 * 3 * 2 * 16 * 4 * slots / 2**20, 1) == size
    message = rf"3 x {slots} tokens needs {size} MiB of keys and values .* 3\.0 MiB free"
    with pytest.raises(CapacityError, match=message):
        generate(
            model,
            QUESTIONS if given else [BOOK] * 3,
            context=book if given else None,
            attention=ReTopK(budget=512),
            max_new_tokens=800,
            progress=progress,
        )
