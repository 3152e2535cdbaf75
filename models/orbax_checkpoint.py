"""A directory written by `convert`: Orbax parameters, ``config.json`` and tokenizer files."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Sharding, SingleDeviceSharding

from retopk_jax.language_model import Params

from .decoder import TransformerDecoder
from .errors import CheckpointError
from .hf_checkpoint import CONFIG_FILE, CheckpointDirectory
from .weights import ShardingRule, check_shapes, dotted, parameter_paths

PARAMS_DIRECTORY = "params"


class OrbaxCheckpoint(CheckpointDirectory):
    """Parameters as this project's decoder holds them, so that loading only reads."""

    def params(
        self, decoder: TransformerDecoder, sharding: Sharding | ShardingRule | None = None
    ) -> tuple[Params, tuple[str, ...]]:
        """The parameters in the decoder's dtype, each read to where it lives; no notes.

        Raises:
            CheckpointError: parameters that are damaged or do not match the config.
        """
        here = SingleDeviceSharding(jax.local_devices()[0])

        def target(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            where = sharding(dotted(path), leaf.shape) if callable(sharding) else sharding
            return jax.ShapeDtypeStruct(leaf.shape, decoder.dtype, sharding=where or here)

        targets = jax.tree_util.tree_map_with_path(target, decoder.abstract_params)
        expected = {name: leaf.shape for name, leaf in parameter_paths(targets).items()}
        found = {name: tuple(leaf.shape) for name, leaf in self._metadata.items()}
        check_shapes(expected, found, str(self.path))
        try:
            with ocp.StandardCheckpointer() as checkpointer:
                return checkpointer.restore(self._params_path, targets), ()
        # Orbax and TensorStore raise many kinds for damaged files.
        except Exception as error:
            raise CheckpointError(f"{self.path}: parameters are damaged: {error}") from error

    def stored_dtype(self) -> np.dtype:
        """Dtype of the parameters in the files.

        Raises:
            CheckpointError: the parameters cannot be read.
        """
        return np.dtype(next(iter(self._metadata.values())).dtype)

    @cached_property
    def _metadata(self) -> dict[str, Any]:
        """Shape and dtype of every stored array by dotted path."""
        try:
            with ocp.StandardCheckpointer() as checkpointer:
                return parameter_paths(checkpointer.metadata(self._params_path).item_metadata.tree)
        except Exception as error:
            raise CheckpointError(f"{self.path}: parameters are damaged: {error}") from error

    @property
    def _params_path(self) -> Path:
        return (self.path / PARAMS_DIRECTORY).absolute()


def write_checkpoint(
    destination: Path, params: Params, config: Mapping[str, Any], files: Mapping[str, str]
) -> None:
    """Writes a directory that `OrbaxCheckpoint` reads: all of it or, on any failure, nothing.

    Raises:
        CheckpointError: the destination exists, or its parent does not.
        OSError: the disk is full, or the like.
    """
    refuse_existing(destination)
    scratch = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    partial = scratch / destination.name
    try:
        partial.mkdir()
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save((partial / PARAMS_DIRECTORY).absolute(), params)
        for name, text in files.items():
            (partial / name).write_text(text, encoding="utf-8")
        (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2), encoding="utf-8")
        refuse_existing(destination)
        partial.rename(destination)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def refuse_existing(destination: Path) -> None:
    """Checks that a checkpoint can be written under this name.

    Raises:
        CheckpointError: something is there already, or the directory to put it in is missing.
    """
    if destination.exists() or destination.is_symlink():
        raise CheckpointError(f"{destination}: exists already; nothing was written")
    if not destination.parent.is_dir():
        raise CheckpointError(f"{destination}: {destination.parent} is not a directory")
