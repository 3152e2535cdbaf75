"""The decode step, and the loop of it: one compiled program each, whatever the lengths."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from retopk_jax.attention.base import AttentionMethod, LayerState, PathStatistics, Report, Step
from retopk_jax.attention.retopk import ReTopK
from retopk_jax.errors import CapacityError, ConfigError, PromptError
from retopk_jax.kv_cache import KVCache, append_step
from retopk_jax.language_model import Decoder, LanguageModel, Params
from retopk_jax.prefill import Context, check_context
from retopk_jax.recall_cache import FilledRecall, RecallCache, fill_from_prompt
from retopk_jax.sampling import Sampling, sample
from retopk_jax.sharding import (
    CACHE,
    HEADS,
    ROWS,
    SEQUENCE,
    TAIL,
    check_method,
    mine,
    on_every_host,
    per_device,
    placed,
    specs_by_rank,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Usage:
    """What a decode step of a row took, on average over its steps so far.

    Attributes:
        tokens: float32 ``[B]``, tokens attended by a head of a layer.
        key_bytes: float32 ``[B]``, keys, or what stands for them while ranking, read in all layers.
        value_bytes: float32 ``[B]``, values read in all layers.
    """

    tokens: jax.Array
    key_bytes: jax.Array
    value_bytes: jax.Array


def _update_usage(
    usage: Usage, reports: list[Report], cache: KVCache, step: Step, heads: int
) -> Usage:
    """Running means with this step taken in."""
    groups, dim = cache.keys[0].shape[1], cache.keys[0].shape[3]
    size = cache.keys[0].dtype.itemsize
    lengths = step.lengths.astype(jnp.float32)
    tokens, keys, values = [], [], []
    supports = [report.support for report in reports if report.support is not None]
    counts = iter(())
    if supports:  # [layers, B, H], of all layers in one kernel
        counts = iter(jnp.sum(jnp.stack(supports) >= 0, axis=3, dtype=jnp.float32))
    for report in reports:
        if report.support is None:
            attended = jnp.broadcast_to(lengths[:, None], (lengths.shape[0], heads))
            read = lengths * (groups * dim)
        else:
            attended = next(counts)
            read = attended * dim if report.value_elements is None else report.value_elements
        tokens.append(attended / heads)
        values.append(read)
        if report.key_elements is not None:
            keys.append(report.key_elements)
    count = (step.index + 1).astype(jnp.float32)

    def mean(old: jax.Array, parts: list[jax.Array], unit: float) -> jax.Array:
        # Layer after layer, then the heads: their sum is one collective where they are sharded.
        total = sum(parts[1:], parts[0]) if parts else jnp.zeros_like(lengths)
        new = jnp.sum(total.reshape(lengths.shape[0], -1), axis=1) * unit
        return jnp.where(step.active, old + (new - old) / count, old)

    return Usage(
        mean(usage.tokens, tokens, 1 / len(tokens)),
        mean(usage.key_bytes, keys, size),
        mean(usage.value_bytes, values, size),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """Everything a decode step reads and replaces.

    Attributes:
        cache: keys and values.
        layers: the attention method's state, per layer.
        index: int32 ``[B]``, decode steps done by each row, t.
        active: bool ``[B]``, rows that have not ended.
        usage: what the steps read on average.
    """

    cache: KVCache
    layers: tuple[LayerState, ...]
    index: jax.Array
    active: jax.Array
    usage: Usage


@functools.partial(jax.jit, static_argnames=("mesh",))
def prime(
    method: AttentionMethod, context: Context, *, mesh: Mesh | None = None
) -> tuple[LayerState, ...]:
    """State of every layer after a prefill."""
    wanted, cache, recall, states = method.tail_queries, context.cache, context.recall, []
    if recall is not None and not _fits(method, recall):
        recall = None
    for layer, (keys, values, tail) in enumerate(
        zip(cache.keys, cache.values, context.tail_queries, strict=True)
    ):
        known = None if recall is None else (recall.layers[layer], recall.lengths)
        args = (keys, values, tail[:, tail.shape[1] - wanted :], cache.lengths, known)
        fill = functools.partial(_prime_layer, method, layer)
        shapes = jax.eval_shape(fill, *args)
        if jax.tree.leaves(shapes):
            specs = specs_by_rank(shapes, HEADS)
            ins = (CACHE, CACHE, TAIL, ROWS, specs_by_rank(known, HEADS))
            fill = per_device(fill, mesh, ins, specs)
            shapes = fill(*args)
        states.append(shapes)
    return tuple(states)


def _fits(method: AttentionMethod, recall: FilledRecall) -> bool:
    """Whether recall caches are of the sizes that a method remembers."""
    return isinstance(method, ReTopK) and recall.sizes == (method.capacity, method.budget)


def _prime_layer(
    method: AttentionMethod,
    layer: int,
    keys: jax.Array,
    values: jax.Array,
    tail: jax.Array,
    lengths: jax.Array,
    known: tuple[RecallCache, jax.Array] | None,
) -> LayerState:
    """`AttentionMethod.prime`; of ReTopK with what is known of its recall cache taken over."""
    state = method.prime(layer, keys, values, tail, lengths)
    if known is None or not isinstance(method, ReTopK):
        return state
    return replace(state, cache=fill_from_prompt(tail, keys, lengths, known, budget=method.budget))


def remember(model: LanguageModel, method: ReTopK, context: Context) -> Context:
    """The context with the recall caches that a method fills from it, for who shares or stores it.

    Raises:
        ConfigError: the context kept too few queries, was read by another model, or was donated.
    """
    check_context(model.decoder, context)
    check_tail_queries(method, context)
    states = prime(method, replace(context, recall=None), mesh=model.decoder.mesh)
    filled = FilledRecall(tuple(s.cache for s in states), jnp.copy(context.cache.lengths))
    return replace(context, recall=filled)


def check_tail_queries(method: AttentionMethod, context: Context) -> None:
    """Raises ConfigError where the method needs more tail queries than the context kept."""
    kept = context.tail_queries[0].shape[1]
    if method.tail_queries > kept:
        raise ConfigError(
            f"{method.name} needs the queries of the last {method.tail_queries} prompt tokens: "
            f"the context kept {kept}; prefill with tail_queries={method.tail_queries}"
        )


def start(method: AttentionMethod, context: Context, *, mesh: Mesh | None = None) -> DecodeState:
    """Decode state of a context that has been read, on the decoder's mesh.

    Raises:
        ConfigError: the method needs more tail queries than the context kept, or cannot be sharded
            so.
    """
    check_tail_queries(method, context)
    check_method(method.name, method.shards, mesh)
    return begin(context.cache, prime(method, context, mesh=mesh), mesh)


def begin(cache: KVCache, layers: tuple[LayerState, ...], mesh: Mesh | None = None) -> DecodeState:
    """Decode state before the first step."""
    batch, rows = cache.batch, placed(mesh, ROWS)
    return DecodeState(
        cache,
        layers,
        jnp.zeros(batch, jnp.int32, device=rows),
        jnp.ones(batch, jnp.bool_, device=rows),
        Usage(*(jnp.zeros(batch, jnp.float32, device=rows) for _ in range(3))),
    )


@jax.jit
def attend_layer(
    method: AttentionMethod,
    layer: jax.Array | int,
    state: LayerState,
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    step: Step,
) -> tuple[jax.Array, LayerState, Report]:
    """`AttentionMethod.attend`, traced and lowered once for all layers."""
    return method.attend(layer, state, q, keys, values, step)


def layer_step(
    method: AttentionMethod,
    layer: jax.Array | int,
    state: LayerState,
    token: tuple[jax.Array, jax.Array, jax.Array],
    cache: KVCache,
    slot: jax.Array,
    step: Step,
) -> tuple[jax.Array, LayerState, Report, KVCache]:
    """Appends a token a row to the cache of one layer, and attends; on a device's part of them.

    Args:
        method: how to attend.
        layer: index of the layer.
        state: of the method.
        token: queries ``[B, H, D]``, keys and values ``[B, G, D]``.
        cache: of this layer alone.
        slot: int32 ``[B]``, where to append.
        step: the decode step.
    """
    (keys,), (values,) = cache.keys, cache.values
    q, k, v = token
    with jax.named_scope("append"):
        keys, values = append_step(keys, values, k, v, mine(slot, SEQUENCE, keys.shape[2]))
    with jax.named_scope("attention"):
        out, state, report = attend_layer(method, layer, state, q, keys, values, step)
    return out, state, report, replace(cache, keys=(keys,), values=(values,))


@functools.partial(jax.jit, static_argnames=("mesh",))
def sharded_layer_step(
    method: AttentionMethod,
    layer: jax.Array | int,
    state: LayerState,
    token: tuple[jax.Array, jax.Array, jax.Array],
    cache: KVCache,
    slot: jax.Array,
    step: Step,
    *,
    mesh: Mesh,
) -> tuple[jax.Array, LayerState, Report, KVCache]:
    """`layer_step` on every device of a mesh; what a report counts comes in parts."""

    def local(*args: Any) -> tuple[jax.Array, LayerState, Report, KVCache]:
        out, state, report, cache = layer_step(*args)
        counts = {
            name: None if (count := getattr(report, name)) is None else count[:, None]
            for name in ("key_elements", "value_elements")
        }
        return out, state, replace(report, **counts), cache

    kept, cached = specs_by_rank(state, HEADS), specs_by_rank(cache, CACHE)
    ins = (method.array_specs, P(), kept, HEADS, cached, ROWS, ROWS)
    run = per_device(local, mesh, ins, (HEADS, kept, HEADS, cached))
    return run(method, layer, state, token, cache, slot, step)


def step_logits(
    decoder: Decoder,
    method: AttentionMethod,
    params: Params,
    state: DecodeState,
    tokens: jax.Array,
) -> tuple[jax.Array, DecodeState, tuple[Report, ...]]:
    """One decode step: appends one token a row and returns the logits of the next.

    A pure function for callers with a jit of their own; `decode_step` is the compiled one. A row
    that has ended, or has no slot left, writes nothing. Layers of a cache with fewer arrays than
    layers take them in turn: no model's decode, but its time where all would not fit.

    Args:
        decoder: the model's functions.
        method: how to attend.
        params: the weights.
        state: of the rows so far.
        tokens: int32 ``[B]``.

    Returns:
        float32 ``[B, V]``, the new state, and a report per layer.
    """
    cache, active = state.cache, state.active
    slot = jnp.where(active, cache.lengths, cache.capacity)
    lengths = cache.lengths + active.astype(jnp.int32)
    step = Step(lengths, state.index, active, decoder.inverse_frequencies(cache.lengths + 1))
    keys, values = list(cache.keys), list(cache.values)
    layers: list[LayerState] = []
    reports: list[Report] = []
    run = layer_step
    if decoder.mesh is not None:
        run = functools.partial(sharded_layer_step, mesh=decoder.mesh)

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        at = layer % len(keys)
        own = replace(cache, keys=(keys[at],), values=(values[at],))
        token = (q[:, 0], k[:, 0], v[:, 0])
        out, new, report, own = run(method, layer, state.layers[layer], token, own, slot, step)
        (keys[at],), (values[at],) = own.keys, own.values
        layers.append(new)
        reports.append(report)
        return out[:, None].astype(q.dtype)

    hidden = decoder.hidden(
        params, tokens[:, None], cache.lengths[:, None], cache.lengths + 1, attend
    )
    logits = decoder.logits(params, hidden[:, 0])
    new_state = DecodeState(
        KVCache(tuple(keys), tuple(values), lengths),
        tuple(layers),
        state.index + active.astype(jnp.int32),
        active,
        _update_usage(state.usage, reports, cache, step, decoder.geometry.num_heads),
    )
    return logits, new_state, tuple(reports)


_compiled_step = jax.jit(step_logits, static_argnames=("decoder",), donate_argnames=("state",))


@dataclass(frozen=True)
class Session:
    """A running decode for callers with a loop of their own.

    Attributes:
        model: the model.
        method: how it attends.
        state: of the rows; donated to the next step, so use only the newest session.
        room: tokens that every row can still take.
    """

    model: LanguageModel
    method: AttentionMethod
    state: DecodeState
    room: int


def start_session(model: LanguageModel, method: AttentionMethod, context: Context) -> Session:
    """Begins decoding after a prefill; the context's cache passes to the session.

    Raises:
        ConfigError: the method's settings do not fit the model, or the context kept too few
            queries for it, was read by another model, or was donated.
    """
    method.check(model.decoder.geometry)
    check_context(model.decoder, context)
    longest = int(jnp.max(context.cache.lengths))
    room = min(context.cache.capacity, model.decoder.max_positions) - longest
    state = start(method, context, mesh=model.decoder.mesh)
    return Session(model, method, state, room)


def decode_step(
    session: Session, tokens: Sequence[int] | jax.Array
) -> tuple[jax.Array, Session, tuple[Report, ...]]:
    """Feeds one token a row.

    Args:
        session: the newest one; its state is donated.
        tokens: int32 ``[B]``.

    Returns:
        Logits of the next tokens, float32 ``[B, V]``, the next session, and a report per layer.

    Raises:
        CapacityError: no slot is left; nothing was done.
        ConfigError: the session is not the newest one.
    """
    if session.state.index.is_deleted():
        raise ConfigError("session: a step was taken from it; go on with the session it returned")
    if session.room < 1:
        raise CapacityError(
            f"the cache of {session.state.cache.capacity} tokens a row is full: prefill with a "
            "larger capacity"
        )
    tokens = jnp.asarray(tokens, jnp.int32)
    if tokens.shape != (session.state.cache.batch,):
        raise PromptError(
            f"tokens of shape {tokens.shape}: expected one a row, ({session.state.cache.batch},)"
        )
    model = session.model
    logits, state, reports = _compiled_step(
        model.decoder, session.method, model.params, session.state, tokens
    )
    return logits, replace(session, state=state, room=session.room - 1), reports


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Produced:
    """Tokens generated so far.

    Attributes:
        tokens: int32 ``[B, M]``, new tokens, those that ended a row included.
        count: int32 ``[B]``, new tokens of each row.
        key: the sampler's random key.
    """

    tokens: jax.Array
    count: jax.Array
    key: jax.Array


def emit(
    produced: Produced,
    state: DecodeState,
    logits: jax.Array,
    sampling: Sampling,
    eos: jax.Array,
    limit: jax.Array,
) -> tuple[Produced, DecodeState]:
    """Samples the next token of every active row and ends the rows that are through.

    Args:
        produced: tokens so far.
        state: of the rows.
        logits: float32 ``[B, V]``.
        sampling: how to choose.
        eos: int32 ``[E]``, tokens that end a row.
        limit: int32 scalar, tokens to produce at most.
    """
    active = state.active
    token = sample(logits, sampling, produced.key, produced.count)
    rows = jnp.arange(token.shape[0])
    column = jnp.where(active, produced.count, produced.tokens.shape[1])
    tokens = produced.tokens.at[rows, column].set(token, mode="drop")
    count = produced.count + active.astype(jnp.int32)
    ended = jnp.any(token[:, None] == eos[None, :], axis=-1) | (count >= limit)
    return Produced(tokens, count, produced.key), replace(state, active=active & ~ended)


def newest_tokens(produced: Produced) -> jax.Array:
    """Last token of every row, int32 ``[B]``."""
    last = jnp.maximum(produced.count - 1, 0)
    return jnp.take_along_axis(produced.tokens, last[:, None], axis=1)[:, 0]


@functools.partial(jax.jit, static_argnames=("decoder",), donate_argnames=("state", "produced"))
def decode_loop(
    method: AttentionMethod,
    params: Params,
    state: DecodeState,
    produced: Produced,
    sampling: Sampling,
    eos: jax.Array,
    limit: jax.Array,
    *,
    decoder: Decoder,
) -> tuple[Produced, DecodeState]:
    """Decodes until every row has ended, on the device from start to end."""

    def unfinished(carry: tuple[Produced, DecodeState]) -> jax.Array:
        return jnp.any(carry[1].active)

    def body(carry: tuple[Produced, DecodeState]) -> tuple[Produced, DecodeState]:
        produced, state = carry
        logits, state, _ = step_logits(decoder, method, params, state, newest_tokens(produced))
        return emit(produced, state, logits, sampling, eos, limit)

    return jax.lax.while_loop(unfinished, body, (produced, state))


@functools.partial(jax.jit, static_argnames=("decoder",), donate_argnames=("state", "produced"))
def decode_one(
    method: AttentionMethod,
    params: Params,
    state: DecodeState,
    produced: Produced,
    sampling: Sampling,
    eos: jax.Array,
    limit: jax.Array,
    *,
    decoder: Decoder,
) -> tuple[Produced, DecodeState]:
    """One turn of `decode_loop`, for streaming."""
    logits, state, _ = step_logits(decoder, method, params, state, newest_tokens(produced))
    return emit(produced, state, logits, sampling, eos, limit)


first_token = jax.jit(emit, donate_argnames=("produced",))
"""`emit` on the logits of the prefill."""


def statistics(method: AttentionMethod, state: DecodeState) -> list[PathStatistics] | None:
    """Path statistics of every row so far."""
    counters = jax.tree.map(lambda x: on_every_host(x) if x.ndim < 4 else x, state.layers)
    return method.path_statistics(counters)
