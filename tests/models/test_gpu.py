"""A whole model on a GPU: prefill through cuDNN and decode through the kernels.

Run with ``JAX_PLATFORMS=cuda python -m pytest tests/models/test_gpu.py``.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import ModelConfig, random_model
from retopk_jax import ExactTopK, Full, ReTopK, generate, prefill

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

CONFIG = ModelConfig.from_hf(
    {
        "model_type": "qwen2",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1000,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }
)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 1000, n).tolist() for n in (3000, 1, 700)]


def test_cudnn_prefill_is_near_the_blockwise_one():
    """bfloat16 against float32 of the same weights: rounding of 2**-9 in each of ~40 stages."""
    half = random_model(CONFIG, dtype="bfloat16")
    whole = random_model(CONFIG, dtype="float32")
    params = jax.tree.map(lambda x: x.astype(jnp.float32), half.params)
    exact = type(whole)(**{**vars(whole), "params": params})
    logits = [
        np.asarray(prefill(m, PROMPTS, new_tokens=8, tail_queries=4).context.logits)
        for m in (half, exact)
    ]
    for row in range(3):
        error = np.linalg.norm(logits[0][row] - logits[1][row]) / np.linalg.norm(logits[1][row])
        assert error < 40**0.5 * 2**-9 * 2


def test_kernels_and_plain_xla_generate_the_same_tokens(monkeypatch):
    """float32, greedy: the supports are the same, so the tokens are."""
    model = random_model(CONFIG, dtype="float32")
    methods = [Full(), ExactTopK(128), ReTopK(budget=128, tau=0.5, refresh=8)]
    fast = [generate(model, PROMPTS, attention=m, max_new_tokens=24).tokens for m in methods]
    monkeypatch.setattr("pallas_kernels.dispatch.platform", lambda: "none")
    jax.clear_caches()
    monkeypatch.setattr("retopk_jax.programs._COMPILED", {})
    plain = [generate(model, PROMPTS, attention=m, max_new_tokens=24).tokens for m in methods]
    for name, a, b in zip(["full", "exact", "retopk"], fast, plain, strict=True):
        assert a == b, name
