"""What ends a row: EOS, stop strings, the limit; and the text that is shown of it."""

from dataclasses import replace

import pytest

from retopk_jax import Full, Generation, generate
from tests.retopk_jax.toy import ToyModel, toy_model

NEW = 14


def run(model: ToyModel, **kwargs: object) -> tuple[Generation, list[str]]:
    shown = ["", ""]

    def on_text(row: int, text: str) -> None:
        assert text
        shown[row] += text

    result = generate(
        model,
        ["To be, or not", "x"],
        attention=Full(),
        max_new_tokens=NEW,
        on_text=on_text,
        **kwargs,  # pyright: ignore[reportArgumentType]
    )
    return result, shown


MODEL = toy_model(layers=1)
FREE = run(MODEL)[0].texts[0]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_stop_string_is_cut_off_and_never_shown(size: int) -> None:
    assert FREE is not None
    stop = FREE[5 : 5 + size]
    cut = FREE.index(stop)
    result, shown = run(MODEL, stop=["never that", stop, stop + "longer"])
    first = result.completions[0]
    assert first.finish_reason == "stop"
    assert first.text == shown[0] == FREE[:cut]
    assert len(first.tokens) == cut + size
    assert result.texts[1] == shown[1]


def test_the_beginning_of_a_stop_string_is_shown_in_the_end() -> None:
    assert FREE is not None
    result, shown = run(MODEL, stop=[FREE[-3:] + "~~"])
    assert result.completions[0].finish_reason == "length"
    assert result.texts[0] == shown[0] == FREE


def test_eos_ends_a_row_and_is_no_text() -> None:
    eos = run(MODEL)[0].tokens[0][6]
    model = replace(MODEL, eos_token_ids=frozenset({eos}))
    result, shown = run(model)
    loop = generate(model, ["To be, or not", "x"], attention=Full(), max_new_tokens=NEW)
    for row, (mine, other) in enumerate(zip(result.completions, loop.completions, strict=True)):
        assert mine.text == other.text == shown[row]
        assert mine.tokens == other.tokens
        assert mine.finish_reason == ("eos" if eos in mine.tokens else "length")
    assert result.tokens[0][-1] == eos
    assert FREE is not None
    assert result.texts[0] == FREE[: len(result.tokens[0]) - 1]
    ignored, shown = run(model, ignore_eos=True)
    assert ignored.texts[0] == shown[0] == FREE


def test_one_new_token_needs_no_step() -> None:
    result = generate(MODEL, ["ab"], attention=Full(), max_new_tokens=1)
    assert [len(tokens) for tokens in result.tokens] == [1]
    assert result.completions[0].finish_reason == "length"
    assert result.decode_steps == 0
