"""The compiled decode step and loop: no copy of the cache, no second trace."""

import math
import re
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import pytest

from retopk_jax.attention import AttentionMethod, ExactTopK, Full, ReTopK
from retopk_jax.decode import (
    DecodeState,
    Produced,
    decode_loop,
    emit,
    newest_tokens,
    start,
    step_logits,
)
from retopk_jax.generate import generate
from retopk_jax.kv_cache import empty_kv_cache
from retopk_jax.prefill import Context, prefill
from retopk_jax.sampling import make_sampling
from tests.retopk_jax.toy import ToyModel, toy_model

LAYERS, HEADS, KV_HEADS, DIM = 3, 8, 4, 128
SLOTS = 8192
RETOPK = ReTopK(budget=64, capacity=9, recall=2, window=8)


def big_model() -> ToyModel:
    return toy_model(layers=LAYERS, heads=HEADS, kv_heads=KV_HEADS, dim=DIM, width=8)


def abstract_state(model: ToyModel, method: AttentionMethod, batch: int) -> DecodeState:
    def build() -> DecodeState:
        geometry = model.decoder.geometry
        tail = (batch, method.tail_queries, geometry.num_heads, geometry.head_dim)
        context = Context(
            empty_kv_cache(geometry, batch, SLOTS, jnp.float32),
            tuple(jnp.zeros(tail) for _ in range(geometry.num_layers)),
            jnp.zeros((batch, model.decoder.vocab_size)),
        )
        return start(method, context)

    return jax.eval_shape(build)


def compiled_programs(method: AttentionMethod, batch: int) -> dict[str, jax.stages.Compiled]:
    model = big_model()
    state = abstract_state(model, method, batch)
    tokens = jax.ShapeDtypeStruct((batch,), jnp.int32)
    step = jax.jit(step_logits, static_argnames="decoder", donate_argnames="state")
    produced = jax.eval_shape(
        lambda: Produced(
            jnp.zeros((batch, 64), jnp.int32), jnp.zeros(batch, jnp.int32), jax.random.key(0)
        )
    )
    controls = (make_sampling(), jnp.array([-1], jnp.int32), jnp.int32(9))
    loop_args = (method, model.params, state, produced, *controls)
    return {
        "step": step.lower(model.decoder, method, model.params, state, tokens).compile(),
        "loop": decode_loop.lower(*loop_args, decoder=model.decoder).compile(),
    }


@pytest.mark.parametrize(
    ("method", "batch"),
    [(Full(), 1), (ExactTopK(64), 1), (RETOPK, 1), (RETOPK, 2)],
    ids=["full", "exact", "retopk", "retopk-2-rows"],
)
def test_the_cache_is_updated_in_place(method: AttentionMethod, batch: int) -> None:
    cache = (batch, KV_HEADS, SLOTS, DIM)
    ring = (batch, HEADS, RETOPK.capacity)  # of queries or supports
    cache_bytes = 2 * LAYERS * math.prod(cache) * 4
    for name, compiled in compiled_programs(method, batch).items():
        text = compiled.as_text()
        assert text is not None
        assert cache in map(result_shape, text.splitlines()), "this test looks for nothing"
        copies = [
            line.strip()
            for line in text.splitlines()
            if re.search(r" (copy|copy-start|transpose)\(", line)
            and (
                math.prod(result_shape(line)) >= math.prod(cache) or result_shape(line)[:3] == ring
            )
        ]
        assert not copies, f"{name}: {copies[0]}"
        memory = compiled.memory_analysis()
        assert memory is not None
        # The state goes in and comes out in the same buffers; only the logits are new.
        assert memory.alias_size_in_bytes >= cache_bytes, name
        assert memory.output_size_in_bytes - memory.alias_size_in_bytes < cache_bytes / 100, name
        assert memory.temp_size_in_bytes <= cache_bytes / 100, name


def result_shape(line: str) -> tuple[int, ...]:
    """Shape of the array that a line of HLO defines; (0,) for a tuple or no definition."""
    dims = re.search(r"= \w+\[([\d,]*)\]", line)
    return tuple(int(n) for n in dims[1].split(",") if n) if dims else (0,)


# ---- one trace -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", [Full(), ExactTopK(8), ReTopK(budget=8, capacity=4, recall=2)])
def test_one_trace_serves_every_length(method: AttentionMethod) -> None:
    model = toy_model()
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(method, state, tokens):
        return step_logits(model.decoder, method, model.params, state, tokens)

    for prompts in ([[1], [2, 3]], [list(range(90)), [5] * 17], [[7] * 200, [1] * 199]):
        context = prefill(
            model, prompts, new_tokens=2, capacity=256, tail_queries=method.tail_queries
        ).context
        state = start(method, context)
        for _ in range(2):
            _, state, _ = step(method, state, jnp.zeros(2, jnp.int32))
        assert state.cache.lengths.tolist() == [len(prompt) + 2 for prompt in prompts]


def test_changing_numbers_does_not_trace_again() -> None:
    model = toy_model()
    context = prefill(model, [[1, 2, 3]], new_tokens=4, tail_queries=4).context
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def turn(method, state, produced, sampling, limit):
        tokens = newest_tokens(produced)
        logits, state, _ = step_logits(model.decoder, method, model.params, state, tokens)
        return emit(produced, state, logits, sampling, jnp.array([-1], jnp.int32), limit)

    produced = Produced(jnp.zeros((1, 4), jnp.int32), jnp.zeros(1, jnp.int32), jax.random.key(0))
    base = ReTopK(budget=4, capacity=4, recall=2, window=1)
    for limit, (tau, refresh, temperature, top_k, top_p) in enumerate(
        [(0.85, 128, 1.0, 0, 1.0), (-0.5, 0, 0.3, 5, 0.9), (2.0, 3, 5.0, 1, 0.1)],
        start=1,
    ):
        method = replace(base, tau=tau, refresh=refresh)
        sampling = make_sampling(temperature, top_k, top_p)
        turn(method, start(base, context), produced, sampling, jnp.int32(limit))


def test_generating_with_other_numbers_compiles_nothing() -> None:
    model = toy_model()
    base = ReTopK(budget=4, capacity=4, recall=2, window=1)
    generate(model, [[1, 2, 3]], attention=base, max_new_tokens=5, temperature=1.0)
    again = generate(
        model,
        [[4] * 77],
        attention=replace(base, tau=0.1, refresh=2),
        max_new_tokens=9,
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        seed=4,
    )
    assert again.compile_seconds == 0
