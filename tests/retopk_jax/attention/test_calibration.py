"""The basis that Loki ranks in: how it is fitted, kept and refused, and the command for it."""

import dataclasses
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import load_model
from retopk_jax import cli
from retopk_jax.calibration import (
    LokiBasis,
    calibrate_loki,
    load_basis,
    model_fingerprint,
    save_basis,
)
from retopk_jax.calibration.loki import principal_components
from retopk_jax.errors import ConfigError, PromptError
from retopk_jax.prefill import prefill
from tests.retopk_jax.toy import ToyModel, toy_model
from tests.retopk_jax_cli.checkpoint import write_tiny

TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune"


@pytest.fixture(scope="module")
def model() -> ToyModel:
    return toy_model()


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def covariance_of(model: ToyModel, windows: list[list[int]]) -> np.ndarray:
    """Covariance of the cached keys, from their differences to the mean: [layers, G, D, D]."""
    layers = []
    for layer in range(2):
        caches = [prefill(model, [w], new_tokens=1, tail_queries=1).context.cache for w in windows]
        keys = np.concatenate(
            [
                np.asarray(cache.keys[layer][0, :, : len(window)], np.float64)
                for cache, window in zip(caches, windows, strict=True)
            ],
            axis=1,
        )
        layers.append([np.cov(head.T, bias=True) for head in keys])
    return np.array(layers)


def test_components_diagonalise_the_covariance_of_the_cached_keys(model, text) -> None:
    """Two whole windows of 40 tokens; the ninth part of a third is dropped."""
    progress = []
    basis = calibrate_loki(
        model, [text], window=40, progress=lambda done, total: progress.append((done, total))
    )
    tokens = model.tokenizer.encode(TEXT)
    assert 80 < len(tokens) < 120
    covariance = covariance_of(model, [tokens[:40], tokens[40:80]])
    for layer in range(2):
        for head in range(2):
            p = basis.basis[layer, head].astype(np.float64)
            np.testing.assert_allclose(p.T @ p, np.eye(16), atol=1e-6)
            variance = basis.explained_variance[layer, head]
            rotated = p.T @ covariance[layer, head] @ p
            np.testing.assert_allclose(rotated, np.diag(variance), atol=1e-5 * variance[0])
            assert (np.diff(variance) <= 0).all()
    assert progress == [(40, 80), (80, 80)]
    assert basis.provenance == {
        "format": "retopk-jax loki basis 1",
        "model": "ToyModel",
        "fingerprint": model_fingerprint(model),
        "dtype": "float32",
        "texts": [{"file": text.name, "sha256": hashlib.sha256(TEXT.encode()).hexdigest()}],
        "window": 40,
        "windows": 2,
        "tokens": 80,
        "rotary": "post",
    }


def test_a_short_text_is_one_window_and_files_are_joined(model, text, tmp_path) -> None:
    second = tmp_path / "second.txt"
    second.write_text("More of it", encoding="utf-8")
    one = calibrate_loki(model, [text])
    assert (one.provenance["windows"], one.provenance["tokens"]) == (1, len(TEXT))
    assert one.provenance["window"] == 4095  # the toy model has 4096 positions
    two = calibrate_loki(dataclasses.replace(model, tokenizer=_Joined()), [text, second])
    assert two.provenance["tokens"] == len(TEXT) + 2 + len("More of it")


class _Joined:
    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        assert text in (TEXT, TEXT + "\n\nMore of it")
        return [max(ord(c) - 32, 0) for c in text]

    def decode(self, tokens) -> str:
        raise NotImplementedError


def test_components_come_by_variance_with_a_fixed_sign() -> None:
    rng = np.random.default_rng(0)
    rotation = np.linalg.qr(rng.normal(size=(5, 5)))[0]
    spread = np.array([0.5, 3.0, 0.0, 2.0, 7.0])
    basis, variance = principal_components(rotation @ np.diag(spread) @ rotation.T)
    np.testing.assert_allclose(variance, sorted(spread, reverse=True), atol=1e-12)
    np.testing.assert_allclose(np.abs(np.sum(basis[:, 0] * rotation[:, 4])), 1, atol=1e-12)
    assert (np.take_along_axis(basis, np.abs(basis).argmax(0)[None], 0) > 0).all()


def test_rank_of_a_share() -> None:
    variance = np.array([[[6, 2, 1, 1], [4, 3, 2, 1]]], np.float32)
    basis = LokiBasis(np.zeros((1, 2, 4, 4), np.float32), variance, {})
    # Shares: .6 .8 .9 1 in the first head, .4 .7 .9 1 in the second.
    assert [basis.rank_of(x) for x in (0.3, 0.5, 0.7, 0.75, 0.9, 0.95, 1.0)] == [
        1,
        2,
        2,
        3,
        3,
        4,
        4,
    ]


# ---- the file ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted(model, tmp_path_factory) -> LokiBasis:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return calibrate_loki(model, [path])


def test_what_is_read_is_what_was_written(fitted, tmp_path) -> None:
    path = tmp_path / "toy.basis"
    save_basis(path, fitted)
    assert [p.name for p in tmp_path.iterdir()] == ["toy.basis"]
    read = load_basis(path)
    assert read.provenance == fitted.provenance
    np.testing.assert_array_equal(read.basis, fitted.basis)
    np.testing.assert_array_equal(read.explained_variance, fitted.explained_variance)
    assert read.basis.dtype == np.float32


def test_a_failed_write_leaves_the_old_file(fitted, tmp_path, monkeypatch) -> None:
    path = tmp_path / "toy.basis"
    save_basis(path, fitted)
    before = path.read_bytes()
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        save_basis(path, dataclasses.replace(fitted, provenance={}))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["toy.basis"]


@pytest.mark.parametrize("kept", [0, 10, 0.5, -1])
def test_refuses_a_truncated_file(fitted, tmp_path, kept) -> None:
    path = tmp_path / "toy.basis"
    save_basis(path, fitted)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    with pytest.raises(ConfigError, match="truncated, or not a basis"):
        load_basis(path)


def test_refuses_every_changed_byte_of_the_arrays(fitted, tmp_path) -> None:
    path = tmp_path / "toy.basis"
    save_basis(path, fitted)
    content = bytearray(path.read_bytes())
    for at in range(200, len(content) - 400, 997):
        changed = content.copy()
        changed[at] ^= 1
        path.write_bytes(changed)
        with pytest.raises(ConfigError):
            load_basis(path)


@pytest.mark.parametrize("what", ["basis", "explained_variance", "provenance"])
def test_refuses_an_edited_file(fitted, tmp_path, what) -> None:
    """Written anew by NumPy, so that the archive itself is sound."""
    path = tmp_path / "toy.basis"
    save_basis(path, fitted)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    if what == "provenance":
        edited = json.loads(str(arrays[what]))
        arrays[what] = np.array(json.dumps({**edited, "model": "another"}, sort_keys=True))
    else:
        arrays[what] = arrays[what] * np.float32(1.0001)
    with path.open("wb") as file:
        np.savez(file, **arrays)
    with pytest.raises(ConfigError, match="changed after it was written"):
        load_basis(path)


def test_refuses_what_is_no_basis(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: No such file"):
        load_basis(tmp_path / "nowhere")
    other = tmp_path / "other.npz"
    np.savez(other, x=np.zeros(3))
    with pytest.raises(ConfigError, match="not a basis"):
        load_basis(other)
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(ConfigError, match="not a basis"):
        load_basis(tmp_path / "array.npy")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ConfigError, match="not a basis"):
        load_basis(tmp_path / "text")


def test_refuses_another_models_basis(model, fitted) -> None:
    fitted.check_model(model)
    with pytest.raises(ConfigError, match="fitted on ToyModel: the weights of ToyModel are not"):
        fitted.check_model(toy_model(seed=1))
    almost = jax.tree.map(lambda x: x, model.params)
    almost["blocks"][1]["k"] = almost["blocks"][1]["k"].at[0, 0, 3].multiply(1.02)
    with pytest.raises(ConfigError, match="weights"):
        fitted.check_model(dataclasses.replace(model, params=almost))


@dataclasses.dataclass(frozen=True)
class _Stretched:
    """A decoder under another rotary embedding."""

    decoder: object

    def __getattr__(self, name: str):
        return getattr(object.__getattribute__(self, "decoder"), name)

    def inverse_frequencies(self, sequence_lengths: jax.Array) -> jax.Array:
        return self.decoder.inverse_frequencies(sequence_lengths) / 2  # type: ignore[attr-defined]


def test_refuses_another_rotary_embedding(model, fitted) -> None:
    with pytest.raises(ConfigError, match="same weights under another rotary embedding"):
        fitted.check_model(dataclasses.replace(model, decoder=_Stretched(model.decoder)))


def test_a_model_in_bfloat16_is_the_same_model(model, fitted) -> None:
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    fitted.check_model(dataclasses.replace(model, params=half))


@pytest.mark.parametrize(
    ("content", "window", "error", "words"),
    [
        (b"too short", None, PromptError, "9 tokens of text: 16 principal components"),
        (b"\xff\xfe", None, PromptError, "not UTF-8"),
        (TEXT.encode(), 15, ConfigError, "window=15: expected an integer from 16 to 4095"),
        (TEXT.encode(), 4096, ConfigError, "window=4096"),
    ],
)
def test_refuses_a_text(model, tmp_path, content, window, error, words) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(error, match=words):
        calibrate_loki(model, [path], window=window)


def test_refuses_no_text_and_no_tokenizer(model, text) -> None:
    with pytest.raises(ConfigError, match="no text"):
        calibrate_loki(model, [])
    with pytest.raises(PromptError, match="no tokenizer"):
        calibrate_loki(dataclasses.replace(model, tokenizer=None), [text])


# ---- the command line -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def run(*args) -> int:
    return cli.main([*map(str, args), "--no-compilation-cache"])


def test_calibrate_then_generate(tiny, text, tmp_path, capsys) -> None:
    basis, out = tmp_path / "tiny.basis", tmp_path / "out.json"
    options = ["--method", "loki", "--model", tiny, "--text", text, "--window", 64]
    assert run("calibrate", *options, "--out", basis) == 0
    assert "variance explained" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["text.txt", "tiny.basis"]
    load_basis(basis).check_model(load_model(tiny))
    loki = ["--model", tiny, "--attention", "loki", "--basis", basis, "--budget", 9]
    decode = ["--prompt", TEXT, "--max-new-tokens", 4, "--ignore-eos", "--json", out]
    assert run("generate", *loki, *decode, "--rank", "0.8") == 0
    report = json.loads(out.read_text())
    assert report["calibration"]["tokens"] == 64
    assert report["attention"]["rank"] == load_basis(basis).rank_of(0.8)
    assert report["attention"]["basis"].startswith("sha256:")
    assert report["tokens_attended"] == 9
    assert run("inspect", *loki, "--context", 100, "--json", out) == 0
    other = write_tiny(tmp_path / "other", tie_word_embeddings=True)
    assert run("generate", "--model", other, *loki[2:], *decode) == 2
    assert "the weights of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "retopk calibrate --method loki --model MODEL --text FILE"),
        (["--basis", "/nowhere/basis"], "/nowhere/basis: No such file"),
        (["--rank", "0.9"], "--rank 0.9 is a share of a basis's variance: give --basis"),
        (["--rank", "1.5"], "--rank 1.5"),
        (["--reallocate", "no"], "--reallocate False does not apply"),
    ],
)
def test_generate_says_what_is_missing(options, words, capsys) -> None:
    """Before a model is loaded: there is none."""
    base = ["--model", "/nowhere/model", "--attention", "loki", "--prompt", "x"]
    try:
        code = run("generate", *base, *options)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert words in capsys.readouterr().err


def test_calibrate_checks_its_files_first(tmp_path, text, capsys) -> None:
    base = ["calibrate", "--method", "loki", "--model", "/nowhere/model"]
    assert run(*base, "--text", tmp_path / "none", "--out", tmp_path / "basis") == 2
    assert "none: no such file" in capsys.readouterr().err
    assert run(*base, "--text", text, "--out", "/nowhere/basis") == 2
    assert "/nowhere does not exist" in capsys.readouterr().err
