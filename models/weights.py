"""From named tensors of a checkpoint to the parameters of a decoder, one tensor at a time."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Protocol

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


def parameter_paths(params: Params) -> dict[str, Any]:
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
    expected = {
        tensor_name(path): leaf.shape[::-1] if path.endswith(".kernel") else leaf.shape
        for path, leaf in parameter_paths(decoder.abstract_params).items()
    }
    found = dict(tensors.shapes)
    notes = []
    for name in sorted(found.keys() - expected.keys()):
        if reason := _harmless(name, decoder):
            notes.append(f"{source}: {name} ignored; {reason}")
            del found[name]
    check_shapes(expected, found, source)

    def load(path: tuple, target: jax.ShapeDtypeStruct) -> jax.Array:
        name = dotted(path)
        where = sharding(name, target.shape) if callable(sharding) else sharding
        place = _placing(name.endswith(".kernel"), decoder.dtype, where)
        # Waiting lets the host copy go before the next tensor is read.
        return place(tensors.read(tensor_name(name))).block_until_ready()

    return jax.tree_util.tree_map_with_path(load, decoder.abstract_params), tuple(notes)


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


def check_shapes(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], source: str
) -> None:
    """Checks that a checkpoint holds exactly the tensors that its config calls for.

    Raises:
        CheckpointError: names all that are missing, unexpected or of another shape.
    """
    problems = {
        "missing": [name for name in expected if name not in found],
        "unexpected": [name for name in found if name not in expected],
        "of the wrong shape": [
            f"{name} is {list(found[name])}, expected {list(shape)}"
            for name, shape in expected.items()
            if name in found and found[name] != shape
        ],
    }
    listed = [
        f"{len(items)} {title}: {'; '.join(items[:_LISTED])}"
        + (f"; and {len(items) - _LISTED} more" if len(items) > _LISTED else "")
        for title, items in problems.items()
        if items
    ]
    if listed:
        raise CheckpointError(f"{source}: tensors do not match the config. " + ". ".join(listed))


def _harmless(name: str, decoder: TransformerDecoder) -> str | None:
    """Why a tensor that no parameter corresponds to can be ignored, or None if it cannot."""
    if name.endswith("rotary_emb.inv_freq"):
        return "frequencies come from the config"
    if name == "lm_head.weight" and decoder.config.tied:
        return "tie_word_embeddings is true"
    return None
