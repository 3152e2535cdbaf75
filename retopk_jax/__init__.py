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
    Risk,
    SparQ,
    StreamingLLM,
    TokenSelect,
)
from retopk_jax.context_store import load_context, save_context
from retopk_jax.decode import Session, decode_step, remember, start_session
from retopk_jax.errors import (
    CapacityError,
    ConfigError,
    ContextError,
    PromptError,
    RetopkError,
)
from retopk_jax.generate import Completion, Generation, generate
from retopk_jax.prefill import Context, extend, prefill
from retopk_jax.sharding import make_mesh

__all__ = [
    "AttentionMethod",
    "CapacityError",
    "Completion",
    "ConfigError",
    "Context",
    "ContextError",
    "ExactTopK",
    "Full",
    "Generation",
    "Loki",
    "PromptError",
    "Quest",
    "ReTopK",
    "RetopkError",
    "Risk",
    "Session",
    "SparQ",
    "StreamingLLM",
    "TokenSelect",
    "decode_step",
    "extend",
    "generate",
    "load_context",
    "make_mesh",
    "prefill",
    "remember",
    "save_context",
    "start_session",
]
