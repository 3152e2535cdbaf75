"""Every kernel compiles for sm_90 and sm_89 on a machine without a GPU, and spills no registers."""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.retopk_step import Remembered
from pallas_kernels.retopk_step.types import SIGNALS
from tests import aot

pytestmark = aot.MARKS

B, H, G, D, S, K, C, R, W = 1, 28, 4, 128, 131072, 512, 32, 4, 32


def _shape(*sizes: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def _arguments(op: str):
    bf16 = functools.partial(_shape, dtype=jnp.bfloat16)
    f32 = functools.partial(_shape, dtype=jnp.float32)
    flag = functools.partial(_shape, dtype=jnp.bool_)
    q, cache, ring = bf16(B, H, D), bf16(B, G, S, D), bf16(B, H, C, D)
    supports, slots_total = _shape(B, H, C, K), R * K + W
    state: Any = (ring, supports, _shape(B), _shape(B, H, 3), _shape(B, H), _shape(B, H, *SIGNALS))
    remembered = Remembered(*state)
    return {
        "recall": ((q, ring, _shape(B)), {"entries": R}),
        "candidates": ((q, cache, supports, _shape(B, H, R), _shape(B)), {"window": W}),
        "select": ((_shape(B, H, slots_total), f32(B, H, slots_total)), {"budget": K}),
        "top_k": ((f32(B, H, S),), {"budget": K}),
        "top_k_of_few": ((f32(B, H, 8192),), {"budget": 32}),
        "support_scores": ((q, cache, _shape(B, H, K)), {}),
        "sparse_attend": ((cache, _shape(B, H, K), f32(B, H, K)), {}),
        "exact_support": ((q, cache, _shape(B), flag(B, H)), {"budget": K}),
        "exact_attention": ((q, cache, cache, _shape(B), flag(B, H)), {"budget": K}),
        "full_attention": ((q, cache, cache, _shape(B)), {}),
        "prefill_supports": ((ring, cache, _shape(B, C)), {"budget": K}),
        "retopk_step": (
            (q, cache, cache, remembered, _shape(B), flag(B), flag(B), f32()),
            {"entries": R, "window": W},
        ),
    }[op]


@pytest.mark.parametrize("target", list(aot.DEVICES))
@pytest.mark.parametrize(
    "op",
    [
        "recall",
        "candidates",
        "select",
        "top_k",
        "top_k_of_few",
        "support_scores",
        "sparse_attend",
        "exact_support",
        "exact_attention",
        "full_attention",
        "prefill_supports",
        "retopk_step",
    ],
)
def test_kernels_compile_without_spills(op: str, target: str) -> None:
    shapes, kwargs = _arguments(op)
    name = op.removesuffix("_of_few")
    function = getattr(importlib.import_module(f"pallas_kernels.{name}"), name)
    call = functools.partial(function, implementation="triton", **kwargs)
    donate = (3,) if op == "retopk_step" else ()
    compiled = aot.compile_for(target, call, *shapes, donate_argnums=donate)
    if op == "retopk_step" and B == 1:
        memory = compiled.memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < 50e6


@pytest.mark.parametrize("op", ["exact_attention", "retopk_step", "sparse_attend"])
@pytest.mark.parametrize("batch", [3, 16])
def test_kernels_of_batches_compile_without_spills(
    op: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "B", batch)
    monkeypatch.setitem(globals(), "S", 16384)
    test_kernels_compile_without_spills(op, "sm_90")
