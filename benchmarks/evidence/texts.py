"""Texts from files: what cannot be used is named, and skipped or refused."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retopk_jax.errors import ConfigError

ON_BAD = ("skip", "refuse")


@dataclass(frozen=True)
class Text:
    """One text.

    Attributes:
        name: of its file, without the ending.
        content: the text.
    """

    name: str
    content: str


class BadItems:
    """What cannot be used: reported as it is found, and refused where that is wanted.

    Attributes:
        skipped: name and reason of every item left out.
    """

    def __init__(self, on_bad: str):
        self._refuse = on_bad == "refuse"
        self.skipped: list[dict[str, str]] = []

    def report(self, name: str, reason: str) -> None:
        """Skips an item.

        Raises:
            ConfigError: such items are to be refused.
        """
        if self._refuse:
            raise ConfigError(f"{name}: {reason}; --on-bad skip leaves such items out")
        print(f"skipped {name}: {reason}", file=sys.stderr)
        self.skipped.append({"name": name, "reason": reason})


def read_texts(path: Path, bad: BadItems) -> list[Text]:
    """The .txt files of a directory in order of name, or one file.

    Raises:
        ConfigError: there is none, or one cannot be used and such are to be refused.
    """
    if path.is_dir():
        files = sorted(path.glob("*.txt"))
    elif path.is_file():
        files = [path]
    else:
        raise ConfigError(f"{path}: no such file or directory; expected texts")
    texts = []
    for file in files:
        try:
            content = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            bad.report(file.name, f"not UTF-8 at byte {error.start}")
            continue
        if not content.strip():
            bad.report(file.name, "empty")
            continue
        texts.append(Text(file.stem, content))
    if not texts:
        raise ConfigError(f"{path}: holds no usable .txt file")
    return texts


def read_records(
    path: Path, fields: Sequence[tuple[str, Callable[[Any], bool], str]], bad: BadItems
) -> list[dict[str, Any]]:
    """The records of a .jsonl file that have what is needed.

    Args:
        path: the file, an object a line.
        fields: name, test and description of every field needed.
        bad: told of the lines that lack one.

    Raises:
        ConfigError: the file cannot be read, or a line is to be refused.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        name = f"{path.name}, line {number}"
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            bad.report(name, f"not UTF-8 at byte {error.start}")
            continue
        except ValueError as error:
            bad.report(name, f"not JSON: {error}")
            continue
        if not isinstance(record, dict):
            bad.report(name, f"a {type(record).__name__}, not an object")
            continue
        wrong = [
            f"{field} is {'missing' if field not in record else 'not ' + what}"
            for field, test, what in fields
            if field not in record or not test(record[field])
        ]
        if wrong:
            bad.report(name, "; ".join(wrong))
            continue
        records.append(record)
    return records
