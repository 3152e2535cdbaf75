"""Llama and Qwen2 models: one decoder, loaded from Hugging Face, GGUF or Orbax checkpoints."""

from .causal_lm import CausalLM, default_dtype, parameter_bytes, parameter_count, random_model
from .config import ModelConfig, with_rope
from .decoder import TransformerDecoder
from .errors import ChatTemplateError, CheckpointError, ConfigError, ModelError, TokenizerError
from .loading import convert, load_model, read_config
from .rope import Rope, position_angles
from .sharding import shard_model
from .tokenizer import StreamDecoder, TextTokenizer

__all__ = [
    "CausalLM",
    "ChatTemplateError",
    "CheckpointError",
    "ConfigError",
    "ModelConfig",
    "ModelError",
    "Rope",
    "StreamDecoder",
    "TextTokenizer",
    "TokenizerError",
    "TransformerDecoder",
    "convert",
    "default_dtype",
    "load_model",
    "parameter_bytes",
    "parameter_count",
    "position_angles",
    "random_model",
    "read_config",
    "shard_model",
    "with_rope",
]
