import json

import pytest
import transformers

from models import ConfigError, ModelConfig, parameter_bytes, parameter_count, with_rope
from tests.models.checkpoints import LLAMA, QWEN2

BASE = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def parse(**changes) -> ModelConfig:
    entries = {**BASE, **changes}
    return ModelConfig.from_hf({key: value for key, value in entries.items() if value != "absent"})


def test_reads_what_transformers_writes(tmp_path):
    written = transformers.Qwen2Config(
        **QWEN2, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    )
    written.save_pretrained(tmp_path)
    config = ModelConfig.from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, False, False)
    assert (config.rope.rope_type, config.rope.theta, config.rope.factor) == ("linear", 5e5, 2.0)
    assert config.head_dim == QWEN2["hidden_size"] // QWEN2["num_attention_heads"]
    assert config.eos_token_ids == {2}


def test_both_layouts_of_rope_entries_read_alike():
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32}
    new = parse(rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, **scaling})
    old = parse(rope_theta=1e6, rope_scaling={"rope_type": "yarn", **scaling})
    oldest = parse(rope_theta=1e6, rope_scaling={"type": "yarn", **scaling})
    assert new == old == oldest
    assert hash(new) == hash(old)
    assert new.rope.factor == 4


def test_defaults_are_those_of_the_format():
    config = parse(num_key_value_heads="absent")
    assert config.num_kv_heads == 6
    assert config.head_dim == 4
    assert config.rope.theta == 10_000
    assert not config.tied
    assert config.eos_token_ids == frozenset()


def test_llama_biases_come_from_the_config():
    config = parse(attention_bias=True, mlp_bias=True)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, True, True)


def test_unused_sliding_window_is_accepted():
    assert parse(model_type="qwen2", use_sliding_window=False, sliding_window=4096).qkv_bias


def test_dual_chunk_attention_is_noted_with_its_limit():
    dual = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
    config = parse(model_type="qwen2", dual_chunk_attention_config=dual)
    assert config.exact_positions == 253_952
    assert any("253952" in note for note in config.notes)
    assert parse().notes == ()


@pytest.mark.parametrize(
    ("changes", "culprits"),
    [
        ({"model_type": "mistral"}, ["model_type", "'mistral'", "llama, qwen2"]),
        ({"model_type": "absent"}, ["model_type", "None"]),
        ({"hidden_size": "absent"}, ["hidden_size"]),
        ({"rms_norm_eps": "absent"}, ["rms_norm_eps"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0", "positive"]),
        ({"vocab_size": "many"}, ["vocab_size", "'many'", "integer"]),
        ({"num_key_value_heads": 4}, ["num_attention_heads", "6", "num_key_value_heads", "4"]),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, ["hidden_size", "24", "7"]),
        ({"head_dim": 5}, ["head_dim", "5", "even"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "silu"]),
        ({"model_type": "qwen2", "use_sliding_window": True}, ["use_sliding_window", "full"]),
        ({"layer_types": ["sliding_attention"] * 2}, ["layer_types", "sliding_attention"]),
        ({"sliding_window": 512}, ["sliding_window", "512"]),
        ({"num_experts": 8}, ["num_experts", "8", "mixture-of-experts"]),
        ({"num_local_experts": 4}, ["num_local_experts", "4"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config", "GGUF"]),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, ["rope_type", "longrope", "yarn"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["linear", "factor"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, ["factor", "0.5", "1"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, ["factor", "'2'", "number"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ["llama3", "low_freq_factor"]),
        ({"rope_scaling": ["yarn"]}, ["RoPE", "yarn", "object"]),
        ({"rope_theta": -1.0}, ["rope_theta", "-1"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "'</s>'"]),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, ["dual_chunk", "local_size"]),
    ],
)
def test_bad_configs_are_refused_by_name(changes, culprits):
    with pytest.raises(ConfigError) as error:
        parse(**changes)
    for culprit in culprits:
        assert culprit in str(error.value)


def test_with_rope_extends_the_unextended_length():
    config = parse()
    extended = with_rope(config, "yarn", 2.0)
    assert extended.max_positions == 256
    assert with_rope(extended, "linear", 4.0).max_positions == 512
    assert with_rope(extended, "dynamic", 3.0).max_positions == 384
    assert with_rope(config, "llama3", 8.0).max_positions == 1024
    assert with_rope(extended, "default", 1.0) == config
    assert with_rope(config, "default", 1.0, theta=4e5).rope.theta == 4e5
    with pytest.raises(ConfigError, match="longrope"):
        with_rope(config, "longrope", 2.0)


def test_with_rope_equals_the_same_entries_in_a_config():
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
    assert with_rope(parse(), "yarn", 2.0) == parse(rope_scaling=scaling)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_parameters_are_counted_without_weights(family, tied):
    if family == "llama":
        theirs = transformers.LlamaConfig(**LLAMA, tie_word_embeddings=tied, attention_bias=True)
    else:
        theirs = transformers.Qwen2Config(**QWEN2, tie_word_embeddings=tied)
    config = ModelConfig.from_hf(theirs.to_dict())
    expected = transformers.AutoModelForCausalLM.from_config(theirs).num_parameters()
    assert parameter_count(config) == expected
    assert parameter_bytes(config, "bfloat16") == 2 * expected
