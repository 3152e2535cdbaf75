"""Scoring given tokens: one decode step a token, fed the true token whatever the model says."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import optax

from retopk_jax.attention.base import AttentionMethod, PathStatistics
from retopk_jax.decode import DecodeState, start, statistics, step_logits
from retopk_jax.errors import CapacityError, PromptError
from retopk_jax.language_model import Decoder, LanguageModel, Params
from retopk_jax.prefill import Context


@dataclass(frozen=True)
class Scored:
    """Losses of a continuation.

    Attributes:
        nll: float32 ``[B, N]``, −log p of token i + 1 given the prompt and tokens 0 … i, in nats.
            The first token of the continuation is fed and not scored: its probability is the
            prefill's, the same for every method.
        paths: how every row's head-steps were served; None for methods with one path.
        context: the prompts, to start another method from.
        state: of the method after the last step.
    """

    nll: jax.Array
    paths: list[PathStatistics] | None
    context: Context
    state: DecodeState


@functools.partial(jax.jit, static_argnames=("decoder",), donate_argnames=("state",))
def score_tokens(
    method: AttentionMethod,
    params: Params,
    state: DecodeState,
    tokens: jax.Array,
    *,
    decoder: Decoder,
) -> tuple[jax.Array, DecodeState]:
    """Feeds ``tokens[:, :-1]`` one step at a time and scores ``tokens[:, 1:]``.

    Args:
        method: how to attend.
        params: the weights.
        state: after a prefill; donated.
        tokens: int32 ``[B, N + 1]``.
        decoder: the model's functions.

    Returns:
        Losses float32 ``[B, N]`` and the state after the last step.
    """

    def body(
        state: DecodeState, pair: tuple[jax.Array, jax.Array]
    ) -> tuple[DecodeState, jax.Array]:
        token, label = pair
        logits, state, _ = step_logits(decoder, method, params, state, token)
        return state, optax.losses.softmax_cross_entropy_with_integer_labels(logits, label)

    state, losses = jax.lax.scan(body, state, (tokens[:, :-1].T, tokens[:, 1:].T))
    return losses.T, state


def score_continuation(
    model: LanguageModel, context: Context, method: AttentionMethod, tokens: jax.Array
) -> Scored:
    """Scores a continuation of prompts that have been read.

    The context passed in is used up; go on with the one returned.

    Args:
        model: the model.
        context: from `retopk_jax.prefill`.
        method: how to attend.
        tokens: int32 ``[B, N + 1]``, what follows each prompt; the first is fed and not scored.

    Raises:
        PromptError: fewer than two tokens a row, or rows that are not the context's.
        CapacityError: the tokens do not fit the cache or the model's positions.
    """
    batch = context.cache.batch
    if tokens.ndim != 2 or tokens.shape[0] != batch or tokens.shape[1] < 2:
        raise PromptError(
            f"tokens of shape {tokens.shape}: expected ({batch}, N) with N of 2 or more"
        )
    method.check(model.decoder.geometry)
    lengths = context.cache.lengths
    room = min(context.cache.capacity, model.decoder.max_positions) - int(jnp.max(lengths))
    if tokens.shape[1] - 1 > room:
        raise CapacityError(
            f"{tokens.shape[1] - 1} tokens to feed: the context has room for {room} in a cache of "
            f"{context.cache.capacity} and {model.decoder.max_positions} positions"
        )
    kept = jnp.array(lengths)  # the state, and the lengths with it, are donated
    nll, state = score_tokens(
        method,
        model.params,
        start(method, context, mesh=model.decoder.mesh),
        jnp.asarray(tokens, jnp.int32),
        decoder=model.decoder,
    )
    rewound = replace(context, cache=replace(state.cache, lengths=kept))
    return Scored(nll, statistics(method, state), rewound, state)
