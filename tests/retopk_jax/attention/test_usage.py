"""What a step is said to have read and to hold, against counts made directly."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retopk_jax.attention import (
    AttentionMethod,
    ExactTopK,
    Full,
    Loki,
    Quest,
    ReTopK,
    SparQ,
    StreamingLLM,
    TokenSelect,
)
from retopk_jax.attention.retopk import ReTopKState
from retopk_jax.attention.tokenselect import MISS, SelectionCache
from retopk_jax.decode import decode_step, prime, start, start_session, statistics, step_logits
from retopk_jax.generate import generate
from retopk_jax.kv_cache import empty_kv_cache
from retopk_jax.memory import memory_need
from retopk_jax.prefill import Context, prefill
from tests.retopk_jax.test_compiled_step import result_shape
from tests.retopk_jax.toy import ToyModel, toy_model

LAYERS, HEADS, GROUPS, DIM = 2, 6, 2, 16
SIZE = 4  # bytes of a float32
STEPS = 4
PROMPTS = [[7] * 3, [5, 9, 2] * 11]


def basis() -> jax.Array:
    rng = np.random.default_rng(0)
    heads = [np.linalg.qr(rng.normal(size=(DIM, DIM)))[0] for _ in range(LAYERS * GROUPS)]
    return jnp.asarray(np.reshape(heads, (LAYERS, GROUPS, DIM, DIM)), jnp.float32)


METHODS: list[AttentionMethod] = [
    Full(),
    ExactTopK(12),
    ReTopK(budget=12, capacity=4, recall=2, window=2, tau=0.9, refresh=3),
    StreamingLLM(4, 8),
    Quest(12, 4),
    Quest(12, 4, select_per="kv_group"),
    Quest(12, 4, select_per="layer", dense_layers=1),
    SparQ(budget=12),
    Loki(budget=12, basis=basis()),
    TokenSelect(4, 6, 2, theta=0.9),
    TokenSelect(4, 6, 2, theta=-1.0),
]


def name_of(method: AttentionMethod) -> str:
    return method.name + getattr(method, "select_per", "")


@pytest.fixture(scope="module")
def model() -> ToyModel:
    return toy_model(layers=LAYERS, heads=HEADS, kv_heads=GROUPS, dim=DIM)


def expected(method: AttentionMethod, length: int, layer: int, misses: bool) -> tuple[int, int]:
    """Keys and values, in numbers of a layer, that a step over `length` tokens has to read."""
    attended = min(12, length)
    whole = length * GROUPS * DIM
    by_head, by_group = attended * HEADS * DIM, attended * GROUPS * DIM
    match method:
        case Full():
            return whole, whole
        case ExactTopK():
            return whole, by_head
        case StreamingLLM():
            return by_group, by_group
        case Quest():
            if layer < method.dense_layers:
                return whole, whole
            pages = -(-length // 4)
            # The last page is in; it may be partly filled.
            attended = length if pages <= 3 else 8 + (length - 1) % 4 + 1
            read = attended * DIM * (HEADS if method.select_per == "query_head" else GROUPS)
            return 2 * pages * GROUPS * DIM + read, read
        case SparQ():
            return length * GROUPS * (DIM // 4) + by_group, by_group
        case Loki():
            return length * GROUPS * (DIM // 2) + by_head, by_head
        case TokenSelect():
            return by_group + (whole if misses else 0), by_group
    raise AssertionError(method)


@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_usage_is_the_mean_of_what_was_read(method: AttentionMethod, model: ToyModel) -> None:
    context = prefill(
        model, PROMPTS, new_tokens=STEPS, capacity=40, tail_queries=method.tail_queries
    ).context
    session = start_session(model, method, context)
    counts = []
    lengths = np.array([len(prompt) for prompt in PROMPTS])
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        lengths = lengths + 1
        fed = rng.integers(0, 97, 2).tolist()
        _, session, reports = decode_step(session, fed)
        rows = []
        for row, length in enumerate(lengths.tolist()):
            tokens, keys, values = 0.0, 0.0, 0.0
            for layer, report in enumerate(reports):
                support = None if report.support is None else np.asarray(report.support[row])
                mean = length if support is None else (support >= 0).sum() / HEADS
                tokens += mean / LAYERS
                if isinstance(method, ReTopK):
                    assert support is not None
                    assert report.path is not None
                    assert report.candidates is not None
                    path = np.asarray(report.path[row])
                    scans = (path.reshape(GROUPS, -1) > 0).any(axis=1).sum()
                    ranked = np.asarray(report.candidates[row])[path == 0].sum()
                    k, v = (scans * length + ranked) * DIM, (support >= 0).sum() * DIM
                else:
                    missed = report.path is not None and int(report.path[row, 0]) == MISS
                    k, v = expected(method, length, layer, missed)
                keys += k * SIZE
                values += v * SIZE
            rows.append((tokens, keys, values))
        counts.append(rows)
    usage = session.state.usage
    found = np.stack([usage.tokens, usage.key_bytes, usage.value_bytes], axis=-1)
    np.testing.assert_allclose(found, np.mean(counts, axis=0), rtol=1e-6)
    if not isinstance(method, Full) and not getattr(method, "dense_layers", 0):
        assert (found[:, 0] <= 12).all()


@pytest.mark.parametrize("theta", [0.5, -1.0, 1.5])
def test_hit_rate_is_that_of_the_paths(theta: float, model: ToyModel) -> None:
    """Hits are reuse, misses fallback; a row that is attended whole counts as neither."""
    method = TokenSelect(4, 6, 2, theta=theta)
    session = start_session(model, method, prefill(model, PROMPTS, new_tokens=12).context)
    counts = np.zeros((2, LAYERS, HEADS, 3), int)
    for token in range(12):
        _, session, reports = decode_step(session, [token // 3] * 2)
        for layer, report in enumerate(reports):
            for row in range(2):
                assert report.path is not None
                for head, path in enumerate(np.asarray(report.path[row])):
                    counts[row, layer, head, path] += 1
    found = statistics(method, session.state)
    assert found is not None
    for row, paths in enumerate(found):
        hits, misses, whole = counts[row].sum(axis=(0, 1)).tolist()
        assert (paths.reuse, paths.fallback, paths.refresh) == (hits, misses, 0)
        assert whole == [9 * LAYERS * HEADS, 0][row]  # 4 to 12 of 15 tokens
        assert paths.shares["reuse"] == hits / (hits + misses)
        for layer in range(LAYERS):
            for head in range(HEADS):
                assert paths.by_head[layer][head] == [*counts[row, layer, head, :2].tolist(), 0, 0]
    total = sum(paths.reuse for paths in found)
    assert (total == 0) == (theta > 1)
    if theta == -1.0:
        assert all(paths.fallback == LAYERS * HEADS for paths in found)


# ---- no copies ---

SLOTS = 8192


@pytest.mark.parametrize(
    ("method", "batch"),
    [
        # One row: where XLA is most inclined to copy.
        *((METHODS[index], 1) for index in (3, 4, 7, 8, 9)),
        (METHODS[4], 2),
        (METHODS[8], 2),
    ],
)
def test_a_step_copies_neither_the_cache_nor_the_state(method: AttentionMethod, batch: int) -> None:
    """No array as large as a layer's keys is made: they are updated where they are."""
    big = toy_model(layers=LAYERS, heads=HEADS, kv_heads=GROUPS, dim=DIM)
    layer = batch * GROUPS * SLOTS * DIM
    context = jax.eval_shape(lambda: _context(big, batch, SLOTS, 0, jnp.dtype(jnp.float32)))
    state = jax.eval_shape(start, method, context)
    step = jax.jit(step_logits, static_argnames="decoder", donate_argnames="state")
    tokens = jax.ShapeDtypeStruct((batch,), jnp.int32)
    text = step.lower(big.decoder, method, big.params, state, tokens).compile().as_text()
    assert text is not None
    lines = [line.strip() for line in text.splitlines()]
    assert any(math.prod(result_shape(line)) == layer for line in lines), "test looks for nothing"
    copied = [
        line
        for line in lines
        if re.search(r" (copy|copy-start|transpose|gather|convert|sort)\(", line)
        and math.prod(result_shape(line)) >= layer // 8
    ]
    assert not copied, copied[0]


# ---- memory -----------------------------------------------------------------------------------


def remembered(state) -> list:
    """The arrays of a layer's state, counters left out."""
    if isinstance(state, ReTopKState):
        return jax.tree.leaves(state.cache)
    if isinstance(state, SelectionCache):
        return [state.query, state.chosen, state.known]
    return jax.tree.leaves(state)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_state_bytes_are_those_of_the_arrays(method: AttentionMethod, dtype) -> None:
    """Also where the pages do not divide the capacity."""
    small = toy_model(layers=LAYERS, heads=HEADS, kv_heads=GROUPS, dim=DIM)
    batch, capacity = 3, 42
    context = jax.eval_shape(
        lambda: _context(small, batch, capacity, method.tail_queries, jnp.dtype(dtype))
    )
    states = jax.eval_shape(prime, method, context)
    held = sum(leaf.size * leaf.dtype.itemsize for state in states for leaf in remembered(state))
    if isinstance(method, Loki):
        held += basis().nbytes
    geometry = small.decoder.geometry
    assert method.state_bytes(geometry, batch, capacity, dtype) == held
    need = memory_need(geometry, method, weights=5, batch=batch, capacity=capacity, dtype=dtype)
    assert need.recall_cache == held
    assert need.total == 5 + need.kv_cache + held


def _context(model: ToyModel, batch: int, capacity: int, tail: int, dtype):
    geometry = model.decoder.geometry
    return Context(
        empty_kv_cache(geometry, batch, capacity, dtype),
        tuple(jnp.zeros((batch, tail, HEADS, DIM), dtype) for _ in range(LAYERS)),
        jnp.zeros((batch, model.decoder.vocab_size)),
    )


# ---- generation -------------------------------------------------------------------------------

RAGGED = [[3, 1, 4], [5, 9, 2] * 11, [8]]
SMALL = [
    StreamingLLM(4, 8),
    Quest(12, 4),
    SparQ(budget=12),
    Loki(budget=12, basis=basis()),
    TokenSelect(4, 6, 2, theta=0.9),
]


@pytest.fixture(scope="module")
def full_tokens(model: ToyModel) -> list[list[int]]:
    return generate(model, RAGGED, attention=Full(), max_new_tokens=8).tokens


@pytest.mark.parametrize("method", SMALL, ids=name_of)
def test_generates_like_full_within_the_budget_and_keeps_to_it_beyond(
    method: AttentionMethod, model: ToyModel, full_tokens: list[list[int]]
) -> None:
    """A row of at most K tokens decodes as Full does, beside one that is far beyond K."""
    found = generate(model, RAGGED, attention=method, max_new_tokens=8)
    for row in (0, 2):
        assert found.tokens[row] == full_tokens[row]
    attended = [completion.tokens_attended for completion in found.completions]
    assert max(attended) <= 12
    # Seven steps: 4 to 10 tokens, 12 (Quest: 9 to 12) and 2 to 8.
    assert attended[0] == pytest.approx(7)
    assert attended[2] == pytest.approx(5)
    assert attended[1] > 9


def test_another_theta_compiles_nothing(model: ToyModel) -> None:
    generate(model, RAGGED, attention=SMALL[4], max_new_tokens=8)
    again = dataclasses.replace(SMALL[4], theta=0.2)
    assert generate(model, RAGGED, attention=again, max_new_tokens=8).compile_seconds == 0
