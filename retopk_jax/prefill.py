"""Dense prefill: read the prompts, fill the cache, keep the last queries of every layer.

A row is read alone, chunk after chunk, so its cache is the same whatever batch it is in.
"""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from retopk_jax.attention.checks import check_integer
from retopk_jax.errors import CapacityError, PromptError
from retopk_jax.kv_cache import KVCache, append_chunk, empty_kv_cache
from retopk_jax.language_model import Decoder, LanguageModel, Params
from retopk_jax.prefill_attention import chunk_attention, cudnn_serves, prompt_attention
from retopk_jax.programs import program

CHUNK = 512
"""Prompt tokens read at once where the cache is read block by block."""

CAPACITY_MULTIPLE = 256
"""Cache capacities are rounded up to this, so that few programs are compiled."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """Prompts that have been read: what every attention method starts from.

    Attributes:
        cache: keys and values of the prompts, with room for the tokens to come.
        tail_queries: per layer ``[B, T, H, D]``, queries of the last T prompt tokens after
            positional encoding, the newest last.
        logits: float32 ``[B, V]``, of the token after each prompt.
    """

    cache: KVCache
    tail_queries: tuple[jax.Array, ...]
    logits: jax.Array


@dataclass(frozen=True)
class Prefilled:
    """A context and what reading it took.

    Attributes:
        context: the prompts, read.
        seconds: wall time of reading, without compilation.
        compile_seconds: wall time of compilation.
    """

    context: Context
    seconds: float
    compile_seconds: float


@functools.partial(jax.jit, static_argnames=("decoder", "whole"), donate_argnames=("context",))
def read_chunk(
    params: Params,
    context: Context,
    tokens: jax.Array,
    row: jax.Array,
    start: jax.Array,
    valid: jax.Array,
    prompt_length: jax.Array,
    *,
    decoder: Decoder,
    whole: bool,
) -> Context:
    """Reads ``valid`` of the T tokens ``[T]`` of one row that has ``start`` tokens already."""
    cache = context.cache
    count = tokens.shape[0]
    offset = jnp.arange(count, dtype=jnp.int32)
    slots = jnp.where(offset < valid, start + offset, cache.capacity)  # beyond: not written
    layers: list[tuple[jax.Array, jax.Array, jax.Array]] = []

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        keys = append_chunk(cache.keys[layer], k[0], row, slots)
        values = append_chunk(cache.values[layer], v[0], row, slots)
        tail = context.tail_queries[layer]
        kept = tail.shape[1]
        both = jnp.concatenate([tail[row], q[0].astype(tail.dtype)], axis=0)
        newest = jax.lax.dynamic_slice_in_dim(both, valid, kept, axis=0)
        layers.append((keys, values, tail.at[row].set(newest)))
        if whole:
            return prompt_attention(q[0], k[0], v[0])[None]
        return chunk_attention(q[0], keys, values, row, start)[None]

    hidden = decoder.hidden(
        params, tokens[None], (start + offset)[None], prompt_length[None], attend
    )
    last = jax.lax.dynamic_slice_in_dim(hidden[0], valid - 1, 1, axis=0)[0]  # [E]
    keys, values, tails = zip(*layers, strict=True)
    return Context(
        KVCache(keys, values, cache.lengths.at[row].set(start + valid)),
        tails,
        context.logits.at[row].set(decoder.logits(params, last)),
    )


def _bucket(tokens: int) -> int:
    """Smallest of {4, 5, 6, 7} · 2^n that holds a whole prompt, at least 256."""
    step = max(64, 1 << max((tokens - 1).bit_length() - 3, 0))
    return max(256, -(-tokens // step) * step)


def rounded_capacity(tokens: int) -> int:
    """Slots a row that hold ``tokens``."""
    return -(-tokens // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE


def check_prompts(
    decoder: Decoder, prompts: Sequence[Sequence[int]], new_tokens: int, capacity: int | None
) -> int:
    """Checks token ids and room, before anything is allocated; returns the slots a row."""
    if not prompts:
        raise PromptError("prompts=[]: expected at least one prompt")
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise PromptError(f"prompt {row} is empty: expected at least one token")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= decoder.vocab_size:
            bad = low if low < 0 else high
            raise PromptError(
                f"prompt {row} holds token id {bad}: expected 0 to {decoder.vocab_size - 1}"
            )
    check_integer("max_new_tokens", new_tokens, minimum=1)
    if capacity is not None:
        check_integer("capacity", capacity, minimum=1)
    longest = max(len(prompt) for prompt in prompts)
    needed = longest + new_tokens
    if needed > decoder.max_positions:
        raise CapacityError(
            f"prompt of {longest} tokens + {new_tokens} new tokens = {needed}: the model has "
            f"{decoder.max_positions} positions"
        )
    if capacity is None:
        return rounded_capacity(needed)
    if capacity < needed:
        raise CapacityError(
            f"capacity={capacity}: expected at least {needed}, a prompt of {longest} tokens + "
            f"{new_tokens} new tokens"
        )
    return capacity


def prefill(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    capacity: int | None = None,
    tail_queries: int = 128,
    progress: Callable[[int, int], None] | None = None,
) -> Prefilled:
    """Reads prompts with full attention.

    Args:
        model: the model.
        prompts: token ids of every row, of any lengths.
        new_tokens: tokens to leave room for in every row.
        capacity: slots a row; None for the least that fits, rounded up.
        tail_queries: queries of the last prompt tokens to keep, for methods that start from them.
        progress: called with (tokens read, tokens in all) after every chunk.

    Raises:
        PromptError: no prompt, an empty one, or a token id outside the vocabulary.
        CapacityError: prompt and new tokens do not fit the capacity or the model's positions.
    """
    decoder, geometry = model.decoder, model.decoder.geometry
    slots = check_prompts(decoder, prompts, new_tokens, capacity)
    batch = len(prompts)
    dtype = jnp.dtype(decoder.dtype)
    tail = (batch, tail_queries, geometry.num_heads, geometry.head_dim)
    context = Context(
        empty_kv_cache(geometry, batch, slots, dtype),
        tuple(jnp.zeros(tail, dtype) for _ in range(geometry.num_layers)),
        jnp.zeros((batch, decoder.vocab_size), jnp.float32),
    )
    whole = cudnn_serves(geometry.head_dim, dtype)
    total, done, compiling = sum(len(prompt) for prompt in prompts), 0, 0.0
    began = time.perf_counter()
    for row, prompt in enumerate(prompts):
        chunk = _bucket(len(prompt)) if whole else CHUNK
        for start in range(0, len(prompt), chunk):
            piece = np.zeros(chunk, np.int32)
            valid = min(chunk, len(prompt) - start)
            piece[:valid] = prompt[start : start + valid]
            scalars = (jnp.int32(n) for n in (row, start, valid, len(prompt)))
            args = (model.params, context, jnp.asarray(piece), *scalars)
            run, seconds = program(read_chunk, *args, decoder=decoder, whole=whole)
            compiling += seconds
            context = run(*args)
            done += valid
            if progress is not None:
                jax.block_until_ready(context.logits)
                progress(done, total)
    jax.block_until_ready(context.logits)
    return Prefilled(context, time.perf_counter() - began - compiling, compiling)
