"""A GGUF file of a Llama or Qwen2 model, dequantised tensor by tensor."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from jax.sharding import Sharding

from retopk_jax.language_model import Params

from .config import MODEL_TYPES
from .decoder import TransformerDecoder
from .errors import CheckpointError, ConfigError
from .gguf_tokenizer import tokenizer_files
from .rope import Rope
from .weights import ShardingRule, read_params

MAGIC = b"GGUF"

_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3_SHAPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class GgufCheckpoint:
    """A memory-mapped GGUF file.

    Attributes:
        path: the file.
    """

    path: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """The metadata as the contents of a Hugging Face ``config.json``.

        Raises:
            CheckpointError: the file cannot be read or lacks a key.
            ConfigError: another architecture, or options that this decoder does not implement.
        """
        architecture = self._metadata.get("general.architecture")
        if architecture not in MODEL_TYPES:
            raise ConfigError(
                f"{self.path}: general.architecture is {architecture!r}; "
                f"supported are {', '.join(MODEL_TYPES)}"
            )
        for key in ("expert_count", "attention.sliding_window"):
            if self._get(key):
                raise ConfigError(
                    f"{self.path}: {architecture}.{key} is {self._get(key)}; "
                    "mixture-of-experts and sliding-window models are not supported"
                )
        heads, width = self._need("attention.head_count"), self._need("embedding_length")
        head_dim = self._get("attention.key_length", width // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._get(key, head_dim) != head_dim:
                raise ConfigError(
                    f"{self.path}: {architecture}.{key} is {self._get(key)}; "
                    f"only the head dimension, {head_dim}, is supported"
                )
        max_positions = self._need("context_length")
        theta = float(self._get("rope.freq_base", 10_000.0))
        return {
            "architectures": [f"{architecture.capitalize()}ForCausalLM"],
            "model_type": architecture,
            "vocab_size": int(self._tensor("token_embd.weight").shape[1]),
            "hidden_size": width,
            "intermediate_size": self._need("feed_forward_length"),
            "num_hidden_layers": self._need("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._get("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": _decimal(self._need("attention.layer_norm_rms_epsilon")),
            "max_position_embeddings": max_positions,
            "rope_theta": theta,
            "rope_scaling": self._rope_scaling(theta, head_dim, max_positions),
            "attention_bias": architecture == "llama" and "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self._tensors,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": self._metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._metadata.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self._metadata.get("tokenizer.ggml.padding_token_id"),
        }

    @cached_property
    def files(self) -> dict[str, str]:
        """Tokenizer and generation files made from the metadata, by name; none if it has none.

        Raises:
            TokenizerError: a tokenizer of an unsupported kind.
        """
        return tokenizer_files(self._metadata, str(self.path), self._need("context_length"))

    def params(
        self, decoder: TransformerDecoder, sharding: Sharding | ShardingRule | None = None
    ) -> tuple[Params, tuple[str, ...]]:
        """See `models.weights.read_params`.

        Raises:
            CheckpointError: tensors that do not match the metadata, or of an unknown type.
        """
        tensors = _GgufTensors(self.path, self._tensors, self.config)
        return read_params(decoder, tensors, str(self.path), sharding)

    def stored_dtype(self) -> np.dtype:
        """float32, which is what quantised weights dequantise to."""
        return np.dtype(np.float32)

    @cached_property
    def _reader(self) -> GGUFReader:
        try:
            return GGUFReader(self.path)
        # The reader fails in many ways on a damaged file (index, value, struct errors).
        except Exception as error:
            raise CheckpointError(f"{self.path}: not a readable GGUF file: {error}") from error

    @cached_property
    def _metadata(self) -> dict[str, Any]:
        return {name: field.contents() for name, field in self._reader.fields.items()}

    @cached_property
    def _tensors(self) -> dict[str, Any]:
        return {tensor.name: tensor for tensor in self._reader.tensors}

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path}: has no tensor {name}")
        return self._tensors[name]

    def _get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self._metadata['general.architecture']}.{key}", default)

    def _need(self, key: str) -> Any:
        value = self._get(key)
        if value is None:
            architecture = self._metadata["general.architecture"]
            raise CheckpointError(f"{self.path}: has no key {architecture}.{key}")
        return value

    def _rope_scaling(
        self, theta: float, head_dim: int, max_positions: int
    ) -> dict[str, Any] | None:
        if _ROPE_FACTORS in self._tensors:
            return self._llama3_scaling(theta, head_dim, max_positions)
        kind = self._get("rope.scaling.type", "none")
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": float(self._need("rope.scaling.factor"))}
        original = self._get("rope.scaling.original_context_length")
        if original:
            scaling["original_max_position_embeddings"] = original
        return scaling

    def _llama3_scaling(self, theta: float, head_dim: int, max_positions: int) -> dict[str, Any]:
        """GGUF keeps only what each frequency is divided by; find the scaling that gives it."""
        divisors = np.asarray(self._tensors[_ROPE_FACTORS].data, np.float32).reshape(-1)
        scaling = {"rope_type": "llama3", "factor": float(divisors.max()), **_LLAMA3_SHAPE}
        entries = {
            "max_position_embeddings": max_positions,
            "rope_theta": theta,
            "rope_scaling": scaling,
        }
        plain = Rope.from_hf({**entries, "rope_scaling": None}, head_dim).inverse_frequencies()
        scaled = Rope.from_hf(entries, head_dim).inverse_frequencies()
        if divisors.shape != plain.shape or not np.allclose(plain / scaled, divisors, rtol=1e-4):
            raise ConfigError(
                f"{self.path}: {_ROPE_FACTORS} is not a llama3 scaling with {_LLAMA3_SHAPE}"
            )
        return scaling


class _GgufTensors:
    """Tensors of a GGUF file under Hugging Face names and in Hugging Face layout."""

    def __init__(self, path: Path, tensors: Mapping[str, Any], config: Mapping[str, Any]):
        self._path = path
        self._config = config
        self._tensors = {
            _hf_name(name): tensor for name, tensor in tensors.items() if name != _ROPE_FACTORS
        }

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {
            name: tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = GGMLQuantizationType(tensor.tensor_type).name
            raise CheckpointError(
                f"{self._path}: tensor {tensor.name} has type {kind}, which cannot be dequantised"
            ) from error
        if self._config["model_type"] == "llama":
            if ".q_proj." in name:
                return _half_split_order(values, self._config["num_attention_heads"])
            if ".k_proj." in name:
                return _half_split_order(values, self._config["num_key_value_heads"])
        return values


def _hf_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor; an unknown one keeps its name, to be reported."""
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    match name.split("."):
        case ["blk", layer, module, kind] if module in _MODULES:
            return f"model.layers.{layer}.{_MODULES[module]}.{kind}"
        case _:
            return name


def _half_split_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """Output rows of a projection from GGUF's order for Llama to Hugging Face's.

    GGUF pairs dimension 2i with 2i + 1 in a rotation, Hugging Face i with i + D/2.
    """
    half = rows.shape[0] // heads // 2
    pairs = rows.reshape(heads, half, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _decimal(value: float) -> float:
    """The shortest decimal number that rounds to the float32 ``value``: 1e-05 was stored."""
    return float(str(np.float32(value)))
