"""Documents: windows of token ids of one length, chosen once and identified by their hash."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.evidence.texts import BadItems, Text
from models.tokenizer import TextTokenizer
from retopk_jax.errors import ConfigError


@dataclass(frozen=True)
class Documents:
    """Windows of texts.

    Attributes:
        names: of the texts, each with the token at which its window starts.
        tokens: int32 ``[documents, length]``.
        tokenizer: hash of the tokenizer that made them.
        source: where the texts came from.
    """

    names: list[str]
    tokens: np.ndarray
    tokenizer: str
    source: str

    @property
    def length(self) -> int:
        """Tokens a document."""
        return self.tokens.shape[1]

    def first(self, count: int) -> "Documents":
        """The first ``count`` documents.

        Raises:
            ConfigError: there are fewer.
        """
        if count > len(self.names):
            raise ConfigError(
                f"{count} documents wanted: {self.source} gives {len(self.names)} of "
                f"{self.length} tokens"
            )
        return Documents(self.names[:count], self.tokens[:count], self.tokenizer, self.source)

    def ending(self, length: int) -> np.ndarray:
        """The last ``length`` tokens of every document: all lengths end alike.

        Raises:
            ConfigError: the documents are shorter.
        """
        if length > self.length:
            raise ConfigError(f"documents of {length} tokens wanted: these have {self.length}")
        return self.tokens[:, self.length - length :]

    def description(self) -> dict[str, Any]:
        """What a result says of its documents."""
        return {
            "source": self.source,
            "names": self.names,
            "tokens_each": self.length,
            "tokenizer_sha256": self.tokenizer,
            "token_ids_sha256": token_hash(self.tokens),
        }


def token_hash(tokens: np.ndarray) -> str:
    """sha256 of token ids as little-endian int32."""
    return hashlib.sha256(np.ascontiguousarray(tokens, "<i4").tobytes()).hexdigest()


def tokenizer_hash(tokenizer: TextTokenizer) -> str:
    """sha256 of a tokenizer's rules and vocabulary."""
    return hashlib.sha256(tokenizer.backend.to_str().encode("utf-8")).hexdigest()


def cut_documents(
    texts: Sequence[Text],
    tokenizer: TextTokenizer,
    *,
    length: int,
    count: int,
    seed: int,
    source: str,
    bad: BadItems,
) -> Documents:
    """Cuts windows out of texts: one of every text in a random order, then a second of each.

    Windows of one text do not overlap, and which come first is random.

    Args:
        texts: what to cut.
        tokenizer: the model's.
        length: tokens a window.
        count: windows.
        seed: of the choices.
        source: said in the results.
        bad: told of texts that are shorter than a window.

    Raises:
        ConfigError: the texts do not hold enough windows.
    """
    rng = np.random.default_rng(seed)
    orders = []
    for text in texts:
        ids = np.asarray(
            tokenizer.backend.encode(text.content, add_special_tokens=False).ids, np.int32
        )
        if len(ids) < length:
            bad.report(text.name, f"{len(ids)} tokens, and {length} are needed")
            continue
        spare = int(rng.integers(len(ids) % length + 1))
        orders.append((text.name, ids, spare, rng.permutation(len(ids) // length)))
    available = sum(len(order) for *_, order in orders)
    if available < count:
        raise ConfigError(
            f"{source} holds {available} documents of {length} tokens: {count} are wanted"
        )
    names, windows = [], []
    shuffled = [orders[i] for i in rng.permutation(len(orders))]
    turn = 0
    while len(names) < count:
        for name, ids, spare, order in shuffled:
            if turn < len(order) and len(names) < count:
                start = spare + int(order[turn]) * length
                names.append(f"{name}@{start}")
                windows.append(ids[start : start + length])
        turn += 1
    return Documents(names, np.stack(windows), tokenizer_hash(tokenizer), source)


def save_documents(path: Path, documents: Documents) -> None:
    """Writes documents as .npz, two bytes a token where the ids allow it."""
    small = int(documents.tokens.max()) < 1 << 16
    about = json.dumps(
        {
            "names": documents.names,
            "tokenizer": documents.tokenizer,
            "source": documents.source,
        }
    )
    tokens = documents.tokens.astype(np.uint16 if small else np.uint32)
    with path.open("wb") as file:
        np.savez_compressed(file, tokens=tokens, about=np.asarray(about))


def load_documents(path: Path, tokenizer: TextTokenizer | None) -> Documents:
    """Reads what `save_documents` wrote.

    Raises:
        ConfigError: another kind of file, or made with another tokenizer.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            tokens, about = archive["tokens"].astype(np.int32), json.loads(str(archive["about"]))
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{path}: not documents written by `documents`: {error}") from error
    if tokenizer is not None and about["tokenizer"] != tokenizer_hash(tokenizer):
        raise ConfigError(f"{path}: made with another tokenizer than this model's")
    return Documents(about["names"], tokens, about["tokenizer"], about["source"])
