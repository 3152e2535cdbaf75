import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from models import ChatTemplateError, TextTokenizer, TokenizerError
from models.tokenizer import TOKENIZER_FILES, eos_ids

CORPUS = [
    "Hello world, the naïve café costs 12€ — 世界 🙂 the the world",
    "  two  spaces\n\ttab",
] * 3
TEXTS = [
    "",
    "Hello world",
    " leading and trailing ",
    "naïve café — 世界 🙂👩‍👩‍👧",
    "1234567 12.5€\r\n\n\tx",
    "<|end|>in the<|start|>middle",
    "it's we'll I'M",
]


def bpe() -> Tokenizer:
    """Byte-level BPE with a few merges, special tokens 0 and 1, and an ordinary added token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<|user|>", normalized=False)])
    return tokenizer


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 0)]
    )
    return tokenizer


def write_tokenizer(directory: Path, tokenizer: Tokenizer | None = None, **config: Any) -> None:
    directory.mkdir(exist_ok=True)
    (tokenizer or bpe()).save(str(directory / "tokenizer.json"))
    entries = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|start|>",
        "eos_token": "<|end|>",
        "clean_up_tokenization_spaces": False,
        **config,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(entries))


def read(directory: Path) -> TextTokenizer:
    files = {
        path.name: path.read_text() for path in directory.iterdir() if path.name in TOKENIZER_FILES
    }
    tokenizer = TextTokenizer.from_files(files, str(directory))
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_equals_transformers(tmp_path, text, bos):
    write_tokenizer(tmp_path, with_bos(bpe()) if bos else bpe())
    ours = read(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert (ids[:1] == [0]) == bos
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert (ours.bos_token_id, ours.eos_token_id) == (0, 1)


def test_add_bos_token_of_the_config_decides(tmp_path):
    write_tokenizer(tmp_path / "added", add_bos_token=True)
    assert read(tmp_path / "added").encode("Hello")[0] == 0
    write_tokenizer(tmp_path / "once", with_bos(bpe()), add_bos_token=True)
    assert read(tmp_path / "once").encode("Hello").count(0) == 1
    write_tokenizer(tmp_path / "none", with_bos(bpe()), add_bos_token=False)
    assert 0 not in read(tmp_path / "none").encode("Hello")


def test_special_tokens_may_be_objects_or_in_their_own_file(tmp_path):
    write_tokenizer(tmp_path, eos_token={"content": "<|end|>", "special": True}, bos_token=None)
    assert read(tmp_path).eos_token_id == 1
    assert read(tmp_path).bos_token_id is None
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|start|>"}')
    assert read(tmp_path).eos_token_id == 0


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 300), max_size=40))
def test_streamed_pieces_join_to_the_decoded_text(tokens):
    check_streaming(TOKENIZER, tokens)


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=30))
def test_streamed_text_is_the_text(text):
    tokens = TOKENIZER.encode(text)
    assert check_streaming(TOKENIZER, tokens) == TOKENIZER.decode(tokens)


TOKENIZER = TextTokenizer(bpe(), {}, None, None)


def check_streaming(tokenizer: TextTokenizer, tokens: list[int]) -> str:
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokens]
    assert not any(piece.endswith("\ufffd") for piece in pieces)
    text = "".join([*pieces, stream.flush()])
    assert text == tokenizer.decode(tokens)
    return text


def test_incomplete_characters_are_held_back():
    stream = TOKENIZER.stream()
    tokens = TOKENIZER.encode("a👩b")
    pieces = [stream.push(token) for token in tokens]
    assert len(tokens) > 4
    assert [piece for piece in pieces if piece] == ["a", "👩", "b"]
    assert stream.flush() == ""
    assert stream.push(tokens[1]) == ""
    assert stream.flush() == "\ufffd"


def test_streaming_keeps_spaces_of_a_decoder_that_strips_the_first():
    tokenizer = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1}, unk_token="▁a"))
    tokenizer.decoder = decoders.Metaspace()
    stripping = TextTokenizer(tokenizer, {}, None, None)
    assert stripping.decode([0, 1, 0]) == "a b a"
    assert check_streaming(stripping, [0, 1, 0]) == "a b a"


def test_eos_ids_are_the_union(tmp_path):
    write_tokenizer(tmp_path)
    files = {"generation_config.json": '{"eos_token_id": [4, 5]}'}
    assert eos_ids(files, frozenset({6}), read(tmp_path), "m") == {1, 4, 5, 6}
    assert eos_ids({}, frozenset(), None, "m") == frozenset()
    assert eos_ids({"generation_config.json": '{"eos_token_id": 3}'}, frozenset(), None, "m") == {3}


@pytest.mark.parametrize("place", ["string", "list", "file"])
def test_chat_template_is_found(tmp_path, place):
    template = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]
    match place:
        case "string":
            write_tokenizer(tmp_path, chat_template=template)
        case "list":
            write_tokenizer(tmp_path, chat_template=named)
        case _:
            write_tokenizer(tmp_path, chat_template="not this")
            (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = read(tmp_path)
    messages = [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(messages) == "<|start|>Hello"
    assert tokenizer.encode_chat(messages) == [0, *tokenizer.encode("Hello")]
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert theirs.apply_chat_template(messages, tokenize=False) == "<|start|>Hello"


def test_chat_without_a_template_says_where_one_was_sought(tmp_path):
    write_tokenizer(tmp_path)
    with pytest.raises(ChatTemplateError, match=r"no chat template .*tokenizer_config\.json"):
        read(tmp_path).apply_chat_template([])


def test_named_templates_need_a_default(tmp_path):
    write_tokenizer(tmp_path, chat_template=[{"name": "rag", "template": "x"}])
    with pytest.raises(TokenizerError, match=r"\['rag'\].*default"):
        read(tmp_path)
