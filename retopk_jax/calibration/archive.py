"""Files of fitted arrays that say where they come from, and show whether they were changed."""

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retopk_jax.errors import ConfigError


def save_archive(
    path: Path | str, arrays: Mapping[str, NDArray[Any]], provenance: Mapping[str, Any]
) -> None:
    """Writes a ``.npz`` file aside and renames it, so that it is whole or not there."""
    path = Path(path)
    described = json.dumps(provenance, sort_keys=True, ensure_ascii=False)
    content = io.BytesIO()
    entries: dict[str, Any] = {
        **arrays,
        "provenance": np.array(described),
        "digest": np.array(_digest(arrays, described)),
    }
    np.savez(content, **entries)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(content.getbuffer())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def load_archive(
    path: Path | str, names: Sequence[str], *, kind: str, version: str
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Reads what `save_archive` wrote: arrays and provenance.

    Args:
        path: the file.
        names: of its arrays.
        kind: what errors call it.
        version: ``format`` of the provenance that is read.

    Raises:
        ConfigError: the file cannot be read, is of another kind, is truncated, or was changed.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in names}
            described, digest = str(file["provenance"]), str(file["digest"])
    except OSError as error:
        raise ConfigError(f"{kind} {path}: {error.strerror or error}") from error
    except (
        EOFError,
        KeyError,
        RuntimeError,
        SyntaxError,
        TypeError,
        ValueError,
        zipfile.BadZipFile,
    ) as error:
        raise ConfigError(f"{kind} {path}: truncated, or not a {kind} ({error})") from error
    if digest != _digest(arrays, described):
        raise ConfigError(f"{kind} {path}: changed after it was written (its digest differs)")
    read = json.loads(described)
    if read.get("format") != version:
        raise ConfigError(
            f"{kind} {path}: of format {read.get('format')!r}, this version reads {version!r}"
        )
    return arrays, read


def _digest(arrays: Mapping[str, NDArray[Any]], provenance: str) -> str:
    content = hashlib.sha256(provenance.encode())
    for name, value in arrays.items():
        array = np.ascontiguousarray(value)
        content.update(f"{name} {array.dtype.str} {array.shape}".encode())
        content.update(array.tobytes())
    return content.hexdigest()
