"""Random caches and queries on which the attention kernels are timed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import Chain, StepLoop, after, chain_of
from pallas_kernels.prefill_supports import prefill_supports
from pallas_kernels.recall.reference import normalise
from pallas_kernels.retopk_step import Remembered, retopk_step
from retopk_jax.attention import (
    AttentionMethod,
    ExactTopK,
    Full,
    Loki,
    Quest,
    ReTopK,
    SparQ,
    Step,
    StreamingLLM,
    TokenSelect,
)
from retopk_jax.attention.retopk import ReTopKState
from retopk_jax.recall_cache import RecallCache

HEADS, GROUPS, DIM = 28, 4, 128
BUDGET, CAPACITY, ENTRIES, WINDOW = 512, 32, 4, 32
NOISE = 0.2
"""Standard deviation of a query around its head's base, relative to it."""
QUERIES = 40
"""Queries of a layer before they repeat: more than the ring remembers."""
MIXTURE = {"reuse": 0.889, "fallback": 0.105, "refresh": 0.006}
"""Path shares of the source; both of the others scan."""
REUSE_ALWAYS, SCAN_ALWAYS = -1.0, 2.0
"""Values of tau that force a path."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layer:
    """One layer's cache and the queries of its steps.

    Attributes:
        keys: ``[B, G, S, D]``.
        values: ``[B, G, S, D]``.
        queries: ``[T, B, H, D]``.
        lengths: int32 ``[B]``.
    """

    keys: jax.Array
    values: jax.Array
    queries: jax.Array
    lengths: jax.Array


RetopkStep = Callable[[jax.Array, Layer, Remembered, jax.Array], tuple[jax.Array, Remembered]]
"""Takes queries, a cache, what is remembered and tau; gives the output and what is remembered."""


def layers_for(length: int, batch: int) -> int:
    """Layers so that a step's reads are long out of the L2 cache when they come again."""
    layer_bytes = 4 * GROUPS * DIM * length * batch
    return 16 if layer_bytes < 1e8 else 8 if layer_bytes < 1e9 else 4


def build(length: int, batch: int) -> tuple[list[Layer], list[Remembered]]:
    """Layers of random keys, and rings of the exact supports of queries like those to come."""
    lengths = jnp.full((batch,), length - 5, jnp.int32)

    @partial(jax.jit, static_argnums=1)
    def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(key, shape, jnp.bfloat16)

    @jax.jit
    def ring(queries: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        positions = lengths[:, None] - 1 - CAPACITY + jnp.arange(CAPACITY, dtype=jnp.int32)[None]
        supports = prefill_supports(queries, keys, positions, budget=BUDGET)
        return normalise(queries)[0].astype(keys.dtype), supports

    layers, rings = [], []
    for i in range(layers_for(length, batch)):
        k, v, base, noise = jax.random.split(jax.random.key(i), 4)
        keys = normal(k, (batch, GROUPS, length, DIM))
        queries = normal(base, (1, batch, HEADS, DIM))
        queries += NOISE * normal(noise, (QUERIES + CAPACITY, batch, HEADS, DIM))
        queries = queries.astype(jnp.bfloat16)
        layers.append(Layer(keys, normal(v, keys.shape), jnp.asarray(queries[CAPACITY:]), lengths))
        ring_queries, supports = ring(jnp.moveaxis(queries[:CAPACITY], 0, 2), keys)
        rings.append(Remembered.of(ring_queries, supports, jnp.full((batch,), CAPACITY, jnp.int32)))
    return layers, rings


def neighbours_alike(layer: Layer) -> Layer:
    """The layer with keys of which runs of 64 have most in common, as those of a text do."""
    runs = jnp.repeat(layer.keys[:, :, ::64], 64, axis=2)[:, :, : layer.keys.shape[2]]
    return replace(layer, keys=(runs + 0.3 * layer.keys).astype(layer.keys.dtype))


def loop_size(layers: int, least: int = 16) -> dict[str, int]:
    """Steps in the body of the loop, and rounds, so that a call takes every query about once.

    Args:
        layers: a power of two.
        least: steps in the body at least, another.
    """
    steps = max(least, layers)
    return {"steps": steps, "rounds": QUERIES * layers // steps}


def method_loop(attend: Any, layers: list[Layer]) -> StepLoop:
    """Steps of a method without state; ``attend(q, layer)`` gives the output."""
    attend = jax.jit(attend)  # traced once for all steps

    def step(
        chain: Chain, layer: Layer, carried: tuple[()], number: jax.Array, _: int
    ) -> tuple[Chain, tuple[()]]:
        return chain_of(attend(after(chain, layer.queries[number]), layer)), carried

    empty: list[tuple[()]] = [()] * len(layers)
    return StepLoop.compile(step, layers, empty, **loop_size(len(layers)))


def empty_microseconds(layers: list[Layer]) -> float:
    """Time of a step that only passes its query on, to be taken from the others'."""
    return method_loop(lambda q, _: q * 1.5, layers).time()[0]


def forced_paths(batch: int, steps: int, seed: int = 0) -> np.ndarray:
    """Values of tau, ``[steps, B, H]``, under which independent heads scan at the mixture."""
    scans = np.random.default_rng(seed).random((steps, batch, HEADS)) >= MIXTURE["reuse"]
    return np.where(scans, SCAN_ALWAYS, REUSE_ALWAYS).astype(np.float32)


def mixture_floor(
    taus: np.ndarray, length: int, unique: float, bandwidth: float
) -> tuple[float, dict[str, float]]:
    """Microseconds that reading takes at a mixture of paths, and the shares that scan.

    Args:
        taus: ``[steps, B, H]``, as `forced_paths` returns them.
        length: tokens stored.
        unique: candidates of a head that reuses.
        bandwidth: bytes a microsecond.
    """
    steps, batch = taus.shape[:2]
    scans = taus > 0
    heads = float(scans.mean())
    groups = float(scans.reshape(steps, batch, GROUPS, -1).any(-1).mean())
    rows = GROUPS * groups * (length - 5) + HEADS * ((1 - heads) * unique + BUDGET)
    shares = {"scanning_heads": round(heads, 4), "scanning_groups": round(groups, 4)}
    return batch * rows * 2 * DIM / bandwidth, shares


def fused_step(
    q: jax.Array, layer: Layer, remembered: Remembered, tau: jax.Array
) -> tuple[jax.Array, Remembered]:
    """The ReTopK step as the method takes it."""
    no = jnp.zeros(layer.lengths.shape, jnp.bool_)
    done = retopk_step(
        q,
        layer.keys,
        layer.values,
        remembered,
        layer.lengths,
        no,
        ~no,
        tau,
        entries=ENTRIES,
        window=WINDOW,
    )
    return done.out, done.remembered


def retopk_loop(
    taus: np.ndarray,
    layers: list[Layer],
    rings: list[Remembered],
    take: RetopkStep = fused_step,
) -> StepLoop:
    """Steps of ReTopK; what is carried is what is remembered.

    Args:
        taus: ``[steps, B, H]``, taken in turn.
        layers: caches.
        rings: what is remembered.
        take: a step.
    """
    take = jax.jit(take)  # traced once for all steps

    def step(
        chain: Chain, layer: Layer, remembered: Remembered, number: jax.Array, i: int
    ) -> tuple[Chain, Remembered]:
        q, tau = after(chain, layer.queries[number]), jnp.asarray(taus[i % len(taus)])
        out, remembered = take(q, layer, remembered, tau)
        return chain_of(out), remembered

    return StepLoop.compile(step, layers, rings, **loop_size(len(layers), max(16, len(taus))))


def mean_candidates(rings: list[Remembered]) -> float:
    """Unique candidates of a reuse so far; 0 where there was none."""
    reused = sum(float(jnp.sum(ring.paths[..., 0])) for ring in rings)
    return sum(float(jnp.sum(ring.candidates)) for ring in rings) / max(reused, 1.0)


@dataclass(frozen=True)
class Timed:
    """A method as it is timed.

    Attributes:
        name: of the method.
        part: which of its paths.
        method: with the settings of this module.
        scanned: numbers that a step reads for every token stored and key-value head.
        attended: numbers of keys and values of its support that a step reads for every token of it.
    """

    name: str
    part: str
    method: AttentionMethod
    scanned: float
    attended: int


def eight_methods() -> list[Timed]:
    """Every method at a budget of K tokens; TokenSelect also on its other path."""
    basis = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (1, GROUPS, DIM, DIM)))[0]
    first = BUDGET // 8
    vote = {"initial": first, "local": WINDOW, "selected": BUDGET - first - WINDOW}
    once, shared = HEADS * DIM, GROUPS * DIM
    return [
        Timed("full", "step", Full(), 2 * DIM, 0),
        Timed("exact", "step", ExactTopK(BUDGET), DIM, once),
        Timed("retopk", "step", ReTopK(BUDGET, CAPACITY, ENTRIES, WINDOW), 0, 2 * once),
        Timed("streaming", "step", StreamingLLM(first, BUDGET - first), 0, 2 * shared),
        Timed("quest", "step", Quest(BUDGET), 2 * DIM / 16, 2 * once),
        Timed("sparq", "step", SparQ(BUDGET), DIM // 4, 2 * shared),
        Timed("loki", "step", Loki(BUDGET, basis=basis), DIM // 2, 2 * once),
        Timed("tokenselect", "step", TokenSelect(**vote, theta=2.0), DIM, 2 * shared),
        Timed("tokenselect", "step, kept", TokenSelect(**vote, theta=-1.0), 0, 2 * shared),
    ]


def attend_loop(method: AttentionMethod, layers: list[Layer], rings: list[Remembered]) -> StepLoop:
    """Steps of a method through its own `AttentionMethod.attend`.

    Args:
        method: any.
        layers: caches.
        rings: what ReTopK remembers of them.
    """
    batch = layers[0].keys.shape[0]
    active = jnp.ones((batch,), jnp.bool_)
    rates = 1e4 ** (-jnp.arange(0, DIM, 2, dtype=jnp.float32) / DIM)
    frequencies = jnp.broadcast_to(rates[None], (batch, DIM // 2))

    def prime(layer: Layer, ring: Remembered) -> Any:
        if isinstance(method, ReTopK):
            cache = RecallCache(ring.queries, ring.supports, ring.pushed)
            scanned = jnp.zeros((batch, GROUPS), jnp.int32)
            return ReTopKState(cache, ring.paths, ring.candidates, ring.signals, scanned, None)
        tail = jnp.moveaxis(layer.queries[:1], 0, 1)
        return jax.jit(method.prime, static_argnums=0)(
            0, layer.keys, layer.values, tail, layer.lengths
        )

    def step(
        chain: Chain, layer: Layer, state: Any, number: jax.Array, _: int
    ) -> tuple[Chain, Any]:
        q = after(chain, layer.queries[number])
        index = jnp.full((batch,), number, jnp.int32)
        now = Step(layer.lengths, index, active, frequencies)
        out, state, _report = method.attend(0, state, q, layer.keys, layer.values, now)
        return chain_of(out), state

    states = [prime(layer, ring) for layer, ring in zip(layers, rings, strict=True)]
    steps = len(layers)
    return StepLoop.compile(step, layers, states, steps=steps, rounds=QUERIES)
