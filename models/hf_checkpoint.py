"""A Hugging Face directory: ``config.json``, safetensors, tokenizer files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from safetensors import SafetensorError, safe_open

from retopk_jax.language_model import Params

from .config import ModelConfig
from .decoder import TransformerDecoder
from .errors import CheckpointError, ConfigError
from .tokenizer import TOKENIZER_FILES
from .weights import ShardingRule, read_params

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"

_DTYPES = {"F32": jnp.float32, "BF16": jnp.bfloat16, "F16": jnp.float16}


@dataclass(frozen=True)
class CheckpointDirectory:
    """The files beside the weights, the same in every kind of checkpoint directory.

    Attributes:
        path: the directory.
    """

    path: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """Contents of ``config.json``.

        Raises:
            CheckpointError: it is missing or not a JSON object.
        """
        return read_json(self.path / CONFIG_FILE)

    @cached_property
    def files(self) -> dict[str, str]:
        """Text of the tokenizer and generation files that exist, by name."""
        return read_text_files(self.path)


class HfCheckpoint(CheckpointDirectory):
    """An unmodified Hugging Face directory of a Llama or Qwen2 model."""

    def params(
        self, decoder: TransformerDecoder, sharding: Sharding | ShardingRule | None = None
    ) -> tuple[Params, tuple[str, ...]]:
        """See `models.weights.read_params`.

        Raises:
            CheckpointError: weights that are missing, damaged or do not match the config.
        """
        return read_params(decoder, _Safetensors(self.path), str(self.path), sharding)

    def stored_dtype(self) -> np.dtype:
        """Dtype of the tensors in the files; float32 where they differ.

        Raises:
            CheckpointError: weights that are missing or damaged.
        """
        dtypes = _Safetensors(self.path).dtypes
        return jnp.dtype(_DTYPES[dtypes.pop()] if len(dtypes) == 1 else jnp.float32)


class _Safetensors:
    """Tensors of one safetensors file or of the shards that an index lists."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: set[str] = set()
        for path, names in _shards(directory).items():
            self._scan(path, names)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> np.ndarray:
        path = self._file_of[name]
        with _open(path) as file:
            try:
                return file.get_tensor(name)
            except SafetensorError as error:
                raise CheckpointError(f"{path}: cannot read tensor {name}: {error}") from error

    def _scan(self, path: Path, names: list[str] | None) -> None:
        with _open(path) as file:
            present = list(file.keys())
            absent = sorted(set(names or ()) - set(present))
            if absent:
                raise CheckpointError(
                    f"{self._directory / INDEX_FILE}: says that {path.name} holds "
                    f"{', '.join(absent[:8])}, which it does not"
                )
            for name in present:
                view = file.get_slice(name)
                if view.get_dtype() not in _DTYPES:
                    raise CheckpointError(
                        f"{path}: tensor {name} has dtype {view.get_dtype()}; "
                        f"supported are {', '.join(_DTYPES)}"
                    )
                self.dtypes.add(view.get_dtype())
                self._file_of[name] = path
                self._shapes[name] = tuple(view.get_shape())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: the file is missing, unreadable or holds something else; names the file.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, not a JSON object")
    return value


def read_text_files(directory: Path) -> dict[str, str]:
    """Text of the `TOKENIZER_FILES` in a directory, by name.

    Raises:
        CheckpointError: one exists and cannot be read.
    """
    found: dict[str, str] = {}
    for name in TOKENIZER_FILES:
        path = directory / name
        if not path.is_file():
            continue
        try:
            found[name] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: not readable as text: {error}") from error
    return found


def config_of(contents: Mapping[str, Any], source: str) -> ModelConfig:
    """The model that a ``config.json`` describes; errors name ``source``."""
    try:
        return ModelConfig.from_hf(contents)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _shards(directory: Path) -> dict[Path, list[str] | None]:
    """Safetensors files and the tensors that each must hold (None: whatever it holds)."""
    index = directory / INDEX_FILE
    if not index.is_file():
        if not (directory / SINGLE_FILE).is_file():
            raise CheckpointError(f"{directory}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
        return {directory / SINGLE_FILE: None}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no object 'weight_map' of tensor names to files")
    shards: dict[Path, list[str] | None] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index}: {name} is in {file!r}, which is not a file name")
        names = shards.setdefault(directory / file, [])
        assert names is not None
        names.append(name)
    for path in shards:
        if not path.is_file():
            raise CheckpointError(f"{index}: names the shard {path.name}, which does not exist")
    return shards


def _open(path: Path):
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from error
