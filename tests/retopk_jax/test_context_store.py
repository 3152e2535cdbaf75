"""Stored contexts: the same tokens afterwards, atomic saves, and refusals that say what differs."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retopk_jax import (
    CapacityError,
    ConfigError,
    Context,
    ContextError,
    Full,
    ReTopK,
    context_store,
    device_memory,
    extend,
    generate,
    load_context,
    prefill,
    remember,
    save_context,
)
from retopk_jax.decode import prime
from retopk_jax.language_model import Geometry
from tests.retopk_jax.toy import ToyModel, toy_model

RETOPK = ReTopK(budget=16, capacity=8, recall=2, window=4, tau=0.6, refresh=5)
BOOK = np.random.default_rng(0).integers(0, 97, 600).tolist()
MODEL = toy_model(layers=1)


def read(*rows: list[int], model: ToyModel = MODEL) -> Context:
    return prefill(model, rows, new_tokens=1).context


def saved(tmp_path: Path, *rows: list[int]) -> tuple[Path, Context]:
    context = read(*rows)
    save_context(tmp_path / "ctx", MODEL, context, rows, mine=[1])
    return tmp_path / "ctx", context


def array_files(store: Path) -> list[Path]:
    return [p for p in store.rglob("*") if p.is_file() and p.parent.name == "d"]


@pytest.mark.parametrize(("new_tokens", "method"), [(None, Full()), (900, RETOPK)])
def test_restored_contexts_generate_the_same_tokens(tmp_path, new_tokens, method) -> None:
    rows = [BOOK, BOOK[:5]]
    path, context = saved(tmp_path, *rows)
    stored = load_context(path, MODEL, new_tokens=new_tokens)
    assert stored.tokens == rows
    assert stored.notes == {"mine": [1]}
    assert stored.context.cache.capacity == (768 if new_tokens is None else 1536)
    for question in (None, [[1, 2, 3], [4]]):
        runs = [
            generate(MODEL, question, context=c, attention=method, max_new_tokens=9)
            for c in (context, stored.context)
        ]
        assert runs[0].tokens == runs[1].tokens
        assert [c.paths for c in runs[0].completions] == [c.paths for c in runs[1].completions]


@pytest.mark.parametrize("question", [[], [1, 2, 3], list(range(20))])
@pytest.mark.parametrize("rows", [[BOOK], [BOOK, BOOK[:5]]])
def test_recall_caches_are_stored_and_continued(tmp_path, monkeypatch, rows, question) -> None:
    context = read(*rows)
    save_context(tmp_path / "ctx", MODEL, remember(MODEL, RETOPK, context), rows)
    stored = load_context(tmp_path / "ctx", MODEL).context
    assert stored.recall is not None
    assert stored.recall.sizes == (8, 16)
    asked = [question] * len(rows)
    own, known = (extend(MODEL, c, asked, new_tokens=9).context for c in (context, stored))
    for ours, theirs in zip(*(prime(RETOPK, c) for c in (own, known)), strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    runs = [
        generate(MODEL, asked if question else None, context=c, attention=RETOPK, max_new_tokens=9)
        for c in (context, stored)
    ]
    assert runs[0].tokens == runs[1].tokens
    assert [c.paths for c in runs[0].completions] == [c.paths for c in runs[1].completions]


@pytest.mark.parametrize("asked", [0, 3, 20])
def test_known_supports_are_not_searched_again(asked) -> None:
    context = remember(MODEL, RETOPK, read(BOOK))
    assert context.recall is not None
    marked = [replace(x, supports=x.supports * 0 + 7) for x in context.recall.layers]
    context = replace(context, recall=replace(context.recall, layers=tuple(marked)))
    context = extend(MODEL, context, [list(range(asked))], new_tokens=1).context
    (state,) = prime(RETOPK, context)
    kept = max(RETOPK.capacity - asked, 0)
    sevens = (np.asarray(state.cache.supports) == 7).all(axis=(0, 1, 3))
    assert sevens.tolist() == [True] * kept + [False] * (RETOPK.capacity - kept)
    (other,) = prime(replace(RETOPK, budget=8), context)
    assert not (np.asarray(other.cache.supports) == 7).all(axis=3).any()


def test_bfloat16_is_kept(tmp_path) -> None:
    model = toy_model(layers=1, dtype="bfloat16")
    context = read(BOOK, model=model)
    save_context(tmp_path / "ctx", model, context, [BOOK])
    stored = load_context(tmp_path / "ctx", model).context
    assert stored.cache.keys[0].dtype == jnp.bfloat16
    for x, y in zip(jax.tree.leaves(stored), jax.tree.leaves(context), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_save_replaces_the_context_and_leaves_nothing_else(tmp_path) -> None:
    path, _ = saved(tmp_path, BOOK)
    saved(tmp_path, BOOK[:9])
    assert load_context(path, MODEL).tokens == [BOOK[:9]]
    assert len(list(path.iterdir())) == 2


# ---- killed half-way -----------------------------------------------------------------------

KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
from tests.retopk_jax import test_context_store as t

store, when = Path(sys.argv[1]), sys.argv[2]
context = t.read(t.BOOK[:300])

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def hook(event, args):  # the arrays are there, the description is not in place yet
    if event == "os.rename" and str(args[1]).endswith("context.json"):
        die()

def watch():
    before = len(t.array_files(store))
    while len(t.array_files(store)) <= before:
        time.sleep(1e-4)
    die()

if when == "rename":
    sys.addaudithook(hook)
else:
    threading.Thread(target=watch, daemon=True).start()
t.save_context(store, t.MODEL, context, [t.BOOK[:300]])
time.sleep(60)
"""


def test_a_killed_save_leaves_the_old_context_or_none(tmp_path) -> None:
    old, _ = saved(tmp_path, BOOK)
    none = tmp_path / "none"
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", KILLED, str(store), when],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        for store, when in ((old, "arrays"), (none, "rename"))
    ]
    assert [run.wait(120) for run in runs] == [-signal.SIGKILL] * 2
    assert len(list(old.iterdir())) > 2, "it was killed before it wrote anything"
    assert array_files(none)
    assert load_context(old, MODEL).tokens == [BOOK]
    with pytest.raises(ContextError, match="no stored context"):
        load_context(none, MODEL)
    for store in (old, none):
        save_context(store, MODEL, read(BOOK[:7]), [BOOK[:7]])
        assert load_context(store, MODEL).tokens == [BOOK[:7]]
        assert len(list(store.iterdir())) == 2


def test_a_full_disk_leaves_the_old_context(tmp_path, monkeypatch) -> None:
    path, _ = saved(tmp_path, BOOK)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(context_store, "write_json", full)
        with pytest.raises(OSError, match="No space left"):
            save_context(path, MODEL, read(BOOK[:7]), [BOOK[:7]])
    assert len(list(path.iterdir())) == 2
    assert load_context(path, MODEL).tokens == [BOOK]


# ---- refusals ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (toy_model(layers=1, seed=1), "made by a model of other weights than this one's"),
        (toy_model(layers=2), "made by a model of num_layers 1 and not 2"),
        (
            toy_model(layers=1, dtype="bfloat16"),
            "made by a model of dtype float32 and not bfloat16",
        ),
        (
            replace(MODEL, decoder=replace(MODEL.decoder, geometry=Geometry(1, 6, 3, 16))),
            "num_kv_heads 2 and not 3",
        ),
        (
            replace(MODEL, decoder=replace(MODEL.decoder, rotary_scale=1.1)),
            "rotary_scale 1.0 and not 1.1",
        ),
    ],
)
def test_another_model_is_refused(tmp_path, other, message) -> None:
    path, _ = saved(tmp_path, BOOK[:9])
    with pytest.raises(ContextError, match=message):
        load_context(path, other)


@pytest.mark.parametrize("longest", [1, 4096])
def test_other_positions_are_refused(tmp_path, longest, monkeypatch) -> None:
    """Those of rows of every length, or of long rows only."""
    path, _ = saved(tmp_path, BOOK[:9])
    same = type(MODEL.decoder).inverse_frequencies

    def slower(decoder, lengths):
        return jnp.where(lengths[:, None] < longest, same(decoder, lengths), 0.5)

    monkeypatch.setattr(type(MODEL.decoder), "inverse_frequencies", slower)
    with pytest.raises(ContextError, match=r"other positional encoding \(RoPE\)"):
        load_context(path, MODEL)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "truncated"),
        (flip, "changed after it was written"),
        (lambda file: file.unlink(), "missing"),
        (lambda file: file.with_name("more").write_bytes(b""), "unexpected"),
    ],
)
def test_damaged_arrays_are_refused(tmp_path, damage, message) -> None:
    path, _ = saved(tmp_path, BOOK[:9])
    damage(max(array_files(path), key=lambda file: file.stat().st_size))
    with pytest.raises(ContextError, match=rf"ctx: arrays-\w+/.*: {message}"):
        load_context(path, MODEL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-20], "context.json is truncated"),
        (lambda text: text.replace('"rows": 1', '"rows": 2'), "context.json was changed"),
        (lambda text: text.replace("context 2", "context 0"), "of format 'retopk-jax context 0'"),
        (lambda text: "[]", "context.json is truncated, or none of a context"),
    ],
)
def test_a_damaged_description_is_refused(tmp_path, change, message) -> None:
    path, _ = saved(tmp_path, BOOK[:9])
    text = (path / "context.json").read_text()
    assert change(text) != text
    (path / "context.json").write_text(change(text))
    with pytest.raises(ContextError, match=message):
        load_context(path, MODEL)


def test_places_that_are_no_store_are_refused(tmp_path) -> None:
    context = read(BOOK[:9])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    for name in ("other/context.json", "notes/my-context.json", "data/arrays-mine"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}")
    for path, message in (
        (tmp_path / "other", "other holds context.json"),
        (tmp_path / "notes", "notes holds my-context.json"),
        (tmp_path / "data", "data holds arrays-mine"),
        (tmp_path / "full", r"full holds mine.txt"),
        (tmp_path / "full" / "mine.txt", "is a file"),
        (tmp_path / "nowhere" / "ctx", "nowhere does not exist"),
    ):
        with pytest.raises(ConfigError, match=message):
            save_context(path, MODEL, context, [BOOK[:9]])
    with pytest.raises(ConfigError, match=r"tokens of \[8\] in rows: the context holds \[9\]"):
        save_context(tmp_path / "ctx", MODEL, context, [BOOK[:8]])
    with pytest.raises(ContextError, match="full: no stored context"):
        load_context(tmp_path / "full", MODEL)


def test_what_cannot_be_written_is_refused_before_reading(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(ConfigError, match=r"ctx: the directory .* cannot be written"):
        context_store.check_store(tmp_path / "ctx")
    (tmp_path / "ctx").mkdir()
    context_store.check_store(tmp_path / "ctx")


def test_more_tokens_than_positions_are_refused_before_loading(tmp_path, monkeypatch) -> None:
    path, _ = saved(tmp_path, BOOK[:9])
    monkeypatch.setattr(context_store, "_check_files", lambda *_: pytest.fail("read"))
    with pytest.raises(CapacityError, match=r"context of 9 .* \+ 4088 .* has 4096 positions"):
        load_context(path, MODEL, new_tokens=4088)


def test_what_does_not_fit_the_device_is_not_loaded(tmp_path, monkeypatch) -> None:
    path, _ = saved(tmp_path, BOOK)
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: 1000)
    with pytest.raises(CapacityError, match=r"ctx needs .* of keys and values .* has 1000 B free"):
        load_context(path, MODEL)
