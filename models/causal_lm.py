"""A decoder with its weights and tokenizer, and one with random weights."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from retopk_jax.language_model import Params

from .config import ModelConfig, with_rope
from .decoder import TransformerDecoder
from .errors import TokenizerError
from .residual import residual_metric
from .tokenizer import TextTokenizer
from .weights import parameter_paths


@dataclass(frozen=True, eq=False)
class CausalLM:
    """`retopk_jax.language_model.LanguageModel` of a Llama or Qwen2 checkpoint.

    Attributes:
        decoder: the pure functions.
        params: the weights.
        tokenizer: None where the checkpoint has none; then only token ids can be prompts.
        eos_token_ids: ids that end a sequence.
        source: where the model came from.
        notes: what loading found worth saying, one sentence each.
    """

    decoder: TransformerDecoder
    params: Params
    tokenizer: TextTokenizer | None
    eos_token_ids: frozenset[int]
    source: str
    notes: tuple[str, ...] = ()

    @property
    def config(self) -> ModelConfig:
        """The model's shapes and options."""
        return self.decoder.config

    @property
    def parameter_count(self) -> int:
        """Weights, a tied embedding counted once."""
        return parameter_count(self.config)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the weights on their devices."""
        return parameter_bytes(self.config, self.decoder.dtype)

    def require_tokenizer(self) -> TextTokenizer:
        """The tokenizer, for whoever needs text.

        Raises:
            TokenizerError: the checkpoint has none.
        """
        if self.tokenizer is None:
            raise TokenizerError(
                f"{self.source}: has no tokenizer.json, so prompts must be token ids"
            )
        return self.tokenizer

    def residual_metric(self, tokens: jax.Array) -> jax.Array:
        """See `models.residual.residual_metric`."""
        return residual_metric(self.decoder, self.params, tokens)

    def with_rope(
        self,
        rope_type: str,
        factor: float,
        *,
        theta: float | None = None,
        **parameters: Any,
    ) -> "CausalLM":
        """The same weights under another RoPE scaling; see `models.config.with_rope`."""
        config = with_rope(self.config, rope_type, factor, theta=theta, **parameters)
        return replace(self, decoder=replace(self.decoder, config=config))


def default_dtype() -> np.dtype:
    """float32 on CPU, bfloat16 on GPU and TPU."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def parameter_count(config: ModelConfig) -> int:
    """Number of weights of a model, a tied embedding counted once; nothing is allocated."""
    decoder = TransformerDecoder(config, jnp.dtype(jnp.float32))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(decoder.abstract_params))


def parameter_bytes(config: ModelConfig, dtype: DTypeLike) -> int:
    """Bytes of a model's weights in ``dtype``; nothing is allocated."""
    return parameter_count(config) * jnp.dtype(dtype).itemsize


def random_model(config: ModelConfig, seed: int = 0, dtype: DTypeLike | None = None) -> CausalLM:
    """A model of this shape with random weights, made on the default device.

    Kernels have a variance of 1 / inputs and embeddings of 1 / width, so that activations and
    logits are of order one; norm scales are near 1 and biases near 0, but not equal to them.

    Args:
        config: the model.
        seed: of the weights.
        dtype: of the weights; None means `default_dtype`.
    """
    decoder = TransformerDecoder(config, jnp.dtype(dtype or default_dtype()))
    targets = parameter_paths(decoder.abstract_params)
    keys = jax.random.split(jax.random.key(seed), len(targets))
    leaves = [
        _random_leaf(key, leaf.shape, decoder.dtype, path.rpartition(".")[2])
        for key, (path, leaf) in zip(keys, targets.items(), strict=True)
    ]
    params = jax.tree.unflatten(jax.tree.structure(decoder.abstract_params), leaves)
    return CausalLM(decoder, params, None, config.eos_token_ids, f"random weights, seed {seed}")


@partial(jax.jit, static_argnums=(1, 2, 3))
def _random_leaf(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype, kind: str) -> jax.Array:
    draw = jax.random.normal(key, shape, dtype)
    match kind:
        case "kernel":
            return draw * shape[0] ** -0.5
        case "embedding":
            return draw * shape[1] ** -0.5
        case "scale":
            return 1 + 0.1 * draw
        case _:
            return 0.1 * draw
