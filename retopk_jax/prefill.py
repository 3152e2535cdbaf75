"""Dense prefill: read the prompts, fill the cache, keep the last queries of every layer.

A row is read alone, chunk after chunk, so its cache is the same whatever batch it is in. What has
been read is a value: `extend` reads on after it, in a copy, as often as one likes.
"""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from retopk_jax.attention.checks import check_integer
from retopk_jax.device_memory import check_memory
from retopk_jax.errors import CapacityError, ConfigError, PromptError
from retopk_jax.kv_cache import KVCache, append_chunk, empty_kv_cache, kv_cache_bytes, stored
from retopk_jax.language_model import Decoder, LanguageModel, Params
from retopk_jax.prefill_attention import chunk_attention, cudnn_serves, prompt_attention
from retopk_jax.programs import program
from retopk_jax.recall_cache import FilledRecall
from retopk_jax.sharding import (
    CACHE,
    CHUNK_OF_ROW,
    DATA,
    HEADS,
    ROWS,
    SEQUENCE,
    TAIL,
    check_sizes,
    constrained,
    mine,
    per_device,
    placed,
    shards_of,
    specs_by_rank,
    ways,
)

CHUNK = 512
"""Prompt tokens read at once where the cache is read block by block."""

TAIL_QUERIES = 128
"""Queries of the last prompt tokens that are kept unless told otherwise."""

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
        recall: recall caches that the prompts have filled; None where each generation fills its
            own.
    """

    cache: KVCache
    tail_queries: tuple[jax.Array, ...]
    logits: jax.Array
    recall: FilledRecall | None = None

    def in_cache_of(self, cache: KVCache) -> "Context":
        """This context after its cache was donated to what has since written beyond it."""
        return replace(self, cache=replace(cache, lengths=self.cache.lengths))


@dataclass(frozen=True)
class Prefilled:
    """A context and what reading it took.

    Attributes:
        context: the prompts, read.
        seconds: wall time of reading, without compilation.
        compile_seconds: wall time of compilation.
        temporary_bytes: what reading took beside weights and context, at most.
    """

    context: Context
    seconds: float
    compile_seconds: float
    temporary_bytes: int


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
    cache, mesh = context.cache, decoder.mesh
    offset = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    keys, values, tails = list(cache.keys), list(cache.values), list(context.tail_queries)
    read = functools.partial(_read_layer, whole=whole)

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        own = replace(cache, keys=(keys[layer],), values=(values[layer],))
        cached = specs_by_rank(own, CACHE)
        outs = (CHUNK_OF_ROW, cached, TAIL)
        run = per_device(read, mesh, (CHUNK_OF_ROW, cached, TAIL, P(), P(), P()), outs)
        token = (q[0], k[0], v[0])
        out, own, tails[layer] = run(token, own, tails[layer], row, start, valid)
        (keys[layer],), (values[layer],) = own.keys, own.values
        return out[None]

    hidden = decoder.hidden(
        params, tokens[None], (start + offset)[None], prompt_length[None], attend
    )
    last = jax.lax.dynamic_slice_in_dim(hidden[0], valid - 1, 1, axis=0)[0]  # [E]
    here = jnp.arange(cache.batch) == row
    lengths = jnp.where(here, start + valid, cache.lengths)
    logits = jnp.where(here[:, None], decoder.logits(params, last)[None], context.logits)
    return Context(
        KVCache(tuple(keys), tuple(values), constrained(lengths, mesh, ROWS)),
        tuple(tails),
        constrained(logits, mesh, ROWS),
        context.recall,
    )


def _read_layer(
    tokens: tuple[jax.Array, jax.Array, jax.Array],
    cache: KVCache,
    tail: jax.Array,
    row: jax.Array,
    start: jax.Array,
    valid: jax.Array,
    *,
    whole: bool,
) -> tuple[jax.Array, KVCache, jax.Array]:
    """Attention of a chunk of one row in one layer, on a device's part of rows, heads and slots.

    Args:
        tokens: queries ``[T, H, D]``, keys and values ``[T, G, D]``.
        cache: of this layer alone.
        tail: ``[B, N, H, D]``, the last queries so far.
        row: int32 scalar, of the whole batch.
        start: int32 scalar, tokens of the row before these.
        valid: int32 scalar, tokens of the chunk that count.
        whole: the chunk is all that there is of the row.
    """
    (keys,), (values,) = cache.keys, cache.values
    q, k, v = tokens
    batch, _, slots, _ = keys.shape
    at = mine(row, DATA, batch)
    offset = jnp.arange(q.shape[0], dtype=jnp.int32)
    position = jnp.where(offset < valid, start + offset, jnp.iinfo(jnp.int32).max)  # not written
    slot = mine(position, SEQUENCE, slots)
    keys, values = append_chunk(keys, values, k, v, at, slot)
    held = jnp.minimum(at, batch - 1)  # of another device's row anything: it is not kept
    both = jnp.concatenate([tail[held], q.astype(tail.dtype)], axis=0)
    newest = jax.lax.dynamic_slice_in_dim(both, valid, tail.shape[1], axis=0)
    tail = tail.at[at].set(newest, mode="drop")
    cache = replace(cache, keys=(keys,), values=(values,))
    if whole:
        return prompt_attention(q, k, v), cache, tail
    out = chunk_attention(q, keys, values, held, start)
    if ways(DATA) > 1:
        out = jax.lax.psum(jnp.where(at < batch, out, 0), DATA)
    return out, cache, tail


def _bucket(tokens: int) -> int:
    """Smallest of {4, 5, 6, 7} · 2^n that holds a whole prompt, at least 256."""
    step = max(64, 1 << max((tokens - 1).bit_length() - 3, 0))
    return max(256, -(-tokens // step) * step)


def rounded_capacity(tokens: int) -> int:
    """Slots a row that hold ``tokens``."""
    return -(-tokens // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE


def check_prompts(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    capacity: int | None,
    before: Sequence[int] | None = None,
) -> int:
    """Checks token ids and room, before anything is allocated; returns the slots a row.

    Args:
        decoder: the model's functions.
        prompts: token ids of every row.
        new_tokens: tokens to leave room for in every row.
        capacity: slots a row; None for the least that fits, rounded up.
        before: tokens that every row holds already; None for none.
    """
    if not prompts:
        raise PromptError("prompts=[]: expected at least one prompt")
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            if before is not None:
                continue
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
    held = [0] * len(prompts) if before is None else before
    known, longest = max(
        ((n, len(prompt)) for n, prompt in zip(held, prompts, strict=True)), key=sum
    )
    counts = {"context": known, "prompt": longest}
    parts = [f"{name} of {count} tokens" for name, count in counts.items() if count]
    parts = " + ".join([*parts, f"{new_tokens} new tokens"])
    needed = known + longest + new_tokens
    if needed > decoder.max_positions:
        raise CapacityError(f"{parts} = {needed}: the model has {decoder.max_positions} positions")
    if capacity is not None and capacity < needed:
        raise CapacityError(f"capacity={capacity}: expected at least {needed}, a {parts}")
    slots = rounded_capacity(needed) if capacity is None else capacity
    check_sizes(len(prompts), slots, decoder.mesh)
    return slots


def check_context(decoder: Decoder, context: Context) -> None:
    """Refuses what cannot be continued.

    Raises:
        ConfigError: it is no context, its arrays were donated, or a model of other shapes or
            another dtype read it.
    """
    if not isinstance(context, Context):
        raise ConfigError(
            f"context is a {type(context).__name__}: expected a Context, which prefill, generate "
            "and load_context return as .context"
        )
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(context)):
        raise ConfigError(
            "context: its cache was donated; go on with the context that generate returned, or "
            "use donate=False"
        )
    geometry, keys = decoder.geometry, context.cache.keys
    names = ("layers", "query heads", "KV heads", "head_dim", "vocabulary", "dtype")
    found = (
        len(keys),
        context.tail_queries[0].shape[2],
        keys[0].shape[1],
        keys[0].shape[3],
        context.logits.shape[1],
        keys[0].dtype,
    )
    wanted = (
        geometry.num_layers,
        geometry.num_heads,
        geometry.num_kv_heads,
        geometry.head_dim,
        decoder.vocab_size,
        jnp.dtype(decoder.dtype),
    )
    for name, own, its in zip(names, wanted, found, strict=True):
        if own != its:
            raise ConfigError(f"context: read by a model of {name} {its}, this one has {own}")


def slots_after(
    decoder: Decoder,
    context: Context,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    capacity: int | None,
    *,
    donate: bool,
) -> int:
    """Checks what `extend` is to read; returns the slots a row that it makes."""
    check_context(decoder, context)
    cache, rows = context.cache, len(prompts)
    if cache.batch not in (1, rows):
        raise PromptError(
            f"{rows} prompts after a context of {cache.batch} rows: expected {cache.batch}, or a "
            "context of one row"
        )
    before = np.broadcast_to(np.asarray(cache.lengths), rows).tolist()
    slots = check_prompts(decoder, prompts, new_tokens, capacity, before)
    own = cache.capacity if capacity is None and donate and cache.batch == rows else 0
    return max(slots, own)


def context_bytes(decoder: Decoder, batch: int, slots: int, tail_queries: int) -> dict[str, int]:
    """Bytes of a context on each device, by part."""
    geometry, size = decoder.geometry, jnp.dtype(decoder.dtype).itemsize
    queries = batch * tail_queries * geometry.num_heads * geometry.head_dim * size
    cache = kv_cache_bytes(geometry, batch, slots, decoder.dtype)
    return {
        "keys and values": cache // shards_of(decoder.mesh, CACHE),
        "queries": geometry.num_layers * queries // shards_of(decoder.mesh, TAIL),
        "logits": batch * decoder.vocab_size * 4 // shards_of(decoder.mesh, ROWS),
    }


def prefill(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    capacity: int | None = None,
    tail_queries: int = TAIL_QUERIES,
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
        CapacityError: prompt and new tokens do not fit the capacity, the model's positions or the
            device.
    """
    decoder, geometry = model.decoder, model.decoder.geometry
    slots = check_prompts(decoder, prompts, new_tokens, capacity)
    batch = len(prompts)
    if decoder.mesh is not None:
        tail_queries = max(tail_queries, 1)  # XLA does not partition empty arrays
    parts = context_bytes(decoder, batch, slots, tail_queries)
    check_memory(f"a context of {batch} x {slots} tokens", parts)
    dtype = jnp.dtype(decoder.dtype)
    tail = (batch, tail_queries, geometry.num_heads, geometry.head_dim)
    rows, tails = placed(decoder.mesh, ROWS), placed(decoder.mesh, TAIL)
    context = Context(
        empty_kv_cache(geometry, batch, slots, dtype, decoder.mesh),
        tuple(jnp.zeros(tail, dtype, device=tails) for _ in range(geometry.num_layers)),
        jnp.zeros((batch, decoder.vocab_size), jnp.float32, device=rows),
    )
    whole = cudnn_serves(geometry.head_dim, dtype)
    return _read(model, context, prompts, [0] * batch, whole, progress)


def extend(
    model: LanguageModel,
    context: Context,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    capacity: int | None = None,
    donate: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Prefilled:
    """Reads more tokens after a context, which is not read again.

    Args:
        model: the one that read the context.
        context: of one row, which every prompt follows, or of a row a prompt.
        prompts: token ids that follow each row; one without any leaves its row as it is.
        new_tokens: tokens to leave room for in every row.
        capacity: slots a row; None for the least that fits, rounded up, or with ``donate`` for the
            context's own where they suffice.
        donate: read on in the context's own cache if it has the rows and the slots, so that nothing
            is copied; `Context.in_cache_of` gives the context back. False leaves it as it is.
        progress: called with (tokens read, tokens in all) after every chunk.

    Raises:
        PromptError: other rows than the context's, or a token id outside the vocabulary.
        CapacityError: context, prompt and new tokens do not fit the capacity, the model's positions
            or the device.
        ConfigError: another model's context, or one that was donated.
    """
    slots = slots_after(model.decoder, context, prompts, new_tokens, capacity, donate=donate)
    cache, rows = context.cache, len(prompts)
    before = np.broadcast_to(np.asarray(cache.lengths), rows).tolist()
    if not (donate and cache.sizes == (rows, slots)):
        parts = context_bytes(model.decoder, rows, slots, context.tail_queries[0].shape[1])
        check_memory(f"a copy of the context with {rows} x {slots} tokens", parts)
        cache = _copy_cache(cache, rows=rows, slots=slots, mesh=model.decoder.mesh)
    small = (context.tail_queries, (context.logits, context.cache.lengths), context.recall)
    tails, (logits, lengths), recall = _copy_rows(small, rows=rows, mesh=model.decoder.mesh)
    copied = Context(replace(cache, lengths=lengths), tails, logits, recall)
    return _read(model, copied, prompts, before, False, progress)


@functools.partial(jax.jit, static_argnames=("rows", "mesh"))
def _copy_rows(small: tuple[Any, Any, Any], *, rows: int, mesh: Mesh | None) -> Any:
    """Copies tail queries, what is by row, and recall caches to as many rows; B may be 1."""
    tails, others, recall = jax.tree.map(
        lambda x: jnp.copy(jnp.broadcast_to(x, (rows, *x.shape[1:]))), small
    )
    specs = specs_by_rank(recall, HEADS)
    recall = jax.tree.map(lambda x, spec: constrained(x, mesh, spec), recall, specs)
    return constrained(tails, mesh, TAIL), constrained(others, mesh, ROWS), recall


@functools.partial(jax.jit, static_argnames=("rows", "slots", "mesh"))
def _copy_cache(cache: KVCache, *, rows: int, slots: int, mesh: Mesh | None) -> KVCache:
    """Copies a cache to as many rows and slots; slots beyond its own are zeros."""

    def copy(x: jax.Array) -> jax.Array:  # [B, G, S, D]
        x = x[:, :, :slots]
        x = jnp.pad(x, ((0, 0), (0, 0), (0, slots - x.shape[2]), (0, 0)))
        return constrained(jnp.copy(jnp.broadcast_to(x, (rows, *x.shape[1:]))), mesh, CACHE)

    keys, values = tuple(map(copy, cache.keys)), tuple(map(copy, cache.values))
    return KVCache(*stored(keys, values), cache.lengths)


def _read(
    model: LanguageModel,
    context: Context,
    prompts: Sequence[Sequence[int]],
    before: Sequence[int],
    whole: bool,
    progress: Callable[[int, int], None] | None,
) -> Prefilled:
    """Reads prompts after ``before`` tokens of every row; the context is donated."""
    total, done, compiling, temporaries = sum(len(prompt) for prompt in prompts), 0, 0.0, 0
    began = time.perf_counter()
    for row, (known, prompt) in enumerate(zip(before, prompts, strict=True)):
        chunk = _bucket(len(prompt)) if whole else CHUNK
        if known:  # a question is short, and reading it should take no longer than it must
            chunk = min(CHUNK, max(64, 1 << max(len(prompt) - 1, 0).bit_length()))
        for start in range(0, len(prompt), chunk):
            piece = np.zeros(chunk, np.int32)
            valid = min(chunk, len(prompt) - start)
            piece[:valid] = prompt[start : start + valid]
            numbers = (row, known + start, valid, known + len(prompt))
            args = (model.params, context, jnp.asarray(piece), *map(jnp.int32, numbers))
            run, seconds = program(read_chunk, *args, decoder=model.decoder, whole=whole)
            compiling += seconds
            memory = run.memory_analysis()
            temporaries = max(temporaries, memory.temp_size_in_bytes if memory else 0)
            context = run(*args)
            done += valid
            if progress is not None:
                jax.block_until_ready(context.logits)
                progress(done, total)
    jax.block_until_ready(context.logits)
    return Prefilled(context, time.perf_counter() - began - compiling, compiling, temporaries)
