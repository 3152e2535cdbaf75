"""Choosing the next token."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from retopk_jax.attention.checks import check_integer, check_number
from retopk_jax.errors import ConfigError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Only `greedy` is static.

    Attributes:
        temperature: float32 scalar; logits are divided by it.
        top_k: int32 scalar; tokens kept, the V likeliest.
        top_p: float32 scalar; the smallest set of likeliest tokens whose probability reaches it is
            kept.
        greedy: the likeliest token, ties to the lower id.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    greedy: bool = field(metadata={"static": True})


def make_sampling(temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> Sampling:
    """Checks and packs sampling settings.

    Args:
        temperature: 0 for greedy.
        top_k: 0 for all tokens.
        top_p: above 0, at most 1.

    Raises:
        ConfigError: a setting is out of range.
    """
    check_number("temperature", temperature, minimum=0.0)
    check_integer("top_k", top_k, minimum=0)
    check_number("top_p", top_p, minimum=0.0)
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p={top_p!r}: expected above 0 and at most 1")
    return Sampling(
        jnp.float32(temperature),
        jnp.int32(min(top_k, jnp.iinfo(jnp.int32).max)),
        jnp.float32(top_p),
        temperature < float(jnp.finfo(jnp.float32).tiny),  # a smaller float32 is flushed to 0
    )


def sample(logits: jax.Array, sampling: Sampling, key: jax.Array, count: jax.Array) -> jax.Array:
    """Draws one token a row.

    A row's draw depends on the key, its index and its count alone.

    Args:
        logits: float32 ``[B, V]``.
        sampling: the settings.
        key: a random key.
        count: int32 ``[B]``, tokens the row has drawn before.

    Returns:
        int32 ``[B]``.
    """
    if sampling.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw(row: jax.Array, count: jax.Array, logits: jax.Array) -> jax.Array:
        row_key = jax.random.fold_in(jax.random.fold_in(key, row), count)
        return jax.random.categorical(row_key, logits).astype(jnp.int32)

    best = jnp.max(logits, axis=-1, keepdims=True)  # taken off first: nothing overflows but to −inf
    scaled = (logits - best) / sampling.temperature
    kept = keep_likeliest(scaled, sampling.top_k, sampling.top_p)
    return jax.vmap(draw)(jnp.arange(logits.shape[0]), count, kept)


def keep_likeliest(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Sets the logits that top-k or top-p drops to −inf; the likeliest token always stays.

    Args:
        logits: float32 ``[B, V]``.
        top_k: int32 scalar, 0 for all.
        top_p: float32 scalar.
    """
    vocab = logits.shape[-1]
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    rank = jnp.arange(vocab)[None, :]
    keep = rank < jnp.where(top_k > 0, top_k, vocab)
    probabilities = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # 1 keeps all, though a rounded sum may reach it early; a top_p that float32 rounds to 0, one.
    keep &= (before < top_p) | (top_p >= 1) | (rank == 0)
    rows = jnp.arange(logits.shape[0])[:, None]
    return jnp.full_like(logits, -jnp.inf).at[rows, order].set(jnp.where(keep, ranked, -jnp.inf))
