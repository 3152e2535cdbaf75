"""Decode steps of a whole model over keys, values and recall caches that nobody has read."""

import functools
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from benchmarks.kernel_times import kernel_times
from benchmarks.kernel_workload import REUSE_ALWAYS, SCAN_ALWAYS
from models import TransformerDecoder
from models.sharding import parameter_spec
from models.weights import dotted
from pallas_kernels.retopk_step.types import SIGNALS
from retopk_jax.attention import AttentionMethod, Report, ReTopK, Step
from retopk_jax.attention.retopk import ReTopKState
from retopk_jax.decode import DecodeState, begin, step_logits
from retopk_jax.kv_cache import KVCache, stored
from retopk_jax.language_model import Geometry, Params
from retopk_jax.recall_cache import RecallCache
from retopk_jax.sharding import (
    CACHE,
    HEADS,
    ROWS,
    SEQUENCE,
    TENSOR,
    constrained,
    per_device,
    placed,
    specs_by_rank,
)

SLAB = 2**16
"""Tokens of a cache that are drawn at once."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Forced(AttentionMethod):
    """ReTopK whose heads take given paths.

    Attributes:
        inner: the method; its tau is not used.
        scans: bool ``[T, layers, H]``, heads that scan at step t % T; the others reuse.
    """

    inner: ReTopK
    scans: jax.Array

    name: ClassVar[str] = "retopk"

    @property
    def shards(self) -> frozenset[str]:
        """Those of the method."""
        return self.inner.shards

    @property
    def array_specs(self) -> Any:
        """Scans by heads."""
        return replace(self, inner=P(), scans=P(None, None, TENSOR))

    def attend(
        self,
        layer: int | jax.Array,
        state: ReTopKState,
        q: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        step: Step,
    ) -> tuple[jax.Array, ReTopKState, Report]:
        """See `AttentionMethod.attend`."""
        scans = self.scans[step.index[0] % self.scans.shape[0], layer]
        tau = jnp.where(scans, SCAN_ALWAYS, REUSE_ALWAYS).astype(jnp.float32)
        inner = replace(self.inner, tau=tau, refresh=0)
        return inner.attend(layer, state, q, keys, values, step)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NoAttention(AttentionMethod):
    """The queries for output: what is left of a step is everything but attention."""

    name: ClassVar[str] = "none"

    @property
    def shards(self) -> frozenset[str]:
        """Heads and positions."""
        return frozenset({TENSOR, SEQUENCE})

    def attend(
        self,
        layer: int | jax.Array,
        state: tuple[()],
        q: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        step: Step,
    ) -> tuple[jax.Array, tuple[()], Report]:
        """See `AttentionMethod.attend`."""
        return q, (), Report()


@dataclass(frozen=True)
class Sizes:
    """A synthetic context.

    Attributes:
        length: slots of the cache; what steps write comes out of them.
        steps: that will be written in all.
        buffers: arrays of keys, and of values, that there are; fewer than layers are shared by
            them in turn.
    """

    length: int
    steps: int
    buffers: int

    @property
    def start(self) -> int:
        """Valid tokens before the first step."""
        return self.length - self.steps


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "mesh"))
def draw(
    key: jax.Array, *, shape: tuple[int, ...], dtype: Any, mesh: Mesh | None = None
) -> jax.Array:
    """Normal numbers ``[B, G, S, D]``, so many slots at a time that temporaries stay small."""
    if mesh is not None:
        batch, groups, slots, dim = shape
        shape = (batch, groups // mesh.shape[TENSOR], slots // mesh.shape[SEQUENCE], dim)

        def mine(key: jax.Array) -> jax.Array:
            place = lax.axis_index(TENSOR) * mesh.shape[SEQUENCE] + lax.axis_index(SEQUENCE)
            return draw(jax.random.fold_in(key, place), shape=shape, dtype=dtype)

        return per_device(mine, mesh, P(), CACHE)(key)
    slab = min(SLAB, shape[2])

    def fill(i: jax.Array, out: jax.Array) -> jax.Array:
        part = (*shape[:2], slab, shape[3])
        new = jax.random.normal(jax.random.fold_in(key, i), part, dtype)
        return lax.dynamic_update_slice_in_dim(out, new, i * slab, axis=2)

    return lax.fori_loop(0, -(-shape[2] // slab), fill, jnp.zeros(shape, dtype))


def cache_of(geometry: Geometry, sizes: Sizes, dtype: Any, mesh: Mesh | None) -> KVCache:
    """Random keys and values of one row."""
    shape = (1, geometry.num_kv_heads, sizes.length, geometry.head_dim)
    keys = jax.random.split(jax.random.key(0), 2 * sizes.buffers)
    layers = []
    for pair in zip(keys[: sizes.buffers], keys[sizes.buffers :], strict=True):
        k, v = (draw(key, shape=shape, dtype=dtype, mesh=mesh) for key in pair)
        layers.append(stored((k,), (v,)))
    lengths = jnp.full((1,), sizes.start, jnp.int32, device=placed(mesh, ROWS))
    return KVCache(tuple(k for (k,), _ in layers), tuple(v for _, (v,) in layers), lengths)


@functools.partial(jax.jit, static_argnames=("geometry", "method", "start", "dtype", "mesh"))
def ring_of(
    key: jax.Array,
    *,
    geometry: Geometry,
    method: tuple[int, int],
    start: int,
    dtype: Any,
    mesh: Mesh | None = None,
) -> ReTopKState:
    """A full ring of C entries of K tokens, no token in two of them: R·K + W candidates."""
    budget, capacity = method
    heads, dim = geometry.num_heads, geometry.head_dim
    stride = max(start // budget, 1)
    own = max(stride // capacity, 1)
    first, second = jax.random.split(key)
    queries = jax.random.normal(first, (1, heads, capacity, dim), jnp.float32)
    queries /= jnp.linalg.norm(queries, axis=-1, keepdims=True)
    place = jnp.arange(budget, dtype=jnp.int32)[None, None, None] * stride
    entry = jnp.arange(capacity, dtype=jnp.int32)[None, None, :, None] * own
    offset = jax.random.randint(second, (1, heads, capacity, budget), 0, own)
    supports = place + (entry + offset) % stride
    supports = jnp.where(supports < start, supports, -1).astype(jnp.int32)
    ring = RecallCache(queries.astype(dtype), supports, jnp.full((1,), capacity, jnp.int32))
    counted = ((1, heads, 3), (1, heads), (1, heads, *SIGNALS), (1, geometry.num_kv_heads))
    paths, candidates, signals, scanned = (jnp.zeros(shape, jnp.int32) for shape in counted)
    state = ReTopKState(ring, paths, candidates, signals, scanned, None)
    return jax.tree.map(
        lambda x, spec: constrained(x, mesh, spec), state, specs_by_rank(state, HEADS)
    )


def state_of(
    decoder: TransformerDecoder, method: AttentionMethod, cache: KVCache, start: int
) -> DecodeState:
    """The state in which a method goes on from a synthetic context."""
    geometry, mesh = decoder.geometry, decoder.mesh
    layers: list[Any] = [()] * geometry.num_layers
    if isinstance(method, Forced):
        ring = {
            "geometry": geometry,
            "method": (method.inner.budget, method.inner.capacity),
            "start": start,
            "dtype": decoder.dtype,
            "mesh": mesh,
        }
        keys = jax.random.split(jax.random.key(1), geometry.num_layers)
        layers = [ring_of(key, **ring) for key in keys]
    lengths = jnp.full((1,), start, jnp.int32, device=placed(mesh, ROWS))
    return begin(replace(cache, lengths=lengths), tuple(layers), mesh)


@functools.partial(
    jax.jit, static_argnames=("decoder", "steps"), donate_argnames=("state", "tokens")
)
def decode_steps(
    method: AttentionMethod,
    params: Params,
    state: DecodeState,
    tokens: jax.Array,
    *,
    decoder: TransformerDecoder,
    steps: int,
) -> tuple[DecodeState, jax.Array]:
    """Greedy decode steps, each fed what the one before it chose."""

    def body(i: jax.Array, carry: tuple[DecodeState, jax.Array]) -> tuple[DecodeState, jax.Array]:
        state, tokens = carry
        logits, state, _ = step_logits(decoder, method, params, state, tokens)
        chosen = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return state, constrained(chosen, decoder.mesh, ROWS)

    return lax.fori_loop(0, steps, body, (state, tokens))


@dataclass(frozen=True)
class Timing:
    """Device time of decode steps.

    Attributes:
        milliseconds: a step, median of the calls.
        spread: largest less smallest of the calls, relative to the median.
        candidates: unique candidates of a reuse; None where nothing reuses.
    """

    milliseconds: float
    spread: float
    candidates: float | None


@dataclass(frozen=True)
class Program:
    """Decode steps of one method and size, compiled.

    Attributes:
        run: takes the method, weights, state and tokens.
        decoder: the model.
        method: with which it was compiled; another one's numbers will do.
        sizes: of the context.
        calls: timed calls, after one that warms up.
        steps: of a call.
    """

    run: Any = field(repr=False)
    decoder: TransformerDecoder
    method: AttentionMethod
    sizes: Sizes
    calls: int
    steps: int

    def time(
        self, method: AttentionMethod, params: Params, cache: KVCache
    ) -> tuple[Timing, KVCache]:
        """Times the steps; the cache is donated, and comes back."""
        state = state_of(self.decoder, method, cache, self.sizes.start)
        tokens, taken = jnp.zeros(1, jnp.int32, device=placed(self.decoder.mesh, ROWS)), []
        for _ in range(self.calls + 1):
            jax.block_until_ready((state, tokens))
            began = time.perf_counter()
            state, tokens = self.run(method, params, state, tokens)
            jax.block_until_ready(tokens)
            taken.append((time.perf_counter() - began) / self.steps * 1e3)
        middle = statistics.median(taken[1:])
        candidates = None
        if isinstance(method, Forced):
            reused = sum(float(jnp.sum(layer.paths[..., 0])) for layer in state.layers)
            unique = sum(float(jnp.sum(layer.candidates)) for layer in state.layers)
            candidates = unique / reused if reused else None
        spread = (max(taken[1:]) - min(taken[1:])) / middle
        return Timing(middle, spread, candidates), state.cache

    def kernels(
        self, method: AttentionMethod, params: Params, cache: KVCache
    ) -> tuple[dict[str, list[float]], KVCache]:
        """Launches and microseconds of a step by kernel, the longest first; the cache as above."""
        state = state_of(self.decoder, method, cache, self.sizes.start)
        tokens = jnp.zeros(1, jnp.int32, device=placed(self.decoder.mesh, ROWS))
        jax.block_until_ready((state, tokens))

        def run() -> jax.Array:
            nonlocal state, tokens
            state, tokens = self.run(method, params, state, tokens)
            return tokens

        found = sorted(kernel_times(run).items(), key=lambda item: -sum(item[1]))
        each = {
            name: [round(x / self.steps, 3) for x in (len(times), sum(times))]
            for name, times in found
        }
        return each, state.cache


def compile_steps(
    decoder: TransformerDecoder,
    method: AttentionMethod,
    params: Params,
    sizes: Sizes,
    *,
    calls: int,
) -> Program:
    """Compiles the decode steps of a method from shapes alone; the weights may be shapes too."""
    steps, mesh = sizes.steps // (calls + 1), decoder.mesh

    def state() -> DecodeState:
        shape = (1, decoder.geometry.num_kv_heads, sizes.length, decoder.geometry.head_dim)
        arrays = tuple(jnp.zeros(shape, decoder.dtype) for _ in range(sizes.buffers))
        cache = KVCache(*stored(arrays, arrays), jnp.zeros(1, jnp.int32))
        return state_of(replace(decoder, mesh=None), method, cache, sizes.start)

    def located(leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed(mesh, spec))

    shapes = jax.eval_shape(state)
    specs = replace(specs_by_rank(shapes, HEADS), cache=specs_by_rank(shapes.cache, CACHE))
    weights = jax.tree_util.tree_map_with_path(
        lambda path, leaf: located(
            leaf, P() if mesh is None else parameter_spec(dotted(path), leaf.shape, mesh)
        ),
        params,
    )
    lowered = decode_steps.lower(
        method,
        weights,
        jax.tree.map(located, shapes, specs),
        located(jax.ShapeDtypeStruct((1,), jnp.int32), ROWS),
        decoder=decoder,
        steps=steps,
    )
    return Program(lowered.compile(), decoder, method, sizes, calls, steps)
