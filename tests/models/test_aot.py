"""The decode step of a 7B model over 128K tokens, compiled for an H200 on a machine without one."""

import collections
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from models.config import ModelConfig
from models.decoder import TransformerDecoder
from retopk_jax.attention import AttentionMethod, ExactTopK, Full, ReTopK
from retopk_jax.decode import DecodeState, start, step_logits
from retopk_jax.kv_cache import empty_kv_cache
from retopk_jax.prefill import Context, read_chunk
from tests import aot

pytestmark = aot.MARKS

QWEN2_5_7B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
SLOTS = 131072
HLO_NAMES = {jnp.dtype(jnp.bfloat16): "bf16", jnp.dtype(jnp.int32): "s32"}


def context_of(decoder: TransformerDecoder, tail_queries: int) -> Context:
    """The shapes of a context."""
    geometry = decoder.geometry
    tail = (1, tail_queries, geometry.num_heads, geometry.head_dim)
    return jax.eval_shape(
        lambda: Context(
            empty_kv_cache(geometry, 1, SLOTS, jnp.bfloat16),
            tuple(jnp.zeros(tail, jnp.bfloat16) for _ in range(geometry.num_layers)),
            jnp.zeros((1, decoder.vocab_size)),
        )
    )


def decode_state(decoder: TransformerDecoder, method: AttentionMethod) -> DecodeState:
    """The shapes of a decode state."""
    return jax.eval_shape(
        functools.partial(start, method), context_of(decoder, method.tail_queries)
    )


def decode_step(
    method: AttentionMethod, layers: int, **options: Any
) -> tuple[jax.stages.Compiled, DecodeState]:
    """The compiled decode step of as many layers, and the shapes of its state."""
    config = ModelConfig.from_hf(QWEN2_5_7B | {"num_hidden_layers": layers})
    decoder = TransformerDecoder(config, jnp.dtype(jnp.bfloat16))
    state = decode_state(decoder, method)
    step = functools.partial(step_logits, decoder, method)
    tokens = jax.ShapeDtypeStruct((1,), jnp.int32)
    return aot.compile_for("sm_90", step, decoder.abstract_params, state, tokens, **options), state


def assert_in_place(compiled: jax.stages.Compiled, state: DecodeState) -> None:
    """No array of the size and dtype of a cache or a ring is made but by writing into it."""
    text = compiled.as_text()
    assert text is not None
    made = collections.Counter(
        (dtype, tuple(map(int, dims.split(","))), op)
        for dtype, dims, op in re.findall(r"= (\w+)\[([\d,]+)\]\S* ([\w-]+)\(", text)
    )
    for leaf in jax.tree.leaves((state.cache.keys, state.cache.values, state.layers)):
        if leaf.size < 2**16:
            continue
        ops = collections.Counter()
        for (dtype, shape, op), number in made.items():
            if dtype == HLO_NAMES[leaf.dtype] and math.prod(shape) == leaf.size:
                ops[op] += number
        assert ops.pop("parameter") > 0, f"{leaf.shape} is nowhere: this test looks for nothing"
        for same in ("bitcast", "get-tuple-element"):
            ops.pop(same, None)
        written = ops.pop("dynamic-update-slice", 0)
        assert ops.pop("fusion", 0) == written, f"{leaf.shape}: a fusion that is no write in place"
        assert not ops, f"{leaf.shape}: {dict(ops)}"
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 50e6
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert new < 50e6, "what is donated comes out in other buffers"


@pytest.mark.parametrize(
    ("method", "layers"), [(ReTopK(), 28), (ExactTopK(), 2), (Full(), 2)], ids=lambda x: str(x)[:6]
)
def test_decode_step_at_128k_copies_no_cache(method: AttentionMethod, layers: int) -> None:
    assert_in_place(*decode_step(method, layers, donate_argnums=1))


def test_prefill_of_128k_holds_one_layers_activations() -> None:
    decoder = TransformerDecoder(ModelConfig.from_hf(QWEN2_5_7B), jnp.dtype(jnp.bfloat16))
    context, number = context_of(decoder, 32), jax.ShapeDtypeStruct((), jnp.int32)
    read = functools.partial(read_chunk, decoder=decoder, whole=True)
    tokens = jax.ShapeDtypeStruct((SLOTS,), jnp.int32)
    args = (decoder.abstract_params, context, tokens, *[number] * 4)
    memory = aot.compile_for("sm_90", read, *args, donate_argnums=1).memory_analysis()
    assert memory is not None
    # [T, 3584] is 7 KB a token; there are the residual stream, q, its norm and its output.
    assert memory.temp_size_in_bytes < 32e3 * SLOTS
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert new < 50e6, "what is donated comes out in other buffers"


def test_a_copy_is_found() -> None:
    with pytest.raises(AssertionError, match=f"{SLOTS}.*copy"):
        assert_in_place(*decode_step(ReTopK(), 1))
