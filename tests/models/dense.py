"""Plain attention: the callbacks that tests give to a decoder."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from models import CausalLM, TransformerDecoder


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax attention in float32.

    Args:
        q: ``[B, T, H, D]``.
        k: ``[B, S, G, D]``.
        v: ``[B, S, G, D]``.
        mask: bool ``[T, S]``, what each token attends to.

    Returns:
        ``[B, T, H, D]``.
    """
    group = q.shape[2] // k.shape[2]
    keys, values = (jnp.repeat(x, group, axis=2).astype(jnp.float32) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q.astype(jnp.float32), keys, precision="highest")
    scores = jnp.where(mask[None, None], scores / math.sqrt(q.shape[-1]), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, values, precision="highest").astype(q.dtype)


def causal_attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Every token attends to itself and those before it in the call."""
    del layer
    return attention(q, k, v, jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool)))


@partial(jax.jit, static_argnums=0)
def _dense_logits(
    decoder: TransformerDecoder, params: Any, tokens: jax.Array, positions: jax.Array
) -> jax.Array:
    lengths = positions[:, -1] + 1
    hidden = decoder.hidden(params, tokens, positions, lengths, causal_attend)
    return decoder.logits(params, hidden)


def dense_logits(
    model: CausalLM, tokens: jax.Array, positions: jax.Array | None = None
) -> jax.Array:
    """Logits of whole sequences: int32 ``[B, T]`` to float32 ``[B, T, V]``."""
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    return _dense_logits(model.decoder, model.params, tokens, positions)


@partial(jax.jit, static_argnums=0)
def _step(
    decoder: TransformerDecoder,
    params: Any,
    cache: list[Any],
    token: jax.Array,
    position: jax.Array,
) -> tuple[jax.Array, list[Any]]:
    """The greedy successor of ``token`` at ``position``, and the grown cache."""
    written = list(cache)
    mask = jnp.arange(cache[0][0].shape[1])[None] <= position

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(old, new, position, axis=1)
            for old, new in zip(cache[layer], (k, v), strict=True)
        )
        written[layer] = (keys, values)
        return attention(q, keys, values, mask)

    at = position[None, None]
    hidden = decoder.hidden(params, token[None, None], at, at[0] + 1, attend)
    return decoder.logits(params, hidden)[0, 0].argmax(), written


def greedy(model: CausalLM, prompt: list[int], count: int, capacity: int = 128) -> list[int]:
    """``count`` tokens of greedy decoding with a key-value cache; ends are not looked for."""
    assert len(prompt) + count <= capacity
    geometry = model.decoder.geometry
    shape = (1, capacity, geometry.num_kv_heads, geometry.head_dim)
    cache: list[Any] = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(geometry.num_layers)]
    tokens = list(prompt)
    for position in range(len(prompt) + count - 1):
        token = jnp.int32(tokens[position])
        successor, cache = _step(model.decoder, model.params, cache, token, jnp.int32(position))
        if position >= len(prompt) - 1:
            tokens.append(int(successor))
    return tokens[len(prompt) :]
