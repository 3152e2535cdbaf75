"""Bytes counted before anything is allocated equal the bytes allocated."""

import jax.numpy as jnp
import pytest

from retopk_jax.attention import Full, ReTopK
from retopk_jax.decode import start
from retopk_jax.memory import memory_need
from retopk_jax.prefill import prefill
from tests.retopk_jax.toy import toy_model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 3])
def test_caches(dtype: str, rows: int) -> None:
    model = toy_model(layers=2, heads=6, kv_heads=2, dim=16, dtype=dtype)
    method = ReTopK(budget=7, capacity=5, recall=2)
    context = prefill(model, [[1, 2, 3]] * rows, new_tokens=2, capacity=40, tail_queries=5).context
    state = start(method, context)
    need = memory_need(
        model.decoder.geometry,
        method,
        weights=0,
        batch=rows,
        capacity=40,
        dtype=jnp.dtype(dtype),
    )
    assert need.kv_cache == sum(x.nbytes for x in (*state.cache.keys, *state.cache.values))
    assert need.recall_cache == sum(
        x.nbytes
        for layer in state.layers
        for x in (layer.cache.queries, layer.cache.supports, layer.cache.pushed)
    )
    assert need.total == need.kv_cache + need.recall_cache
    assert Full().state_bytes(model.decoder.geometry, rows, 40, dtype) == 0
