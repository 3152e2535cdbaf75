"""The packed cache of a TPU, forced here: every method sees the interface of any other cache."""

import jax
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.packed import PackedRows, both_of
from retopk_jax import kv_cache
from retopk_jax.attention import AttentionMethod, ExactTopK, Full, ReTopK
from retopk_jax.context_store import load_context, save_context
from retopk_jax.generate import generate
from retopk_jax.memory import memory_need
from tests.retopk_jax.attention.test_usage import METHODS, PROMPTS, model, name_of
from tests.retopk_jax.toy import toy_model

__all__ = ["model"]

STEPS = 5
ONE_EACH = [
    pytest.param(method, marks=[] if name == "loki" else [pytest.mark.long])
    for name, method in {method.name: method for method in METHODS}.items()
]


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "packs", lambda: True)


def tokens_of(model, method: AttentionMethod) -> list[list[int]]:
    result = generate(model, PROMPTS, attention=method, max_new_tokens=STEPS)
    assert isinstance(result.context.cache.keys[0], PackedRows) == kv_cache.packs()
    return [completion.tokens for completion in result.completions]


@pytest.mark.parametrize("method", ONE_EACH, ids=name_of)
def test_every_method_decodes_the_same(model, method, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens_of(model, method)
    monkeypatch.setattr(kv_cache, "packs", lambda: True)
    assert tokens_of(model, method) == expected


@pytest.mark.parametrize(
    "method",
    [ReTopK(12, 4, 2, 2, 0.9, 3), pytest.param(ExactTopK(12), marks=pytest.mark.long)],
    ids=name_of,
)
def test_generation_on_the_kernels(method, monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy_model(layers=1)
    expected = tokens_of(model, method)
    monkeypatch.setattr(kv_cache, "packs", lambda: True)
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    jax.clear_caches()  # what was traced for plain XLA
    try:
        assert tokens_of(model, method) == expected
    finally:
        jax.clear_caches()


def test_a_layer_is_one_array(model, packing: None) -> None:
    geometry = model.decoder.geometry
    cache = kv_cache.empty_kv_cache(geometry, 2, 24, np.float32)
    leaves = jax.tree.leaves(cache)
    shape = (2, geometry.num_kv_heads, 24, 2, 128)
    assert [leaf.shape for leaf in leaves] == [shape] * geometry.num_layers + [(2,)]
    again = jax.tree.map(lambda x: x, cache)
    assert again.keys[1].shape == again.values[1].shape == (*shape[:3], geometry.head_dim)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(cache)]
    assert names == [".both[0]", ".both[1]", ".lengths"]


def test_whole_lanes_are_counted(model, packing: None) -> None:
    geometry = model.decoder.geometry
    cache = kv_cache.empty_kv_cache(geometry, 1, 8, np.float32)
    need = memory_need(geometry, Full(), weights=0, batch=1, capacity=8, dtype=np.float32)
    assert need.kv_cache == sum(x.nbytes for x in jax.tree.leaves(cache)[:-1])


def test_contexts_on_disk_are_those_of_any_machine(
    model, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = generate(model, PROMPTS, attention=ReTopK(12, 4, 2, 2), max_new_tokens=2)
    save_context(tmp_path / "a", model, first.context, PROMPTS)
    monkeypatch.setattr(kv_cache, "packs", lambda: True)
    moved = load_context(tmp_path / "a", model).context
    for keys, values, want, beside in zip(
        moved.cache.keys,
        moved.cache.values,
        first.context.cache.keys,
        first.context.cache.values,
        strict=True,
    ):
        assert both_of(keys) is both_of(values) is not None
        length = min(keys.shape[2], want.shape[2])
        np.testing.assert_array_equal(keys[:, :, :length], want[:, :, :length])
        np.testing.assert_array_equal(values[:, :, :length], beside[:, :, :length])
    more = generate(model, context=moved, attention=Full(), max_new_tokens=2)
    assert isinstance(more.context.cache.keys[0], PackedRows)
    save_context(tmp_path / "b", model, moved, PROMPTS)
    monkeypatch.setattr(kv_cache, "packs", lambda: False)
    back = load_context(tmp_path / "b", model).context
    assert not isinstance(back.cache.keys[0], PackedRows)
