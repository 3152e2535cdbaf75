"""From named tensors of a checkpoint to the parameters of a decoder, one tensor at a time."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Sharding

from retopk_jax.language_model import Params

from .decoder import TransformerDecoder
from .errors import CheckpointError

ShardingRule = Callable[[str, tuple[int, ...]], Sharding]
"""Sharding of a parameter by its dotted path and its shape."""

_LISTED = 8


class TensorSource(Protocol):
    """Tensors under their Hugging Face names, projections as ``[out, in]``."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, known without reading any."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor in host memory."""
        ...


def parameter_paths(params: Params) -> dict[str, jax.ShapeDtypeStruct | jax.Array]:
    """Leaves of a parameter tree by dotted path, such as ``layers.0.mlp.up_proj.kernel``."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {dotted(path): leaf for path, leaf in leaves}


def dotted(path: tuple) -> str:
    """A path of dictionary keys in a parameter tree, such as ``norm.scale``."""
    return ".".join(str(key.key) for key in path)


def read_params(
    decoder: TransformerDecoder,
    tensors: TensorSource,
    source: str,
    sharding: Sharding | ShardingRule | None = None,
) -> tuple[Params, tuple[str, ...]]:
    """Reads every parameter of ``decoder``, each placed on its device before the next is read.

    Args:
        decoder: says which parameters there are, their shapes and dtype.
        tensors: the checkpoint.
        source: its name, for messages.
        sharding: where to put parameters; None means the default device.

    Returns:
        The parameters, and one sentence for every tensor that was ignored as harmless.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape; all are listed, and
            nothing has been read.
    """
    targets = parameter_paths(decoder.abstract_params)
    notes = _account(decoder, targets, tensors.shapes, source)

    def load(path: tuple, target: jax.ShapeDtypeStruct) -> jax.Array:
        name = dotted(path)
        where = sharding(name, target.shape) if callable(sharding) else sharding
        place = _placing(name.endswith(".kernel"), decoder.dtype, where)
        # Waiting lets the host copy go before the next tensor is read.
        return place(tensors.read(tensor_name(name))).block_until_ready()

    return jax.tree_util.tree_map_with_path(load, decoder.abstract_params), notes


def tensor_name(path: str) -> str:
    """Hugging Face name of the parameter at a dotted path."""
    module, _, kind = path.rpartition(".")
    prefix = "" if module == "lm_head" else "model."
    return f"{prefix}{module}.{'bias' if kind == 'bias' else 'weight'}"


@cache
def _placing(
    transpose: bool, dtype: np.dtype, sharding: Sharding | None
) -> Callable[[np.ndarray], jax.Array]:
    """A compiled transfer of a tensor to where its parameter lives."""

    def to_parameter(tensor: jax.Array) -> jax.Array:
        return (tensor.T if transpose else tensor).astype(dtype)

    return jax.jit(to_parameter, out_shardings=sharding)


def _account(
    decoder: TransformerDecoder,
    targets: Mapping[str, jax.ShapeDtypeStruct | jax.Array],
    found: Mapping[str, tuple[int, ...]],
    source: str,
) -> tuple[str, ...]:
    expected = {
        tensor_name(path): target.shape[::-1] if path.endswith(".kernel") else target.shape
        for path, target in targets.items()
    }
    missing = [name for name in expected if name not in found]
    unexpected, notes = [], []
    for name in found:
        if name in expected:
            continue
        if name.endswith("rotary_emb.inv_freq"):
            notes.append(f"{source}: {name} ignored; frequencies come from the config")
        elif name == "lm_head.weight" and decoder.config.tied:
            notes.append(f"{source}: {name} ignored; tie_word_embeddings is true")
        else:
            unexpected.append(name)
    misshapen = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    problems = [
        f"{len(items)} {title}: {'; '.join(items[:_LISTED])}"
        + (f"; and {len(items) - _LISTED} more" if len(items) > _LISTED else "")
        for title, items in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of the wrong shape", misshapen),
        )
        if items
    ]
    if problems:
        raise CheckpointError(f"{source}: tensors do not match the config. " + ". ".join(problems))
    return tuple(notes)
