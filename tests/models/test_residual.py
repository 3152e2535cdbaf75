"""The residual stream, and how much of it a change of a head's output is."""

import jax.numpy as jnp
import numpy as np

from models import load_model
from tests.models.checkpoints import write_random
from tests.models.dense import causal_attend


def test_the_metric_is_of_the_projection_and_the_median_norm(tmp_path):
    """Beside NumPy, from the weights as they are stored."""
    write_random(tmp_path)
    model = load_model(tmp_path, dtype="float32")
    config, rng = model.config, np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, (2, 12)), jnp.int32)
    metric = np.asarray(model.residual_metric(tokens))
    positions = jnp.broadcast_to(jnp.arange(12)[None], tokens.shape)
    stream = model.decoder.residuals(
        model.params, tokens, positions, jnp.array([12, 12]), causal_attend
    )
    assert len(stream) == config.num_layers + 1
    embedded = np.asarray(model.params["embed_tokens"]["embedding"])[np.asarray(tokens)]
    np.testing.assert_array_equal(stream[0], embedded)
    shape = (config.num_layers, config.num_heads, config.head_dim, config.head_dim)
    assert metric.shape == shape
    for layer in range(config.num_layers):
        kernel = np.asarray(model.params["layers"][layer]["self_attn"]["o_proj"]["kernel"])
        norm = np.median(np.linalg.norm(np.asarray(stream[layer]), axis=-1))
        for head in range(config.num_heads):
            change = rng.normal(size=config.head_dim)
            whole = np.zeros((config.num_heads, config.head_dim))
            whole[head] = change
            size = np.linalg.norm(whole.reshape(-1) @ kernel) / norm
            np.testing.assert_allclose(
                np.sqrt(change @ metric[layer, head] @ change), size, rtol=1e-4
            )
