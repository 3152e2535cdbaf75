"""Long-context decoding that recalls supports instead of ranking every key.

from models import load_model
from retopk_jax import ReTopK, generate

model = load_model("smollm2")
print(generate(model, "The capital of France is", attention=ReTopK(budget=128)).texts[0])
"""

from retopk_jax.attention import (
    AttentionMethod,
    ExactTopK,
    Full,
    Loki,
    Quest,
    ReTopK,
    SparQ,
    StreamingLLM,
    TokenSelect,
)
from retopk_jax.decode import Session, decode_step, start_session
from retopk_jax.errors import CapacityError, ConfigError, PromptError, RetopkError
from retopk_jax.generate import Completion, Generation, continue_from, generate
from retopk_jax.prefill import Context, prefill

__all__ = [
    "AttentionMethod",
    "CapacityError",
    "Completion",
    "ConfigError",
    "Context",
    "ExactTopK",
    "Full",
    "Generation",
    "Loki",
    "PromptError",
    "Quest",
    "ReTopK",
    "RetopkError",
    "Session",
    "SparQ",
    "StreamingLLM",
    "TokenSelect",
    "continue_from",
    "decode_step",
    "generate",
    "prefill",
    "start_session",
]
