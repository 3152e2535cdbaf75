"""The five methods on the demo model, with 4,000 tokens of context and 512 attended."""

import jax.numpy as jnp
import pytest

from models import load_model
from retopk_jax.attention import (
    AttentionMethod,
    Full,
    Loki,
    Quest,
    SparQ,
    StreamingLLM,
    TokenSelect,
)
from retopk_jax.calibration import calibrate_loki
from retopk_jax.generate import generate
from retopk_jax.prefill import prefill

BUDGET, NEW = 512, 12
FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
SECRET = "4821736"
NEEDLE = f"One of the special magic numbers for wooden-lantern is: {SECRET}.\n"
TASK = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n"
)
QUESTION = "What is the special magic number for wooden-lantern mentioned in the provided text?"
PREFIX = " The special magic number for wooden-lantern mentioned in the provided text is"


@pytest.mark.long
def test_greedy_answers_with_512_of_4000_tokens(tmp_path) -> None:
    model = load_model("smollm2")
    tokenizer = model.require_tokenizer()
    lines = [FILLER] * 150
    lines[75] = NEEDLE
    asked = [{"role": "user", "content": TASK + "".join(lines) + QUESTION}]
    prompt = [*tokenizer.encode_chat(asked), *tokenizer.encode(PREFIX)]
    assert 3500 < len(prompt) < 4096
    text = tmp_path / "text.txt"
    text.write_text("".join(lines[:50]), encoding="utf-8")
    basis = calibrate_loki(model, [text], window=1024)
    basis.check_model(model)
    methods: tuple[AttentionMethod, ...] = (
        Full(),
        StreamingLLM(),
        Quest(),
        SparQ(),
        Loki(basis=jnp.asarray(basis.basis)),
        TokenSelect(),
    )
    context = prefill(model, [prompt], new_tokens=NEW).context
    answers = {}
    for method in methods:
        done = generate(
            model,
            context=context,
            donate=True,
            attention=method,
            max_new_tokens=NEW,
            ignore_eos=True,
        )
        context = done.context
        (completion,) = done.completions
        answers[method.name] = completion.text
        print(f"{method.name}: {completion.text!r}, {completion.tokens_attended:.1f} attended")
        assert len(completion.tokens) == NEW
        if not isinstance(method, Full):
            assert 496 < completion.tokens_attended <= BUDGET
    found = {name for name, answer in answers.items() if answer and SECRET in answer}
    assert "full" in found, "the model does not answer at all"
