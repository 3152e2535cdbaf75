"""`retopk prefill` and `retopk generate --context`."""

import json

import pytest

from models import load_model
from retopk_jax import Full, ReTopK, generate
from retopk_jax.cli import main
from retopk_jax.context_store import read_manifest

BOOK = "It is a truth universally acknowledged, that a single man"
METHOD = Full()
NEW = ["--max-new-tokens", "6", "--ignore-eos"]


@pytest.fixture
def book(tiny, tmp_path):
    (tmp_path / "book.txt").write_text(BOOK, encoding="utf-8")
    return ["prefill", "--model", str(tiny), "--prompt-file", str(tmp_path / "book.txt")]


def generated(tmp_path, *options) -> dict:
    out = tmp_path / "out.json"
    assert (
        main(["generate", "--attention", "full", *map(str, options), *NEW, "--json", str(out)]) == 0
    )
    return json.loads(out.read_text())


def test_a_question_follows_the_book(tiny, tmp_path, book, capfd):
    assert main([*book, "--save", str(tmp_path / "ctx")]) == 0
    assert f"read {len(BOOK)} of {len(BOOK)} prompt tokens" in capfd.readouterr().err
    model = load_model(tiny)
    for question in (" Who?", " Where, and when?"):
        asked = generated(tmp_path, "--context", tmp_path / "ctx", "--prompt", question)
        whole = generate(
            model, BOOK + question, attention=METHOD, max_new_tokens=6, ignore_eos=True
        )
        assert asked["tokens"] == whole.tokens[0]
        assert asked["prompt_tokens"] == len(BOOK + question)
        assert f"read {len(question)} of {len(question)} prompt" in capfd.readouterr().err
    went_on = generated(tmp_path, "--context", tmp_path / "ctx")
    whole = generate(model, BOOK, attention=METHOD, max_new_tokens=6, ignore_eos=True)
    assert went_on["tokens"] == whole.tokens[0]


def test_recall_caches_of_the_sizes_asked_for_are_stored(tiny, tmp_path, book):
    store = tmp_path / "ctx"
    assert main([*book, "--save", str(store), "--budget", "8", "--capacity", "4"]) == 0
    assert read_manifest(store)["sizes"]["recall"] == [4, 8]
    model, options = load_model(tiny), ["--context", store, "--prompt", " Who?"]
    for budget in (8, 16):
        method = ReTopK(budget=budget, capacity=4)
        sizes = ["--attention", "retopk", "--budget", budget, "--capacity", "4"]
        asked = generated(tmp_path, *options, *sizes)
        whole = generate(model, BOOK + " Who?", attention=method, max_new_tokens=6, ignore_eos=True)
        assert asked["tokens"] == whole.tokens[0]
    assert main([*book, "--save", str(store), "--budget", "0"]) == 2


def test_a_batch_of_questions_and_a_conversation(tiny, tmp_path, book):
    store = str(tmp_path / "ctx")
    assert main([*book, "--chat", "--system", "Be brief", "--save", store]) == 0
    questions = ("\nWho?", "\nWhere, and when?")
    options = [part for question in questions for part in ("--prompt", question)]
    asked = generated(tmp_path, "--context", store, *options)
    tokenizer = load_model(tiny).require_tokenizer()
    turns = [
        tokenizer.encode_chat(
            [
                {"role": "system", "content": "Be brief"},
                {"role": "user", "content": BOOK + question},
            ]
        )
        for question in questions
    ]
    whole = generate(load_model(tiny), turns, attention=METHOD, max_new_tokens=6, ignore_eos=True)
    assert asked["tokens"] == whole.tokens
    assert asked["prompt_tokens"] == [len(turn) for turn in turns]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--chat"], ["--chat is settled by --context"]),
        (["--system", "x"], ["--system is settled by --context"]),
        (["--prompt", ""], ["prompt 0 is empty"]),
        (["--dtype", "bfloat16"], ["--dtype bfloat16", "was read in float32"]),
        (["--context", "/nowhere"], ["/nowhere: no stored context"]),
    ],
)
def test_refusals_before_the_model_is_loaded(options, parts, book, tmp_path, monkeypatch, capsys):
    assert main([*book, "--save", str(tmp_path / "ctx")]) == 0
    capsys.readouterr()
    monkeypatch.setattr(
        "retopk_jax.cli_generate.load_model", lambda *_, **__: pytest.fail("loaded")
    )
    assert main(["generate", "--context", str(tmp_path / "ctx"), *options]) == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1
    for part in parts:
        assert part in complaint


def test_where_and_what_to_store_is_checked_first(book, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("retopk_jax.cli_prefill.load_model", lambda *_, **__: pytest.fail("loaded"))
    for store, part in ((tmp_path, "holds book.txt"), ("/nowhere/ctx", "/nowhere does not exist")):
        assert main([*book, "--save", str(store)]) == 2
        assert part in capsys.readouterr().err
    assert main(["prefill", "--model", "m", "--save", str(tmp_path / "ctx")]) == 2
    assert "no prompt" in capsys.readouterr().err
    assert main(["generate", "--prompt", "x"]) == 2
    assert "--model" in capsys.readouterr().err


def test_a_context_of_several_rows_takes_as_many_questions(tiny, tmp_path, capsys):
    store = str(tmp_path / "ctx")
    texts = ["--prompt", BOOK, "--prompt", "Once"]
    assert main(["prefill", "--model", str(tiny), *texts, "--save", store]) == 0
    assert main(["generate", "--context", store, "--prompt", "Who?"]) == 2
    assert "1 prompts after a context of 2 rows: expected 2" in capsys.readouterr().err
    asked = generated(tmp_path, "--context", store, "--prompt", " Who?", "--prompt", " more")
    whole = generate(
        load_model(tiny),
        [BOOK + " Who?", "Once more"],
        attention=METHOD,
        max_new_tokens=6,
        ignore_eos=True,
    )
    assert asked["tokens"] == whole.tokens
