"""Texts and records from files, documents cut from them, and items that resume."""

import json

import numpy as np
import pytest

from benchmarks.evidence.documents import (
    Documents,
    cut_documents,
    load_documents,
    save_documents,
    token_hash,
)
from benchmarks.evidence.resume import Store
from benchmarks.evidence.smoke_model import byte_tokenizer
from benchmarks.evidence.texts import BadItems, Text, read_records, read_texts
from benchmarks.longbench import FIELDS
from retopk_jax.errors import ConfigError

TOKENIZER = byte_tokenizer()


def write_texts(directory):
    (directory / "good.txt").write_text("Once upon a time", encoding="utf-8")
    (directory / "latin.txt").write_bytes("déjà".encode("latin-1"))
    (directory / "blank.txt").write_text(" \n", encoding="utf-8")
    return directory


def test_unusable_texts_are_named_and_skipped(tmp_path, capsys):
    bad = BadItems("skip")
    texts = read_texts(write_texts(tmp_path), bad)
    assert [text.name for text in texts] == ["good"]
    assert bad.skipped == [
        {"name": "blank.txt", "reason": "empty"},
        {"name": "latin.txt", "reason": "not UTF-8 at byte 1"},
    ]
    assert "latin.txt" in capsys.readouterr().err


def test_unusable_texts_are_refused_where_that_is_wanted(tmp_path):
    with pytest.raises(ConfigError, match=r"blank\.txt: empty"):
        read_texts(write_texts(tmp_path), BadItems("refuse"))


def test_records_without_what_is_needed_are_named(tmp_path):
    good = {"input": "q", "context": "{c}", "answers": ["a"], "dataset": "hotpotqa"}
    lines = [
        json.dumps(good).encode(),
        json.dumps({**good, "answers": []}).encode(),
        json.dumps({k: v for k, v in good.items() if k != "context"}).encode(),
        b"{",
        b"\xff",
        b"[1]",
        json.dumps({**good, "dataset": "other"}).encode(),
    ]
    path = tmp_path / "set.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    bad = BadItems("skip")
    assert read_records(path, FIELDS, bad) == [good]
    assert [item["name"] for item in bad.skipped] == [f"set.jsonl, line {n}" for n in range(2, 8)]
    reasons = " | ".join(item["reason"] for item in bad.skipped)
    for reason in ("answers is not a list", "context is missing", "not JSON", "not UTF-8"):
        assert reason in reasons
    with pytest.raises(ConfigError, match="line 2: answers"):
        read_records(path, FIELDS, BadItems("refuse"))


def cut(count, seed=0, length=10, bad=None):
    texts = [
        Text("a", "abcdefghijklmnopqrstuvwxyz" * 2),
        Text("b", "0123456789" * 3),
        Text("c", "x"),
    ]
    return cut_documents(
        texts,
        TOKENIZER,
        length=length,
        count=count,
        seed=seed,
        source="here",
        bad=bad or BadItems("skip"),
    )


def test_documents_are_windows_that_do_not_overlap():
    bad = BadItems("skip")
    documents = cut(8, bad=bad)
    assert bad.skipped == [{"name": "c", "reason": "1 tokens, and 10 are needed"}]
    assert {name[0] for name in documents.names[:2]} == {"a", "b"}  # one of each text first
    covered = set()
    for name, tokens in zip(documents.names, documents.tokens, strict=True):
        text, _, start = name.partition("@")
        whole = "abcdefghijklmnopqrstuvwxyz" * 2 if text == "a" else "0123456789" * 3
        assert TOKENIZER.decode(tokens.tolist()) == whole[int(start) : int(start) + 10]
        span = {(text, int(start) + i) for i in range(10)}
        assert not span & covered
        covered |= span


def test_documents_depend_on_the_seed_alone():
    assert token_hash(cut(5).tokens) == token_hash(cut(5).tokens)
    assert cut(5).names != cut(5, seed=1).names
    np.testing.assert_array_equal(cut(3).tokens, cut(5).tokens[:3])


def test_too_few_documents_are_refused():
    with pytest.raises(ConfigError, match="holds 8 documents of 10 tokens: 9 are wanted"):
        cut(9)
    with pytest.raises(ConfigError, match="a: 52 tokens, and 60 are needed"):
        cut(1, length=60, bad=BadItems("refuse"))


def test_all_lengths_end_at_the_same_token():
    documents = cut(2)
    np.testing.assert_array_equal(documents.ending(4), documents.tokens[:, 6:])
    with pytest.raises(ConfigError, match="11 tokens wanted: these have 10"):
        documents.ending(11)


def test_documents_survive_their_file(tmp_path):
    documents = cut(4)
    save_documents(tmp_path / "d.npz", documents)
    loaded = load_documents(tmp_path / "d.npz", TOKENIZER)
    np.testing.assert_array_equal(loaded.tokens, documents.tokens)
    assert (loaded.names, loaded.source) == (documents.names, "here")


def test_documents_of_another_tokenizer_are_refused(tmp_path):
    documents = cut(4)
    other = Documents(documents.names, documents.tokens, "0" * 64, "here")
    save_documents(tmp_path / "d.npz", other)
    with pytest.raises(ConfigError, match="another tokenizer"):
        load_documents(tmp_path / "d.npz", TOKENIZER)
    (tmp_path / "e.npz").write_text("no")
    with pytest.raises(ConfigError, match="not documents"):
        load_documents(tmp_path / "e.npz", TOKENIZER)


def test_items_come_back_only_to_the_run_that_saved_them(tmp_path):
    store = Store(tmp_path, "run", {"seed": 0}, {"x": {"budget": 1}})
    store.save(store.key("doc 1", "x"), {"nll": 1.5})
    again = Store(tmp_path, "run", {"seed": 0}, {"x": {"budget": 1}})
    assert again.load(again.key("doc 1", "x")) == {"nll": 1.5}
    assert again.load(again.key("doc 2", "x")) is None
    changed = Store(tmp_path, "run", {"seed": 0}, {"x": {"budget": 2}})
    assert changed.load(changed.key("doc 1", "x")) is None
    other = Store(tmp_path, "run", {"seed": 1}, {"x": {"budget": 1}})
    assert other.load(other.key("doc 1", "x")) is None


def test_a_damaged_item_is_named(tmp_path):
    store = Store(tmp_path, "run", {})
    store.save("k", {})
    (path,) = (tmp_path / "items").glob("*/*.json")
    path.write_text("{")
    with pytest.raises(ConfigError, match=rf"{path.name} is damaged"):
        store.load("k")
