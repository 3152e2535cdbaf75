"""A Llama-style decoder: RMSNorm, rotary grouped-query attention, SwiGLU.

The modules' attributes carry the names of the Hugging Face tensors, so a parameter's path is the
name of its tensor: ``layers.3.mlp.up_proj.kernel`` is ``model.layers.3.mlp.up_proj.weight``
transposed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from pallas_kernels.dispatch import platform
from retopk_jax.language_model import Attend, Geometry, Params
from retopk_jax.rotary import rotate

from .config import ModelConfig
from .rope import position_angles

MLP_CHUNK_TOKENS = 8192
"""Tokens that pass through an MLP at once; it bounds the [tokens, intermediate_size] activation."""


def _precision(dtype: np.dtype) -> jax.lax.Precision:
    """Full precision for float32, which GPU and TPU would otherwise multiply in fewer bits."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def _linear(
    inputs: int, outputs: int, dtype: np.dtype, rngs: nnx.Rngs, *, use_bias: bool
) -> nnx.Linear:
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=use_bias,
        dtype=dtype,
        param_dtype=dtype,
        precision=_precision(dtype),
        rngs=rngs,
    )


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x²) + eps) * scale`` over the last axis, in float32 (Zhang & Sennrich)."""

    def __init__(self, config: ModelConfig, dtype: np.dtype):
        self.scale = nnx.Param(jnp.ones((config.hidden_size,), dtype))
        self.epsilon = config.rms_norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., E]`` to the same shape and dtype."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        scale = jnp.broadcast_to(self.scale[...].astype(jnp.float32), y.shape)
        return (y * scale).astype(x.dtype)


class SelfAttention(nnx.Module):
    """The projections around grouped-query attention; the attention itself is the caller's."""

    def __init__(self, config: ModelConfig, dtype: np.dtype, rngs: nnx.Rngs):
        width, dim = config.hidden_size, config.head_dim
        bias = config.qkv_bias
        self.q_proj = _linear(width, config.num_heads * dim, dtype, rngs, use_bias=bias)
        self.k_proj = _linear(width, config.num_kv_heads * dim, dtype, rngs, use_bias=bias)
        self.v_proj = _linear(width, config.num_kv_heads * dim, dtype, rngs, use_bias=bias)
        self.o_proj = _linear(
            config.num_heads * dim, width, dtype, rngs, use_bias=config.output_bias
        )
        self.config = config

    def __call__(
        self,
        x: jax.Array,
        angles: jax.Array,
        attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    ) -> jax.Array:
        """``[B, T, E]`` to ``[B, T, E]``; ``angles`` are the rotations, ``[B, T, D/2]``."""
        config, (rows, length, _) = self.config, x.shape
        with jax.named_scope("qkv"):
            q = self.q_proj(x).reshape(rows, length, config.num_heads, config.head_dim)
            k = self.k_proj(x).reshape(rows, length, config.num_kv_heads, config.head_dim)
            v = self.v_proj(x).reshape(rows, length, config.num_kv_heads, config.head_dim)
            q = rotate(q, angles, config.rope.scale)
            k = rotate(k, angles, config.rope.scale)
        with jax.named_scope("attend"):
            out = attend(q, k, v)  # [B, T, H, D], or one row that stands for all
        with jax.named_scope("output"):
            out = out.reshape(-1, length, config.num_heads * config.head_dim)
            return self.o_proj(jnp.broadcast_to(out, (rows, *out.shape[1:])))


class MLP(nnx.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))`` (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, dtype: np.dtype, rngs: nnx.Rngs):
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = _linear(width, inner, dtype, rngs, use_bias=bias)
        self.up_proj = _linear(width, inner, dtype, rngs, use_bias=bias)
        self.down_proj = _linear(inner, width, dtype, rngs, use_bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[B, T, E]`` to ``[B, T, E]``, at most `MLP_CHUNK_TOKENS` tokens at a time."""
        rows, length, _ = x.shape
        chunk = max(1, MLP_CHUNK_TOKENS // rows)
        if length <= chunk:
            return self._apply(x)

        def apply_to(x: jax.Array, start: jax.Array | int, size: int) -> jax.Array:
            part = jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(x, self._apply(part), start, axis=1)

        # In place: the output of `lax.map` begins as zeros, which XLA makes for all layers at once.
        count, rest = divmod(length, chunk)
        x = jax.lax.fori_loop(0, count, lambda i, x: apply_to(x, i * chunk, chunk), x)
        return apply_to(x, count * chunk, rest) if rest else x

    def _apply(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    """One decoder layer: attention and MLP, each behind a norm and a residual."""

    def __init__(self, config: ModelConfig, dtype: np.dtype, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config, dtype)
        self.self_attn = SelfAttention(config, dtype, rngs)
        self.post_attention_layernorm = RMSNorm(config, dtype)
        self.mlp = MLP(config, dtype, rngs)

    def __call__(
        self,
        x: jax.Array,
        angles: jax.Array,
        attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    ) -> jax.Array:
        """``[B, T, E]`` to ``[B, T, E]``."""
        with jax.named_scope("attention"):
            x = x + self.self_attn(self.input_layernorm(x), angles, attend)
        with jax.named_scope("mlp"):
            return x + self.mlp(self.post_attention_layernorm(x))


class Stack(nnx.Module):
    """Embedding, blocks, final norm and output head."""

    def __init__(self, config: ModelConfig, dtype: np.dtype, rngs: nnx.Rngs):
        self.embed_tokens = nnx.Embed(
            config.vocab_size, config.hidden_size, dtype=dtype, param_dtype=dtype, rngs=rngs
        )
        self.layers = nnx.List([Block(config, dtype, rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config, dtype)
        if not config.tied:
            self.lm_head = _linear(
                config.hidden_size, config.vocab_size, dtype, rngs, use_bias=False
            )
        self.config = config

    def residuals(
        self, tokens: jax.Array, positions: jax.Array, sequence_lengths: jax.Array, attend: Attend
    ) -> list[jax.Array]:
        """What enters each block and, last, what leaves the last one, ``[B, T, E]``.

        The arguments are those of `retopk_jax.language_model.Decoder.hidden`.
        """
        with jax.named_scope("embed"):
            x = self.embed_tokens(tokens)  # [B, T, E]
            frequencies = self.config.rope.row_inverse_frequencies(sequence_lengths)
            angles = position_angles(positions, frequencies)  # [B, T, D/2]
        stream = [x]
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):

                def attend_layer(
                    q: jax.Array, k: jax.Array, v: jax.Array, index: int = index
                ) -> jax.Array:
                    return attend(index, q, k, v)

                x = layer(x, angles, attend_layer)
            stream.append(x)
        return stream

    def logits(self, hidden: jax.Array) -> jax.Array:
        """See `retopk_jax.language_model.Decoder.logits`."""
        with jax.named_scope("head"):
            x = self.norm(hidden)
            if self.config.tied:
                weights, axis = self.embed_tokens.embedding[...], 1  # [V, E]
            else:
                weights, axis = self.lm_head.kernel[...], 0  # [E, V]
            return jax.lax.dot_general(
                x,
                weights,
                (((x.ndim - 1,), (axis,)), ((), ())),
                precision=_precision(x.dtype),
                preferred_element_type=jnp.float32,
            )


@cache
def _split(config: ModelConfig, dtype: np.dtype) -> tuple[Any, Params]:
    """The graph of the modules and their parameters as shapes; nothing is allocated."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Stack(config, dtype, nnx.Rngs(0))))
    return graph, nnx.to_pure_dict(state)


@dataclass(frozen=True)
class TransformerDecoder:
    """`retopk_jax.language_model.Decoder` of a Llama or Qwen2 model.

    Attributes:
        config: the model.
        dtype: of weights and activations; norms, rotations and logits are float32.
        mesh: devices over which weights and caches are sharded; None for one device.
    """

    config: ModelConfig
    dtype: np.dtype
    mesh: Mesh | None = None

    @property
    def geometry(self) -> Geometry:
        """The shapes that attention depends on."""
        config = self.config
        return Geometry(config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        """Positions the model was trained for, after RoPE scaling."""
        return self.config.max_positions

    @property
    def abstract_params(self) -> Params:
        """The parameters as a nested dict of `jax.ShapeDtypeStruct`; nothing is allocated."""
        return _split(self.config, self.dtype)[1]

    def hidden(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        sequence_lengths: jax.Array,
        attend: Attend,
    ) -> jax.Array:
        """See `retopk_jax.language_model.Decoder.hidden`.

        On a GPU a single token is computed as two equal rows: XLA would turn the products of one
        row into sums, whose terms it writes out first, and its norms into several kernels.
        """
        run = self._bind(params).residuals
        if tokens.size > 1 or platform() != "gpu":
            return run(tokens, positions, sequence_lengths, attend)[-1]

        def attend_one(layer: int, *qkv: jax.Array) -> jax.Array:
            return attend(layer, *(x[:1] for x in qkv))

        tokens, positions, sequence_lengths = (
            jnp.broadcast_to(x, (2, *x.shape[1:])) for x in (tokens, positions, sequence_lengths)
        )
        return run(tokens, positions, sequence_lengths, attend_one)[-1][:1]

    def residuals(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        sequence_lengths: jax.Array,
        attend: Attend,
    ) -> list[jax.Array]:
        """The residual stream; see `Stack.residuals`."""
        return self._bind(params).residuals(tokens, positions, sequence_lengths, attend)

    def inverse_frequencies(self, sequence_lengths: jax.Array) -> jax.Array:
        """See `retopk_jax.language_model.Decoder.inverse_frequencies`."""
        return self.config.rope.row_inverse_frequencies(sequence_lengths)

    @property
    def rotary_scale(self) -> float:
        """See `retopk_jax.language_model.Decoder.rotary_scale`."""
        return self.config.rope.scale

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """See `retopk_jax.language_model.Decoder.logits`."""
        return self._bind(params).logits(hidden)

    def _bind(self, params: Params) -> Stack:
        return nnx.merge(_split(self.config, self.dtype)[0], params)
