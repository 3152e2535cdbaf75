"""Weights over a mesh: heads and inner widths are sharded, the residual stream is on every device.

A projection into heads or into the MLP is sharded by its outputs, the one back by its inputs, so
that one all-reduce follows it. Where there are more devices than KV heads, each KV head is on
several: it is repeated in the weights, and the sharded model has as many KV heads as devices.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from retopk_jax.sharding import TENSOR, check_geometry

from .causal_lm import CausalLM
from .decoder import TransformerDecoder
from .weights import ShardingRule, dotted

_BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
_BY_INPUTS = ("o_proj", "down_proj")
_KV = ("k_proj", "v_proj")


def parameter_spec(path: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """How a parameter lies on a mesh.

    Args:
        path: dotted, such as ``layers.0.mlp.up_proj.kernel``.
        shape: of the parameter.
        mesh: from `retopk_jax.sharding.make_mesh`.
    """
    *_, module, kind = path.split(".")
    ways = mesh.shape[TENSOR]
    if module in _BY_OUTPUTS and shape[-1] % ways == 0:
        return P(*[None] * (len(shape) - 1), TENSOR)
    if module in _BY_INPUTS and kind == "kernel" and shape[0] % ways == 0:
        return P(TENSOR, None)
    return P()


def loading_rule(kv_heads: int, mesh: Mesh) -> ShardingRule:
    """Where `models.load_model` reads each parameter to, before KV heads are repeated."""
    repeated = mesh.shape[TENSOR] > kv_heads

    def rule(path: str, shape: tuple[int, ...]) -> NamedSharding:
        whole = repeated and path.split(".")[-2] in _KV
        return NamedSharding(mesh, P() if whole else parameter_spec(path, shape, mesh))

    return rule


def shard_decoder(decoder: TransformerDecoder, mesh: Mesh) -> TransformerDecoder:
    """The decoder of the model over a mesh.

    Raises:
        ConfigError: its heads do not divide over the mesh.
    """
    check_geometry(decoder.geometry, mesh)
    heads = max(decoder.config.num_kv_heads, mesh.shape[TENSOR])
    return replace(decoder, config=replace(decoder.config, num_kv_heads=heads), mesh=mesh)


def shard_model(model: CausalLM, mesh: Mesh) -> CausalLM:
    """The model over a mesh; what it reads and decodes is sharded as well.

    Raises:
        ConfigError: its heads do not divide over the mesh.
    """
    config, decoder = model.config, shard_decoder(model.decoder, mesh)
    times = decoder.config.num_kv_heads // config.num_kv_heads

    def place(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        name = dotted(path)
        if times > 1 and name.split(".")[-2] in _KV:
            leaf = _repeat_heads(leaf, config.num_kv_heads, times)
        return jax.device_put(leaf, NamedSharding(mesh, parameter_spec(name, leaf.shape, mesh)))

    params = jax.tree_util.tree_map_with_path(place, model.params)
    return replace(model, decoder=decoder, params=params)


def _repeat_heads(leaf: jax.Array, heads: int, times: int) -> jax.Array:
    """Repeats every head's columns ``[..., heads * D]`` in place."""
    by_head = leaf.reshape(*leaf.shape[:-1], heads, -1)
    return jnp.repeat(by_head, times, axis=-2).reshape(*leaf.shape[:-1], -1)
