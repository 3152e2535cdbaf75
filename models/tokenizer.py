"""Text to token ids and back, through the `tokenizers` library."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from .chat import render_chat
from .config import token_ids
from .errors import ChatTemplateError, TokenizerError

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    TOKENIZER_JSON,
    TOKENIZER_CONFIG,
    SPECIAL_TOKENS_MAP,
    GENERATION_CONFIG,
    CHAT_TEMPLATE,
)
"""Files beside the weights that say how text becomes tokens and when generation ends."""

_GOES_ON = "\ue000goes on\ue000"
"""Marks the end of a message that goes on; the characters are of Unicode's private use."""

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, eq=False)
class TextTokenizer:
    """`retopk_jax.language_model.Tokenizer` of a checkpoint.

    Attributes:
        backend: the tokenizer of ``tokenizer.json``.
        special_tokens: text of ``bos_token``, ``eos_token`` and so on, where there is one.
        add_bos: whether `encode` puts ``bos_token`` first; None leaves that to ``tokenizer.json``.
        chat_template: Jinja source, or None.
    """

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    add_bos: bool | None
    chat_template: str | None

    @classmethod
    def from_files(cls, files: Mapping[str, str], source: str) -> "TextTokenizer | None":
        """The tokenizer in the text of `TOKENIZER_FILES`; None without ``tokenizer.json``.

        Raises:
            TokenizerError: a file is malformed; names it and ``source``.
        """
        if TOKENIZER_JSON not in files:
            return None
        try:
            backend = tokenizers.Tokenizer.from_str(files[TOKENIZER_JSON])
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{source}: {TOKENIZER_JSON} is malformed: {error}") from error
        config = _json_object(files, TOKENIZER_CONFIG, source)
        named = {**_json_object(files, SPECIAL_TOKENS_MAP, source), **config}
        special = {name: _token_text(named.get(name)) for name in _SPECIAL_TOKENS}
        template = files.get(CHAT_TEMPLATE, config.get("chat_template"))
        return cls(
            backend=backend,
            special_tokens={name: text for name, text in special.items() if text is not None},
            add_bos=config.get("add_bos_token"),
            chat_template=_default_template(template, source),
        )

    @property
    def bos_token_id(self) -> int | None:
        """Id of ``bos_token``, if there is one."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of ``eos_token``, if there is one."""
        return self._special_id("eos_token")

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens spelled out in it become their ids.

        Args:
            text: any.
            begins: the text begins a sequence: what the checkpoint puts there is added.
        """
        if not begins or self.add_bos is False:
            return self.backend.encode(text, add_special_tokens=False).ids
        ids = self.backend.encode(text).ids
        bos = self.bos_token_id
        if self.add_bos and bos is not None and not self.backend.num_special_tokens_to_add(False):
            return [bos, *ids]
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens``, special tokens left out.

        Bytes that are not UTF-8 become U+FFFD; spaces are kept as they are
        (``clean_up_tokenization_spaces`` is not applied).
        """
        return self.backend.decode(list(tokens), skip_special_tokens=True)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """Text of a conversation; see `models.chat.render_chat`.

        Raises:
            ChatTemplateError: there is no template, or it fails.
        """
        if self.chat_template is None:
            raise ChatTemplateError(
                "the checkpoint has no chat template (looked for chat_template.jinja, "
                "chat_template in tokenizer_config.json, tokenizer.chat_template in a GGUF)"
            )
        return render_chat(
            self.chat_template,
            messages,
            self.special_tokens,
            add_generation_prompt=add_generation_prompt,
        )

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation; the template alone decides on special tokens.

        Raises:
            ChatTemplateError: there is no template, or it fails.
        """
        text = self.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
        return self.backend.encode(text, add_special_tokens=False).ids

    def open_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], str]:
        """A conversation whose last message goes on later.

        Returns:
            Token ids up to the end of the last message's content, and the text by which the
            template ends the conversation after it.

        Raises:
            ChatTemplateError: there is no template, it fails, or it does not put the message once.
        """
        *before, last = messages
        rendered = self.apply_chat_template(
            [*before, {**last, "content": last["content"] + _GOES_ON}]
        )
        read, mark, rest = rendered.partition(_GOES_ON)
        if not mark or _GOES_ON in rest:
            raise ChatTemplateError(
                "the chat template does not hold the last message once, so it cannot go on later"
            )
        return self.backend.encode(read, add_special_tokens=False).ids, rest

    def stream(self) -> "StreamDecoder":
        """A decoder for tokens that arrive one by one."""
        return StreamDecoder(self)

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)


class StreamDecoder:
    """Decodes tokens as they arrive; text comes out once its characters are complete.

    The pieces and the final `flush` join to what `TextTokenizer.decode` gives for all tokens.
    """

    def __init__(self, tokenizer: TextTokenizer):
        self._decode = tokenizer.decode
        self._tokens: list[int] = []
        # Decoding starts at the last piece, not at the new tokens: a token's text may depend on
        # whether it is the first.
        self._start = 0
        self._emitted = 0

    def push(self, token: int) -> str:
        """Text that ``token`` completes, possibly none."""
        self._tokens.append(token)
        text = self._pending()
        if not text or text.endswith("\ufffd"):
            return ""
        self._start, self._emitted = self._emitted, len(self._tokens)
        return text

    def flush(self) -> str:
        """Text still held back; incomplete characters become U+FFFD."""
        text = self._pending()
        self._start, self._emitted = self._emitted, len(self._tokens)
        return text

    def _pending(self) -> str:
        shown = self._decode(self._tokens[self._start : self._emitted])
        return self._decode(self._tokens[self._start :])[len(shown) :]


def eos_ids(
    files: Mapping[str, str],
    config_ids: frozenset[int],
    tokenizer: TextTokenizer | None,
    source: str,
) -> frozenset[int]:
    """Ids that end a sequence: the union of generation config, model config and tokenizer.

    Raises:
        TokenizerError: ``generation_config.json`` is malformed.
    """
    generation = _json_object(files, GENERATION_CONFIG, source)
    ids = token_ids(generation.get("eos_token_id")) | config_ids
    own = tokenizer.eos_token_id if tokenizer else None
    return ids if own is None else ids | {own}


def _json_object(files: Mapping[str, str], name: str, source: str) -> dict[str, Any]:
    try:
        value = json.loads(files.get(name, "{}"))
    except ValueError as error:
        raise TokenizerError(f"{source}: {name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{source}: {name} holds a {type(value).__name__}, not an object")
    return value


def _token_text(token: Any) -> str | None:
    """A special token is a string or an object with its ``content``."""
    return token.get("content") if isinstance(token, dict) else token


def _default_template(template: Any, source: str) -> str | None:
    """A template is a string or a list of named ones, of which ``default`` is used."""
    if isinstance(template, list):
        by_name = {item["name"]: item["template"] for item in template}
        if "default" not in by_name:
            raise TokenizerError(
                f"{source}: chat_template has {sorted(by_name)}; one named 'default' is needed"
            )
        return by_name["default"]
    return template
