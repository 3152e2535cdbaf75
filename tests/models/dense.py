"""Plain causal attention over whole sequences: the callback that tests give to a decoder."""

import math

import jax
import jax.numpy as jnp

from models import CausalLM


def causal_attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of every token to itself and those before it, in float32."""
    del layer
    length, group = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2).astype(jnp.float32) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q.astype(jnp.float32), k, precision="highest")
    mask = jnp.tril(jnp.ones((length, length), bool))[None, None]
    scores = jnp.where(mask, scores / math.sqrt(q.shape[-1]), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, v, precision="highest").astype(q.dtype)


def dense_logits(
    model: CausalLM, tokens: jax.Array, positions: jax.Array, sequence_lengths: jax.Array
) -> jax.Array:
    """Logits of whole sequences: int32 ``[B, T]`` to float32 ``[B, T, V]``."""
    hidden = model.decoder.hidden(model.params, tokens, positions, sequence_lengths, causal_attend)
    return model.decoder.logits(model.params, hidden)
