"""A tiny decoder with real attention shapes and no training: enough to run the decode loop."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from retopk_jax.language_model import Attend, Geometry, Params


@dataclass(frozen=True)
class ToyDecoder:
    """Residual attention blocks with rotary positions; see `retopk_jax.language_model.Decoder`."""

    geometry: Geometry
    vocab_size: int = 97
    max_positions: int = 4096
    width: int = 48
    dtype: str = "float32"
    mesh: None = None
    rotary_scale: float = 1.0

    def hidden(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        sequence_lengths: jax.Array,
        attend: Attend,
    ) -> jax.Array:
        geometry = self.geometry
        dim = geometry.head_dim
        x = params["embed"][tokens]  # [B, T, E]
        rates = self.inverse_frequencies(sequence_lengths)
        angle = positions[..., None].astype(jnp.float32) * rates[:, None, :]
        cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]

        def rotate(y: jax.Array) -> jax.Array:
            a, b = y[..., : dim // 2], y[..., dim // 2 :]
            return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

        for layer, block in enumerate(params["blocks"]):
            q, k, v = (
                jnp.einsum("bte,ehd->bthd", x, block[name], precision="highest") for name in "qkv"
            )
            out = attend(layer, rotate(q), rotate(k), v)
            x = x + jnp.einsum("bthd,hde->bte", out, block["o"], precision="highest")
            x = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        return x

    def inverse_frequencies(self, sequence_lengths: jax.Array) -> jax.Array:
        half = self.geometry.head_dim // 2
        rates = 100.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
        return jnp.broadcast_to(rates[None], (sequence_lengths.shape[0], half))

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        return jnp.einsum("...e,ve->...v", hidden, params["head"], precision="highest")


@dataclass(frozen=True)
class ToyTokenizer:
    """One character a token."""

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        return [ord(c) - 32 for c in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(t + 32) for t in tokens)


@dataclass(frozen=True)
class ToyModel:
    """A language model for tests."""

    decoder: ToyDecoder
    params: Params
    tokenizer: ToyTokenizer | None = ToyTokenizer()
    eos_token_ids: frozenset[int] = frozenset()


def toy_model(
    layers: int = 2, heads: int = 6, kv_heads: int = 2, dim: int = 16, seed: int = 0, **kwargs
) -> ToyModel:
    """A model with random weights."""
    decoder = ToyDecoder(Geometry(layers, heads, kv_heads, dim), **kwargs)
    rng = np.random.default_rng(seed)

    def draw(*shape: int, fan: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(fan), jnp.float32)

    e = decoder.width
    blocks = [
        {
            "q": draw(e, heads, dim, fan=e) * 2.0,
            "k": draw(e, kv_heads, dim, fan=e) * 2.0,
            "v": draw(e, kv_heads, dim, fan=e),
            "o": draw(heads, dim, e, fan=heads * dim),
        }
        for _ in range(layers)
    ]
    embed, head = (draw(decoder.vocab_size, e, fan=1) for _ in range(2))
    return ToyModel(decoder, {"embed": embed, "head": head, "blocks": blocks})
