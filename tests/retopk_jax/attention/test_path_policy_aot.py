"""A decode step's attention by risk compiles for a GPU, in its kernels and without a copy."""

import re
from typing import Any

import jax
import jax.numpy as jnp

from retopk_jax.attention import ReTopK, Risk, Step
from tests.aot import MARKS, compile_for

pytestmark = MARKS

BATCH, HEADS, GROUPS, SLOTS, DIM = 1, 28, 4, 32768, 128
KNOTS = (28, HEADS, 16)


def test_compiles_for_a_gpu_in_kernels() -> None:
    def make() -> ReTopK:
        risk = Risk(jnp.zeros(KNOTS), jnp.zeros(KNOTS), jnp.float32(0))
        return ReTopK(budget=512, tau=jnp.float32(0.85), refresh=jnp.int32(128), risk=risk)

    method = jax.eval_shape(make)
    cache = jax.ShapeDtypeStruct((BATCH, GROUPS, SLOTS, DIM), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    tail = jax.ShapeDtypeStruct((BATCH, 32, HEADS, DIM), jnp.bfloat16)
    state = jax.eval_shape(lambda *args: make().prime(0, *args), cache, cache, tail, rows)
    step = Step(rows, rows, jax.ShapeDtypeStruct((BATCH,), jnp.bool_))  # pyright: ignore[reportArgumentType]
    q = jax.ShapeDtypeStruct((BATCH, HEADS, DIM), jnp.bfloat16)

    def attend(method: ReTopK, layer: jax.Array, state: Any, *args: Any) -> Any:
        return method.attend(layer, state, *args)

    layer = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = compile_for(
        "sm_90", attend, method, layer, state, q, cache, cache, step, donate_argnums=(2,)
    )
    text = compiled.as_text() or ""
    assert len(re.findall(r"custom-call\(", text)) == 3  # recall, search, finish
    cached = f"[{BATCH},{GROUPS},{SLOTS},{DIM}]"
    assert not [line for line in text.splitlines() if " copy(" in line and cached in line]
