"""The tokenizer in GGUF metadata, as the files of a Hugging Face directory."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from .errors import TokenizerError
from .tokenizer import GENERATION_CONFIG, TOKENIZER_CONFIG, TOKENIZER_JSON

_CONTROL, _USER_DEFINED = 3, 4

# Words, runs of digits, punctuation and line breaks, as the Llama 3 and Qwen2 tokenizers split
# them; they differ in how many digits stay together.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_files(metadata: Mapping[str, Any], source: str, max_length: int) -> dict[str, str]:
    """Text of ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json``.

    Args:
        metadata: of the GGUF.
        source: its name, for messages.
        max_length: ``model_max_length`` to state.

    Returns:
        The files by name; without ``tokenizer.json`` if the metadata holds no tokenizer.

    Raises:
        TokenizerError: a tokenizer of an unsupported kind; lists the supported ones.
    """
    get = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    ends = {get[key] for key in ("eos_token_id", "eot_token_id", "eom_token_id") if key in get}
    generation = {"bos_token_id": get.get("bos_token_id"), "eos_token_id": sorted(ends)}
    files = {GENERATION_CONFIG: json.dumps(generation, indent=2)}
    if "tokens" not in get:
        return files
    if get.get("model") != "gpt2":
        raise TokenizerError(
            f"{source}: tokenizer.ggml.model is {get.get('model')!r}; "
            "only 'gpt2' (byte-level BPE) is supported"
        )
    if get.get("pre") not in _PRE_TOKENIZERS:
        raise TokenizerError(
            f"{source}: tokenizer.ggml.pre is {get.get('pre')!r}; "
            f"supported are {', '.join(_PRE_TOKENIZERS)}"
        )
    tokens: list[str] = get["tokens"]

    def text(name: str) -> str | None:
        index = get.get(f"{name}_token_id")
        return None if index is None else tokens[index]

    add_bos = bool(get.get("add_bos_token", get["pre"] == "llama-bpe"))
    backend = _build(get, tokens, text("bos") if add_bos else None)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "bos_token": text("bos"),
        "eos_token": text("eos"),
        "unk_token": text("unknown"),
        "pad_token": text("padding"),
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata.get("tokenizer.chat_template"),
    }
    files[TOKENIZER_JSON] = backend.to_str()
    files[TOKENIZER_CONFIG] = json.dumps(
        {key: value for key, value in config.items() if value is not None},
        indent=2,
        ensure_ascii=False,
    )
    return files


def _build(get: Mapping[str, Any], tokens: list[str], bos: str | None) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    left_right = (merge.split(" ") for merge in get["merges"])
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for left, right in left_right],
            ignore_merges=get["pre"] == "llama-bpe",
        )
    )
    _PRE_TOKENIZERS[get["pre"]](backend)
    backend.decoder = decoders.ByteLevel()
    kinds = get.get("token_type", ())
    for index, kind in enumerate(kinds):
        if kind == _CONTROL:
            backend.add_special_tokens([AddedToken(tokens[index], normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            backend.add_tokens([AddedToken(tokens[index], normalized=False)])
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, vocabulary[bos])],
        )
    return backend


def _smollm(backend: Tokenizer) -> None:
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _qwen2(backend: Tokenizer) -> None:
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _split_then_bytes(r"\p{N}")


def _llama3(backend: Tokenizer) -> None:
    backend.pre_tokenizer = _split_then_bytes(r"\p{N}{1,3}")


def _split_then_bytes(digits: str) -> pre_tokenizers.PreTokenizer:
    pattern = Regex(_SPLIT.replace("DIGITS", digits))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS: dict[str, Callable[[Tokenizer], None]] = {
    "smollm": _smollm,
    "qwen2": _qwen2,
    "llama-bpe": _llama3,
}
