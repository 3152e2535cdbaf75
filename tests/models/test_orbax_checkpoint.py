import errno
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from models import CheckpointError, convert, load_model, read_config
from tests.models.checkpoints import edit_json, write_random
from tests.models.gguf_files import write_gguf
from tests.models.test_gguf_checkpoint import Q8_0, WIDE
from tests.models.test_tokenizer import write_tokenizer


@pytest.fixture
def source(tmp_path):
    write_random(tmp_path / "hf", "qwen2")
    write_tokenizer(tmp_path / "hf")
    return tmp_path / "hf"


def assert_same_model(first, second):
    assert first.decoder == second.decoder
    assert first.eos_token_ids == second.eos_token_ids
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)
    assert jax.tree.structure(first.params) == jax.tree.structure(second.params)


def test_converted_directory_loads_bit_for_bit(source, tmp_path):
    convert(source, tmp_path / "out")
    before, after = load_model(source), load_model(tmp_path / "out")
    assert_same_model(before, after)
    assert read_config(tmp_path / "out") == before.config
    text = "Hello <|end|> world"
    assert after.require_tokenizer().encode(text) == before.require_tokenizer().encode(text)


def test_gguf_converts_bit_for_bit(tmp_path):
    reference = write_random(tmp_path / "hf", tie_word_embeddings=True, **WIDE)
    write_gguf(tmp_path / "m.gguf", reference, Q8_0, tokenizer__ggml__eos_token_id=7)
    convert(str(tmp_path / "m.gguf"), str(tmp_path / "out"))
    assert_same_model(load_model(tmp_path / "m.gguf"), load_model(tmp_path / "out"))
    assert load_model(tmp_path / "out").eos_token_ids == {7}


def test_dtype_is_kept_or_as_asked(source, tmp_path):
    write_random(tmp_path / "half").bfloat16().save_pretrained(tmp_path / "half")
    convert(tmp_path / "half", tmp_path / "kept")
    convert(source, tmp_path / "asked", dtype="float16")
    convert(tmp_path / "kept", tmp_path / "again")
    with ocp.StandardCheckpointer() as checkpointer:
        trees = {
            name: checkpointer.metadata(tmp_path / name / "params").item_metadata.tree
            for name in ("kept", "asked", "again")
        }
    stored = {name: jax.tree.leaves(tree)[0].dtype for name, tree in trees.items()}
    assert stored == {"kept": "bfloat16", "asked": "float16", "again": "bfloat16"}
    assert load_model(tmp_path / "kept").decoder.dtype == jnp.float32
    assert_same_model(
        load_model(tmp_path / "kept", dtype="bfloat16"),
        load_model(tmp_path / "half", dtype="bfloat16"),
    )


def test_sharding_is_as_asked(source, tmp_path):
    convert(source, tmp_path / "out")
    sharding = jax.sharding.NamedSharding(jax.make_mesh((1,), ("x",)), jax.sharding.PartitionSpec())
    for where in (sharding, lambda path, shape: sharding):
        model = load_model(tmp_path / "out", sharding=where)
        assert {leaf.sharding for leaf in jax.tree.leaves(model.params)} == {sharding}


def test_existing_target_is_refused_and_untouched(source, tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine.txt").write_text("keep")
    with pytest.raises(CheckpointError, match=f"{target}: exists already"):
        convert(source, target)
    assert [path.name for path in target.iterdir()] == ["mine.txt"]
    with pytest.raises(CheckpointError, match="exists already"):
        convert("no such source", target)


def test_missing_parent_is_named(source, tmp_path):
    with pytest.raises(CheckpointError, match="nowhere is not a directory"):
        convert(source, tmp_path / "nowhere" / "out")


def full_disk(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("owner", "name"),
    [(ocp.StandardCheckpointer, "save"), (Path, "write_text"), (Path, "rename")],
)
def test_failure_leaves_nothing(source, tmp_path, monkeypatch, owner, name):
    before = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full_disk)
        with pytest.raises(OSError, match="No space left"):
            convert(source, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before
    convert(source, tmp_path / "out")
    assert_same_model(load_model(source), load_model(tmp_path / "out"))


def test_interrupt_leaves_nothing(source, tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupt)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_config_that_does_not_match_is_reported(source, tmp_path):
    convert(source, tmp_path / "out")
    edit_json(tmp_path / "out" / "config.json", intermediate_size=47)
    with pytest.raises(CheckpointError, match=r"out: .*gate_proj\.kernel is \[64, 48\]"):
        load_model(tmp_path / "out")


def test_damaged_parameters_are_reported(source, tmp_path):
    convert(source, tmp_path / "out")
    for path in (tmp_path / "out" / "params").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.unlink()
    with pytest.raises(CheckpointError, match="out: parameters are damaged"):
        load_model(tmp_path / "out")


def test_missing_config_is_reported(source, tmp_path):
    convert(source, tmp_path / "out")
    (tmp_path / "out" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"out: has no config\.json"):
        load_model(tmp_path / "out")
    assert json.loads((source / "config.json").read_text())["model_type"] == "qwen2"
    shutil.copy(source / "config.json", tmp_path / "out")
    assert_same_model(load_model(source), load_model(tmp_path / "out"))
