import json
from typing import Any

import pytest
import transformers

from models import TextTokenizer, TokenizerError
from models.gguf_tokenizer import tokenizer_files
from tests.models.test_tokenizer import TEXTS, bpe

CONTROL, NORMAL, USER_DEFINED = 3, 1, 4


def metadata(pre: str, **changes: Any) -> dict[str, Any]:
    """What a GGUF with the vocabulary of `bpe` says about its tokenizer."""
    trained = json.loads(bpe().to_str())
    vocabulary: dict[str, int] = trained["model"]["vocab"]
    tokens = [*sorted(vocabulary, key=lambda token: vocabulary[token]), "<|user|>"]
    kinds = [CONTROL] * 2 + [NORMAL] * (len(tokens) - 3) + [USER_DEFINED]
    entries = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": kinds,
        "merges": [" ".join(merge) for merge in trained["model"]["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in entries.items()}


def build(entries: dict[str, Any]) -> TextTokenizer:
    tokenizer = TextTokenizer.from_files(tokenizer_files(entries, "m.gguf", 128), "m.gguf")
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_qwen2_equals_that_of_transformers(text):
    entries = metadata("qwen2")
    vocabulary = {token: i for i, token in enumerate(entries["tokenizer.ggml.tokens"])}
    merges: Any = [tuple(merge.split(" ")) for merge in entries["tokenizer.ggml.merges"]]
    end = "<|end|>"
    theirs = transformers.Qwen2Tokenizer(
        vocab=vocabulary, merges=merges, unk_token=end, eos_token=end, pad_token=end
    )
    theirs.add_special_tokens({"bos_token": "<|start|>"})
    theirs.add_tokens(["<|user|>"])
    assert build(entries).encode(text) == theirs.encode(text)


@pytest.mark.parametrize(("pre", "digits"), [("smollm", 1), ("qwen2", 1), ("llama-bpe", 3)])
def test_digits_stay_together_as_the_kind_says(pre, digits):
    backend = build(metadata(pre)).backend
    words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("a 1234567")]
    numbers = [word for word in words if word.strip("Ġ").isdigit()]
    assert max(map(len, numbers)) == digits


def test_beginning_is_marked_as_the_metadata_says():
    assert build(metadata("llama-bpe")).encode("a")[0] == 0
    assert 0 not in build(metadata("llama-bpe", add_bos_token=False)).encode("a")
    assert 0 not in build(metadata("smollm")).encode("a")
    assert build(metadata("smollm", add_bos_token=True)).encode("a").count(0) == 1


def test_control_tokens_are_special_and_user_defined_ones_are_not():
    tokenizer = build(metadata("smollm"))
    user = tokenizer.backend.token_to_id("<|user|>")
    assert user is not None
    assert tokenizer.encode("<|start|><|user|>") == [0, user]
    assert tokenizer.decode([0, user, 1]) == "<|user|>"


def test_every_end_is_in_the_generation_config():
    files = tokenizer_files(metadata("smollm", eot_token_id=0), "m.gguf", 128)
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [0, 1]


def test_metadata_without_a_tokenizer_gives_none():
    assert set(tokenizer_files({}, "m.gguf", 128)) == {"generation_config.json"}


@pytest.mark.parametrize(
    ("changes", "culprits"),
    [
        ({"pre": "deepseek-llm"}, ["pre", "'deepseek-llm'", "smollm, qwen2, llama-bpe"]),
        ({"model": "llama"}, ["tokenizer.ggml.model", "'llama'", "gpt2"]),
    ],
)
def test_other_kinds_are_refused(changes, culprits):
    with pytest.raises(TokenizerError) as error:
        tokenizer_files(metadata(**{"pre": "smollm", **changes}), "m.gguf", 128)
    for culprit in ["m.gguf", *culprits]:
        assert culprit in str(error.value)
