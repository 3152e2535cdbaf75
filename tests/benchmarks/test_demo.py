import json

import numpy as np
import pytest

from benchmarks import demo
from benchmarks.__main__ import main
from benchmarks.attended import Trace, choose_head
from models import load_model
from retopk_jax import ExactTopK, Full, ReTopK
from tests.retopk_jax_cli.checkpoint import write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def test_runs_on_a_tiny_model(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RETOPK_COMPILATION_CACHE", "off")
    monkeypatch.setattr(demo, "METHODS_SHOWN", (Full(), ExactTopK(16), ReTopK(16)))
    monkeypatch.setattr(demo, "METHODS_TRACED", (ExactTopK(16), ReTopK(16)))
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Paragraph {n}, about nothing." for n in range(8)))
    out = tmp_path / "out"
    options = ["--model", str(tiny), "--text", str(text), "--max-new-tokens", "6"]
    assert main(["demo", "--out", str(out), *options]) == 0
    result = json.loads((out / "demo.json").read_text())
    assert [row["name"] for row in result["rows"]] == [
        "Full",
        "Exact Top-K, K=16",
        "ReTopK, K=16",
    ]
    full, _, retopk = result["rows"]
    assert full["agreement"] == 1
    assert full["path_shares"] is None
    assert sum(retopk["path_shares"].values()) == pytest.approx(1)
    assert retopk["bytes"]["recall_cache"] > 0
    assert "ReTopK, K=16" in (out / "demo.md").read_text()
    assert (out / "attended_positions.png").read_bytes().startswith(b"\x89PNG")
    assert "tokens/s" in capsys.readouterr().out


def test_fact_is_where_the_prompt_says(tiny):
    tokenizer = load_model(tiny).require_tokenizer()
    prompt = demo.hide(tokenizer, "First.\n\nSecond.\n\nThird.\n\nFourth.")
    start, end = prompt.fact
    assert tokenizer.decode(prompt.tokens[start:end]) == demo.FACT
    assert "Second.\n\n" + demo.FACT + "\n\nThird." in tokenizer.decode(prompt.tokens)


def test_example_text_fits_the_demo_model():
    text = demo.TEXT.read_text(encoding="utf-8")
    assert text.startswith("CHAPTER 1")
    assert demo.ANSWER not in text
    assert 25_000 < len(text) < 32_000


def test_agreement_counts_the_longer_answer():
    assert demo.agreement([1, 2, 3], [1, 2, 3]) == 1
    assert demo.agreement([1, 9, 3], [1, 2, 3, 4]) == 0.5


def test_head_that_holds_the_fact():
    supports = np.full((3, 2, 4, 5), -1)
    supports[:, 1, 2, :2] = [10, 11]
    supports[0, 0, 3, :2] = [10, 11]
    assert choose_head(Trace("", supports, None), (10, 12)) == (1, 2)
