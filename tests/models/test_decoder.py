import dataclasses
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from models import ModelConfig, TransformerDecoder, decoder, load_model, random_model
from retopk_jax.language_model import Geometry
from tests.models.checkpoints import write_random
from tests.models.dense import causal_attend, dense_logits

LENGTH = 24
STARTS = (0, 1000, 30_000, 60_000 - LENGTH)
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.8,
        "mscale_all_dim": 0.3,
        "truncate": False,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.3,
    },
}


def assert_same_logits(directory, reference, starts=STARTS):
    """fp32 logits within 1e-4: largest difference over largest reference logit, row by row.

    Rows are run one at a time by transformers, whose `dynamic` depends on the batch's longest.
    """
    model = load_model(directory, dtype="float32")
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.config.vocab_size, (len(starts), LENGTH))
    positions = np.asarray(starts)[:, None] + np.arange(LENGTH)
    ours = dense_logits(model, jnp.asarray(tokens, jnp.int32), jnp.asarray(positions, jnp.int32))
    assert ours.dtype == jnp.float32
    for row in range(len(starts)):
        with torch.no_grad():
            theirs = reference(
                torch.tensor(tokens[row : row + 1]),
                position_ids=torch.tensor(positions[row : row + 1]),
                use_cache=False,
            ).logits[0]
        theirs = theirs.numpy()
        error = np.abs(np.asarray(ours[row]) - theirs).max() / np.abs(theirs).max()
        assert error < 1e-4, f"start {starts[row]}: {error}"


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_equal_those_of_transformers_for_every_rope(tmp_path, family, rope):
    parameters = {"rope_theta": 10_000.0, **ROPES[rope]}
    limit = 128 if rope == "dynamic" else 65536
    reference = write_random(
        tmp_path, family, rope_parameters=parameters, max_position_embeddings=limit
    )
    assert_same_logits(tmp_path, reference)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (7, 1)])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"attention_bias": False, "mlp_bias": False}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
    ],
    ids=["llama", "llama-biases", "qwen2"],
)
def test_logits_equal_those_of_transformers_for_every_shape(tmp_path, family, options, heads, tied):
    query, key_value = heads
    options = {"hidden_size": 12 * query} | options
    if family == "llama":
        options["head_dim"] = 16
    reference = write_random(
        tmp_path,
        family,
        num_attention_heads=query,
        num_key_value_heads=key_value,
        tie_word_embeddings=tied,
        **options,
    )
    assert_same_logits(tmp_path, reference, STARTS[:1])


def test_dynamic_rope_depends_on_each_rows_own_length(tmp_path):
    write_random(
        tmp_path,
        rope_parameters={"rope_theta": 10_000.0, **ROPES["dynamic"]},
        max_position_embeddings=16,
    )
    model = load_model(tmp_path)
    tokens = jnp.broadcast_to(jnp.arange(8)[None], (2, 8))
    positions = jnp.stack([jnp.arange(8), jnp.arange(8) + 40])
    together = dense_logits(model, tokens, positions)
    for row in range(2):
        alone = dense_logits(model, tokens[row : row + 1], positions[row : row + 1])
        np.testing.assert_allclose(together[row], alone[0], rtol=1e-5, atol=1e-5)
    # Without a dependence on length, attention would see only relative positions.
    assert np.abs(together[0] - together[1]).max() > 1e-3


def small_config(**changes) -> ModelConfig:
    entries = {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }
    return ModelConfig.from_hf({**entries, **changes})


@pytest.mark.parametrize("length", [8, 9, 21])
def test_mlp_in_chunks_equals_mlp_at_once(monkeypatch, length):
    model = random_model(small_config(), dtype="float32")
    tokens = jax.random.randint(jax.random.key(0), (2, length), 0, 32)
    positions = jnp.broadcast_to(jnp.arange(length)[None], tokens.shape)
    lengths = jnp.full((2,), length)

    def run():
        hidden = partial(model.decoder.hidden, attend=causal_attend)
        return jax.jit(hidden)(model.params, tokens, positions, lengths)

    whole = run()
    monkeypatch.setattr(decoder, "MLP_CHUNK_TOKENS", 16)
    np.testing.assert_allclose(run(), whole, rtol=1e-5, atol=1e-5)


def test_mlp_in_chunks_bounds_memory():
    wide = small_config(intermediate_size=512)
    model = random_model(wide, dtype="float32")

    def temporary_bytes(length: int) -> int:
        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def run(params, tokens):
            positions = jnp.arange(length)[None]
            lengths = jnp.full((1,), length)
            return model.decoder.hidden(
                params, tokens, positions, lengths, lambda layer, q, k, v: q
            )

        analysis = jax.jit(run).lower(model.params, tokens).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    chunk = decoder.MLP_CHUNK_TOKENS
    # Past one chunk a token costs a few rows of the residual stream, not of the MLP.
    growth = (temporary_bytes(6 * chunk) - temporary_bytes(2 * chunk)) / (4 * chunk)
    assert growth < 4 * 512


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_near_float32(dtype):
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 32)
    exact = dense_logits(random_model(small_config(), dtype="float32"), tokens)
    half = random_model(small_config(), dtype="float32")
    half = dataclasses.replace(
        half,
        decoder=dataclasses.replace(half.decoder, dtype=jnp.dtype(dtype)),
        params=jax.tree.map(lambda leaf: leaf.astype(dtype), half.params),
    )
    logits = dense_logits(half, tokens)
    assert logits.dtype == jnp.float32
    hidden = jax.eval_shape(
        partial(half.decoder.hidden, attend=causal_attend),
        *(half.params, tokens, tokens, jnp.ones((2,), jnp.int32)),
    )
    assert hidden.dtype == jnp.dtype(dtype)
    assert np.abs(logits - exact).max() < 0.1 * np.abs(exact).max()


def test_decoder_is_a_static_argument():
    config = small_config()
    first, second = (TransformerDecoder(config, jnp.dtype(jnp.float32)) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != dataclasses.replace(first, dtype=jnp.dtype(jnp.bfloat16))
    start = time.perf_counter()
    for _ in range(1000):
        hash(first)
    assert time.perf_counter() - start < 0.1  # 100 µs each: nothing beside a decode step


def test_geometry():
    model = TransformerDecoder(small_config(), jnp.dtype(jnp.float32))
    assert model.geometry == Geometry(num_layers=2, num_heads=3, num_kv_heads=1, head_dim=8)
    assert (model.vocab_size, model.max_positions) == (32, 128)
