"""Result files: checked before the work, written aside and renamed after it."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from retopk_jax.errors import ConfigError


def check_target(path: Path, option: str) -> None:
    """Checks that a file can be written, before anything else is done.

    Args:
        path: the file.
        option: the command-line option that named it, for the message.

    Raises:
        ConfigError: its directory does not exist or cannot be written, or it is a directory.
    """
    parent = path.parent
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a directory: expected a file to write")
    if not parent.is_dir():
        raise ConfigError(f"{option} {path}: the directory {parent} does not exist")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {path}: the directory {parent} cannot be written")


def write_text(path: Path, text: str) -> None:
    """Writes a file aside and renames it, so that it is whole or not there."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    aside = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        aside.chmod(0o666 & ~_umask())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Writes JSON; see `write_text`."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
