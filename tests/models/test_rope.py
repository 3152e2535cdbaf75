import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from models import Rope, position_angles
from retopk_jax.rotary import rotate
from tests.models.test_decoder import ROPES


def both(rope: str, dim: int, limit: int) -> tuple[Rope, LlamaRotaryEmbedding]:
    entries = {
        "max_position_embeddings": limit,
        "rope_parameters": {"rope_theta": 5e5, **ROPES[rope]},
    }
    config = transformers.LlamaConfig(
        hidden_size=2 * dim, num_attention_heads=2, head_dim=dim, **entries
    )
    return Rope.from_hf(entries, dim), LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_equal_those_of_transformers(rope, dim):
    ours, theirs = both(rope, dim, 4096)
    frequencies = ours.inverse_frequencies()
    assert frequencies.dtype == np.float32
    np.testing.assert_array_max_ulp(frequencies, theirs.inv_freq.numpy(), maxulp=1)
    assert ours.scale == pytest.approx(theirs.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("dim", [16, 64, 128])
def test_dynamic_frequencies_equal_those_of_transformers(dim):
    ours, theirs = both("dynamic", dim, 128)
    lengths = [1, 127, 128, 129, 1000, 12_345, 60_000]
    rows = jax.jit(ours.row_inverse_frequencies)(jnp.asarray(lengths, jnp.int32))
    assert rows.dtype == jnp.float32
    for row, length in zip(rows, lengths, strict=True):
        theirs(torch.zeros(1), torch.tensor([[length - 1]]))
        np.testing.assert_array_max_ulp(np.asarray(row), theirs.inv_freq.numpy(), maxulp=2)


@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn"])
def test_frequencies_of_other_types_ignore_the_length(rope):
    ours, _ = both(rope, 16, 128)
    rows = ours.row_inverse_frequencies(jnp.asarray([1, 60_000], jnp.int32))
    np.testing.assert_array_equal(rows, np.stack([ours.inverse_frequencies()] * 2))


@pytest.mark.parametrize("rope", ["default", "yarn"])
def test_rotation_equals_that_of_transformers(rope):
    ours, theirs = both(rope, 32, 4096)
    positions = np.asarray([[0, 1, 2, 999, 8191, 59_999], [5, 6, 7, 8, 9, 2_000_000]])
    x = np.random.default_rng(0).normal(size=(2, 6, 3, 32)).astype(np.float32)
    rows = ours.row_inverse_frequencies(jnp.ones((2,), jnp.int32))
    angles = position_angles(jnp.asarray(positions, jnp.int32), rows)
    rotated = rotate(jnp.asarray(x), angles, ours.scale)
    cos, sin = theirs(torch.zeros(1), torch.tensor(positions))
    expected, _ = apply_rotary_pos_emb(torch.tensor(x), torch.tensor(x), cos, sin, unsqueeze_dim=2)
    # Equal frequencies round to equal angles, so even two million positions out nothing is lost.
    np.testing.assert_allclose(rotated, expected.numpy(), rtol=1e-5, atol=1e-5)


def test_rotations_add_up():
    ours, _ = both("default", 16, 4096)
    rows = ours.row_inverse_frequencies(jnp.ones((1,), jnp.int32))
    x = jax.random.normal(jax.random.key(0), (1, 1, 2, 16))

    def at(position: int) -> jax.Array:
        return position_angles(jnp.full((1, 1), position, jnp.int32), rows)

    moved = rotate(rotate(x, at(100)), at(-40))
    np.testing.assert_allclose(moved, rotate(x, at(60)), rtol=1e-4, atol=1e-5)


def test_rotation_keeps_the_dtype():
    x = jnp.ones((1, 1, 1, 4), jnp.bfloat16)
    assert rotate(x, jnp.zeros((1, 1, 2))).dtype == jnp.bfloat16
