"""Programs compiled in the background, in the order in which they will be run."""

import functools
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from retopk_jax.attention import AttentionMethod
from retopk_jax.decode import DecodeState, Produced, Usage, decode_loop, prime
from retopk_jax.kv_cache import KVCache
from retopk_jax.language_model import LanguageModel
from retopk_jax.prefill import Context
from retopk_jax.sampling import Sampling, make_sampling
from retopk_jax.teacher_forcing import score_tokens

TAIL_QUERIES = 64
"""Queries kept of a prefill, so that methods which need fewer share its programs."""


def begin(context: Context, layers: tuple[Any, ...]) -> DecodeState:
    """Decode state of a context and a primed method."""
    batch = context.cache.batch
    return DecodeState(
        context.cache,
        layers,
        jnp.zeros(batch, jnp.int32),
        jnp.ones(batch, jnp.bool_),
        Usage(*(jnp.zeros(batch, jnp.float32) for _ in range(3))),
    )


class Programs:
    """Compiles what a method needs, while others run.

    Methods that differ in traced numbers only (tau, refresh, theta) share a program.
    """

    def __init__(self, model: LanguageModel, rows: int, capacity: int, tail: int, threads: int = 1):
        self._model = model
        self._context = _context_shapes(model, rows, capacity, tail)
        self._pool = ThreadPoolExecutor(max_workers=threads)
        self._jobs: dict[Hashable, Future[Any]] = {}

    def cancel(self) -> None:
        """Gives up what has not begun to compile."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def prime(self, method: AttentionMethod) -> Callable[..., Any]:
        """`retopk_jax.decode.prime`: takes a method and a context."""
        return self._compiled(("prime", *_signature(method)), self._lower_prime(method)).result()

    def score(self, method: AttentionMethod, tokens: int) -> Callable[..., Any]:
        """`score_tokens`: takes method, parameters, state and tokens ``[B, tokens]``."""
        key = ("score", tokens, *_signature(method))
        return self._compiled(key, self._lower_score(method, tokens)).result()

    def decode(self, method: AttentionMethod, columns: int, ends: int) -> Callable[..., Any]:
        """`decode_loop`: takes method, parameters, state, produced, sampling, ends and limit."""
        key = ("decode", columns, ends, *_signature(method))
        return self._compiled(key, self._lower_decode(method, columns, ends)).result()

    def prepare_score(self, method: AttentionMethod, tokens: int) -> None:
        """Begins to compile what scoring needs."""
        self._compiled(("prime", *_signature(method)), self._lower_prime(method))
        key = ("score", tokens, *_signature(method))
        self._compiled(key, self._lower_score(method, tokens))

    def prepare_decode(self, method: AttentionMethod, columns: int, ends: int) -> None:
        """Begins to compile what generating needs."""
        self._compiled(("prime", *_signature(method)), self._lower_prime(method))
        key = ("decode", columns, ends, *_signature(method))
        self._compiled(key, self._lower_decode(method, columns, ends))

    def _compiled(self, key: Hashable, build: Callable[[], Any]) -> Future[Any]:
        if key not in self._jobs:
            self._jobs[key] = self._pool.submit(build)
        return self._jobs[key]

    def _lower_prime(self, method: AttentionMethod) -> Callable[[], Any]:
        return lambda: prime.lower(method, self._context).compile()

    def _state(self, method: AttentionMethod) -> DecodeState:
        def make(method: AttentionMethod, context: Context) -> DecodeState:
            return begin(context, prime(method, context))

        return jax.eval_shape(make, method, self._context)

    def _lower_score(self, method: AttentionMethod, tokens: int) -> Callable[[], Any]:
        def build() -> Any:
            rows = self._context.cache.lengths.shape[0]
            given = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
            return score_tokens.lower(
                method, self._model.params, self._state(method), given, decoder=self._model.decoder
            ).compile()

        return build

    def _lower_decode(self, method: AttentionMethod, columns: int, ends: int) -> Callable[[], Any]:
        def build() -> Any:
            rows = self._context.cache.lengths.shape[0]
            key = jax.eval_shape(lambda: jax.random.key(0))
            produced = Produced(
                jax.ShapeDtypeStruct((rows, columns), jnp.int32),  # pyright: ignore
                jax.ShapeDtypeStruct((rows,), jnp.int32),  # pyright: ignore
                key,  # pyright: ignore
            )
            return decode_loop.lower(
                method,
                self._model.params,
                self._state(method),
                produced,
                greedy(),
                jax.ShapeDtypeStruct((ends,), jnp.int32),
                jax.ShapeDtypeStruct((), jnp.int32),
                decoder=self._model.decoder,
            ).compile()

        return build


def forget_programs() -> None:
    """Drops shared programs and what has not begun to compile, which an exit would wait for."""
    for programs in _SHARED:
        programs.cancel()
    _SHARED.clear()
    shared_programs.cache_clear()


_SHARED: list[Programs] = []


@functools.lru_cache(maxsize=4)
def shared_programs(
    model: LanguageModel, rows: int, capacity: int, tail: int, threads: int
) -> Programs:
    """Programs of these sizes, kept for the experiments of one process."""
    programs = Programs(model, rows, capacity, tail, threads)
    _SHARED.append(programs)
    return programs


def greedy() -> Sampling:
    """Sampling that takes the likeliest token."""
    return make_sampling(0.0, 0, 1.0)


def _signature(method: AttentionMethod) -> tuple[Hashable, ...]:
    leaves, tree = jax.tree.flatten(method)
    kinds = tuple((np.shape(leaf), jax.typeof(jnp.asarray(leaf)).dtype.name) for leaf in leaves)
    return (type(method).__name__, str(tree), kinds)


def _context_shapes(model: LanguageModel, rows: int, capacity: int, tail: int) -> Context:
    """What `prefill` returns, as shapes."""
    geometry, dtype = model.decoder.geometry, jnp.dtype(model.decoder.dtype)
    cached = jax.ShapeDtypeStruct((rows, geometry.num_kv_heads, capacity, geometry.head_dim), dtype)
    queries = jax.ShapeDtypeStruct((rows, tail, geometry.num_heads, geometry.head_dim), dtype)
    layers = range(geometry.num_layers)

    def shapes() -> Any:
        return Context(
            KVCache(
                tuple(cached for _ in layers),  # pyright: ignore
                tuple(cached for _ in layers),  # pyright: ignore
                jax.ShapeDtypeStruct((rows,), jnp.int32),  # pyright: ignore
            ),
            tuple(queries for _ in layers),  # pyright: ignore
            jax.ShapeDtypeStruct((rows, model.decoder.vocab_size), jnp.float32),  # pyright: ignore
        )

    return shapes()
