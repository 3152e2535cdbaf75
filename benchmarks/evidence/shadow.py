"""A method that decodes on its own, with Exact Top-K run beside it on the same tokens."""

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from retopk_jax.attention import AttentionMethod
from retopk_jax.decode import DecodeState, step_logits
from retopk_jax.language_model import Decoder, Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pair:
    """Two decodes of the same tokens.

    Attributes:
        leader: state of the method whose tokens are taken.
        shadow: state of Exact Top-K.
        token: int32 ``[B]``, the newest token, not yet fed.
        key: of the sampler.
    """

    leader: DecodeState
    shadow: DecodeState
    token: jax.Array
    key: jax.Array


@functools.partial(jax.jit, static_argnames=("decoder", "steps"), donate_argnames=("pair",))
def run_pair(
    method: AttentionMethod,
    exact: AttentionMethod,
    params: Params,
    pair: Pair,
    temperature: jax.Array,
    *,
    decoder: Decoder,
    steps: int,
) -> tuple[Pair, jax.Array, jax.Array, jax.Array]:
    """Decodes ``steps`` tokens.

    Args:
        method: whose tokens are taken.
        exact: what it is compared with.
        params: the weights.
        pair: both states; donated.
        temperature: float32 scalar; 0 takes the likeliest token.
        decoder: the model's functions.
        steps: to run.

    Returns:
        The pair; float32 ``[B, steps]``, KL(exact || method) in nats; bool ``[B, steps]``, whether
        their likeliest tokens agree; and int32 ``[B, steps]``, the tokens decoded.
    """

    def body(pair: Pair, nothing: None) -> tuple[Pair, tuple[jax.Array, jax.Array, jax.Array]]:
        mine, leader, _ = step_logits(decoder, method, params, pair.leader, pair.token)
        other, shadow, _ = step_logits(decoder, exact, params, pair.shadow, pair.token)
        divergence = optax.losses.kl_divergence_with_log_targets(
            jax.nn.log_softmax(mine), jax.nn.log_softmax(other)
        )
        likeliest = jnp.argmax(mine, axis=-1).astype(jnp.int32)
        agree = likeliest == jnp.argmax(other, axis=-1).astype(jnp.int32)
        key, drawn = jax.random.split(pair.key)
        scaled = mine / jnp.where(temperature > 0, temperature, 1.0)
        sampled = jax.random.categorical(drawn, scaled, axis=-1).astype(jnp.int32)
        token = jnp.where(temperature > 0, sampled, likeliest)
        return Pair(leader, shadow, token, key), (divergence, agree, token)

    pair, (divergence, agree, tokens) = jax.lax.scan(body, pair, None, length=steps)
    return pair, divergence.T, agree.T, tokens.T


def by_bucket(divergence: np.ndarray, agree: np.ndarray, buckets: int) -> list[dict[str, Any]]:
    """Mean divergence and agreement of every part of the continuation, and up to its end."""
    edges = np.linspace(0, divergence.shape[1], buckets + 1).astype(int)
    return [
        {
            "from": int(a),
            "to": int(b),
            "kl": float(divergence[:, a:b].mean()),
            "top1_agreement": float(agree[:, a:b].mean()),
            "kl_up_to": float(divergence[:, :b].mean()),
            "top1_agreement_up_to": float(agree[:, :b].mean()),
        }
        for a, b in itertools.pairwise(edges)
    ]
