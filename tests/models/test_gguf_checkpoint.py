import re
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from models import CheckpointError, ConfigError, ModelError, Rope, load_model, read_config
from models.weights import parameter_paths, tensor_name
from tests.models.checkpoints import write_random
from tests.models.dense import dense_logits
from tests.models.gguf_files import write_gguf

F32, F16, Q8_0 = (
    gguf.GGMLQuantizationType.F32,
    gguf.GGMLQuantizationType.F16,
    gguf.GGMLQuantizationType.Q8_0,
)
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
"""Sizes that hold whole blocks of 32 quantised values."""


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [F32, F16, Q8_0], ids=["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_weights_are_the_dequantised_ones_in_hugging_face_order(tmp_path, family, kind, tied):
    reference = write_random(tmp_path / "hf", family, tie_word_embeddings=tied, **WIDE)
    path = tmp_path / "model.gguf"
    written = write_gguf(path, reference, kind)
    model = load_model(path, dtype="float32")
    assert model.config.tied == tied
    flat = parameter_paths(model.params)
    assert {tensor_name(name) for name in flat} == set(written)
    for name, leaf in flat.items():
        expected = written[tensor_name(name)]
        np.testing.assert_array_equal(leaf.T if name.endswith("kernel") else leaf, expected)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_equal_those_of_the_hugging_face_directory(tmp_path, family):
    reference = write_random(tmp_path / "hf", family, **WIDE)
    write_gguf(tmp_path / "model.gguf", reference)
    tokens = np.arange(12, dtype=np.int32)[None] * 5 % 61
    logits = dense_logits(load_model(tmp_path / "model.gguf"), jnp.asarray(tokens))
    with torch.no_grad():
        expected = reference(torch.tensor(tokens)).logits.numpy()
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


def test_config_equals_that_of_the_hugging_face_directory(tmp_path):
    reference = write_random(tmp_path / "hf", "qwen2", rms_norm_eps=1e-6)
    write_gguf(tmp_path / "a.gguf", reference, tokenizer__ggml__eos_token_id=2)
    assert read_config(tmp_path / "a.gguf") == read_config(tmp_path / "hf")


def test_llama_biases_are_reordered_with_their_rows(tmp_path):
    reference = write_random(tmp_path / "hf", attention_bias=True, mlp_bias=True, **WIDE)
    written = write_gguf(tmp_path / "model.gguf", reference)
    bias = load_model(tmp_path / "model.gguf").params["layers"][1]["self_attn"]["q_proj"]["bias"]
    np.testing.assert_array_equal(bias, written["model.layers.1.self_attn.q_proj.bias"])


def test_yarn_scaling_is_read(tmp_path):
    reference = write_random(tmp_path / "hf")
    write_gguf(
        tmp_path / "model.gguf",
        reference,
        architecture__rope__scaling__type="yarn",
        architecture__rope__scaling__factor=4.0,
        architecture__rope__scaling__original_context_length=16384,
    )
    rope = read_config(tmp_path / "model.gguf").rope
    assert (rope.rope_type, rope.factor, rope.original_max_positions) == ("yarn", 4.0, 16384)


def llama3_divisors(factor: float) -> np.ndarray:
    plain, scaled = (
        Rope(kind, 10_000.0, 16, 65536, 8192, factor=factor).inverse_frequencies()
        for kind in ("default", "llama3")
    )
    return plain / scaled


def test_llama3_scaling_is_recognised_from_its_divisors(tmp_path):
    reference = write_random(tmp_path / "hf")
    divisors = llama3_divisors(32.0)
    assert divisors.min() == 1 < divisors[-2] < divisors[-1] == 32
    path = tmp_path / "model.gguf"
    write_gguf(path, reference, extra_tensors={"rope_freqs.weight": divisors})
    rope = read_config(tmp_path / "model.gguf").rope
    assert (rope.rope_type, rope.factor, rope.original_max_positions) == ("llama3", 32.0, 8192)


def test_other_divisors_are_refused(tmp_path):
    reference = write_random(tmp_path / "hf")
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    write_gguf(tmp_path / "m.gguf", reference, extra_tensors={"rope_freqs.weight": divisors})
    with pytest.raises(ConfigError, match=r"m\.gguf: rope_freqs\.weight is not a llama3 scaling"):
        read_config(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("metadata", "culprits"),
    [
        ({"general__architecture": "gemma"}, ["general.architecture", "'gemma'", "llama, qwen2"]),
        ({"architecture__expert_count": 8}, ["llama.expert_count", "8", "mixture-of-experts"]),
        ({"architecture__attention__sliding_window": 64}, ["sliding_window", "64"]),
        ({"architecture__rope__dimension_count": 8}, ["llama.rope.dimension_count", "8", "16"]),
        ({"architecture__block_count": None}, ["llama.block_count"]),
        ({"architecture__rope__scaling__type": "longrope",
          "architecture__rope__scaling__factor": 2.0}, ["rope_type", "longrope"]),
        ({"architecture__rope__scaling__type": "linear"}, ["llama.rope.scaling.factor"]),
    ],
)  # fmt: skip
def test_unsupported_metadata_is_named(tmp_path, metadata, culprits):
    path = tmp_path / "model.gguf"
    write_gguf(path, write_random(tmp_path / "hf"), **metadata)
    for read in (read_config, load_model):
        with pytest.raises(ModelError) as error:
            read(path)
        for culprit in [str(path), *culprits]:
            assert culprit in str(error.value)


def test_tensors_that_do_not_match_are_listed(tmp_path):
    path = tmp_path / "model.gguf"
    reference = write_random(tmp_path / "hf")
    extra = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    write_gguf(path, reference, extra_tensors=extra, architecture__feed_forward_length=47)
    with pytest.raises(CheckpointError) as error:
        load_model(path)
    for part in (
        "1 unexpected: blk.0.attn_sinks",
        "gate_proj.weight is [48, 32], expected [47, 32]",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize("kept", [5, 100, 3000])
def test_truncated_file_is_named(tmp_path, kept):
    path = tmp_path / "model.gguf"
    write_gguf(path, write_random(tmp_path / "hf"))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=f"{re.escape(str(path))}: not a readable GGUF file"):
        load_model(path)
