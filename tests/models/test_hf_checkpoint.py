import json
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models import CheckpointError, ConfigError, ModelError, load_model, read_config
from models.weights import parameter_paths
from tests.models.checkpoints import edit_json, write_random


def edit_tensors(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_weights_are_the_stored_ones(tmp_path, stored):
    reference = write_random(tmp_path).to(getattr(torch, stored))
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="float32")
    tensors = {name: tensor.float().numpy() for name, tensor in reference.state_dict().items()}
    flat = parameter_paths(model.params)
    assert len(flat) == len(tensors)
    np.testing.assert_array_equal(
        flat["layers.1.self_attn.k_proj.kernel"],
        tensors["model.layers.1.self_attn.k_proj.weight"].T,
    )
    np.testing.assert_array_equal(
        flat["embed_tokens.embedding"], tensors["model.embed_tokens.weight"]
    )
    np.testing.assert_array_equal(flat["norm.scale"], tensors["model.norm.weight"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_and_sharding_are_as_asked(tmp_path, dtype):
    write_random(tmp_path)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    asked = []

    def rule(path, shape):
        asked.append((path, shape))
        return sharding

    for where in (None, sharding, rule):
        model = load_model(tmp_path, dtype=dtype, sharding=where)
        assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype(dtype)}
        assert model.decoder.dtype == jnp.dtype(dtype)
    assert ("layers.0.self_attn.k_proj.kernel", (32, 32)) in asked
    assert model.parameter_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))


def test_default_dtype_on_cpu_is_float32(tmp_path):
    write_random(tmp_path)
    assert load_model(tmp_path).decoder.dtype == jnp.float32


def test_shards_load_as_one_file_does(tmp_path):
    write_random(tmp_path / "one")
    write_random(tmp_path / "many", shard_size="10KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = (load_model(tmp_path / name) for name in ("one", "many"))
    jax.tree.map(np.testing.assert_array_equal, one.params, many.params)


def test_all_mismatches_are_listed_at_once(tmp_path):
    write_random(tmp_path)

    def change(tensors):
        del tensors["model.norm.weight"]
        del tensors["lm_head.weight"]
        tensors["model.layers.0.mlp.extra.weight"] = torch.zeros(2)
        tensors["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(64, 31)

    edit_tensors(tmp_path, change)
    with pytest.raises(CheckpointError) as error:
        load_model(tmp_path)
    message = str(error.value)
    for part in (
        str(tmp_path),
        "2 missing",
        "model.norm.weight",
        "lm_head.weight",
        "1 unexpected: model.layers.0.mlp.extra.weight",
        "model.layers.1.self_attn.q_proj.weight is [64, 31], expected [64, 32]",
    ):
        assert part in message


def test_bias_that_the_config_does_not_name_is_unexpected(tmp_path):
    write_random(tmp_path, attention_bias=True)
    edit_json(tmp_path / "config.json", attention_bias=False)
    with pytest.raises(CheckpointError, match=r"8 unexpected: .*q_proj\.bias"):
        load_model(tmp_path)


def test_long_lists_are_cut_with_a_count(tmp_path):
    write_random(tmp_path)
    edit_json(tmp_path / "config.json", num_hidden_layers=4)
    with pytest.raises(CheckpointError, match=r"18 missing: .*; and 10 more"):
        load_model(tmp_path)


def test_harmless_extras_are_noted(tmp_path):
    write_random(tmp_path, tie_word_embeddings=True)
    plain = load_model(tmp_path)

    def change(tensors):
        tensors["lm_head.weight"] = torch.zeros(61, 32)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    edit_tensors(tmp_path, change)
    model = load_model(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, model.params, plain.params)
    text = "\n".join(model.notes)
    assert "lm_head.weight ignored; tie_word_embeddings is true" in text
    assert "rotary_emb.inv_freq ignored" in text


def test_missing_tokenizer_is_an_error_only_where_text_is_needed(tmp_path):
    write_random(tmp_path)
    model = load_model(tmp_path)
    assert model.tokenizer is None
    assert any("tokenizer.json" in note for note in model.notes)
    with pytest.raises(ModelError, match=f"{re.escape(str(tmp_path))}.*tokenizer.json"):
        model.require_tokenizer()


def truncate(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def cut_header(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:40])


def not_safetensors(directory):
    (directory / "model.safetensors").write_bytes(b"PK\x03\x04 a torch zip file, perhaps" * 9)


def integer_tensor(directory):
    edit_tensors(directory, lambda t: t.update({"model.norm.weight": torch.zeros(32).int()}))


def index_of(directory, change):
    names = list(load_file(directory / "model.safetensors"))
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    index = {"weight_map": dict.fromkeys(names, "a.safetensors")}
    change(index)
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def missing_shard(directory):
    index_of(directory, lambda i: i["weight_map"].update({"model.norm.weight": "b.safetensors"}))


def tensor_not_in_its_shard(directory):
    index_of(directory, lambda i: i["weight_map"].update({"model.other.weight": "a.safetensors"}))


def shard_outside(directory):
    index_of(directory, lambda i: i["weight_map"].update({"x": "../a.safetensors"}))


def index_without_map(directory):
    index_of(directory, lambda i: i.clear())


def index_not_json(directory):
    (directory / "model.safetensors.index.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "culprits"),
    [
        (truncate, ["model.safetensors", "not a readable safetensors file"]),
        (cut_header, ["model.safetensors", "not a readable safetensors file"]),
        (not_safetensors, ["model.safetensors", "not a readable safetensors file"]),
        (integer_tensor, ["model.norm.weight", "I32", "F32, BF16, F16"]),
        (missing_shard, ["index.json", "b.safetensors", "does not exist"]),
        (tensor_not_in_its_shard, ["index.json", "a.safetensors", "model.other.weight"]),
        (shard_outside, ["index.json", "'../a.safetensors'", "not a file name"]),
        (index_without_map, ["index.json", "weight_map"]),
        (index_not_json, ["index.json", "not readable as JSON"]),
        (lambda d: (d / "model.safetensors").unlink(), ["neither model.safetensors nor"]),
        (lambda d: (d / "config.json").unlink(), ["config.json", "has no"]),
        (lambda d: (d / "config.json").write_text("nope"), ["config.json", "JSON"]),
        (lambda d: (d / "config.json").write_text("[]"), ["config.json", "list"]),
        (lambda d: (d / "tokenizer.json").write_text("{}"), ["tokenizer.json", "malformed"]),
        (
            lambda d: (d / "generation_config.json").write_text("{]"),
            ["generation_config.json", "JSON"],
        ),
        (lambda d: (d / "tokenizer.json").write_bytes(b"\xff\xfe\xff"), ["tokenizer.json", "text"]),
    ],
)
def test_damage_is_named(tmp_path, damage, culprits):
    write_random(tmp_path)
    damage(tmp_path)
    with pytest.raises(ModelError) as error:
        load_model(tmp_path)
    for culprit in [str(tmp_path), *culprits]:
        assert culprit in str(error.value)


def test_unsupported_config_names_the_source(tmp_path):
    write_random(tmp_path)
    edit_json(tmp_path / "config.json", model_type="gemma")
    for read in (load_model, read_config):
        with pytest.raises(ConfigError, match=f"{re.escape(str(tmp_path))}.*gemma.*llama, qwen2"):
            read(tmp_path)


def test_read_config_needs_no_weights(tmp_path):
    write_random(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert read_config(tmp_path).num_layers == 2


def test_eos_is_the_union_of_generation_config_and_config(tmp_path):
    write_random(tmp_path)
    edit_json(tmp_path / "generation_config.json", eos_token_id=[5, 6])
    assert load_model(tmp_path).eos_token_ids == {2, 5, 6}


HOST_PEAK = """
import sys, tracemalloc
from models import load_model
load_model(sys.argv[2])  # what is imported and compiled once
tracemalloc.start()
model = load_model(sys.argv[1])
print(tracemalloc.get_traced_memory()[1], model.parameter_bytes)
"""


def test_host_memory_stays_near_one_tensor(tmp_path):
    # Python's allocator sees the tensors as they are read, not the parameters JAX holds.
    wide: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12}
    write_random(tmp_path / "wide", **wide, shard_size="2MB")
    write_random(tmp_path / "small")
    arguments = [sys.executable, "-c", HOST_PEAK, tmp_path / "wide", tmp_path / "small"]
    result = subprocess.run(arguments, capture_output=True, text=True, check=True)
    peak, total = (int(number) for number in result.stdout.split())
    tensor = 256 * 1024 * 4
    assert total > 30 * tensor
    assert tensor < peak < 6 * tensor
