"""What tells one model from another, whatever the file format or the float32 or bfloat16 dtype."""

import hashlib
import json
from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np

from retopk_jax.language_model import LanguageModel

SAMPLE = 256
"""Numbers of every parameter that are looked at."""


def model_fingerprint(model: LanguageModel) -> dict[str, str]:
    """SHA-256 of what a model's keys depend on.

    Returns:
        ``weights``: shapes, and the first numbers of every parameter rounded to bfloat16;
        ``rope``: head dimension and inverse frequencies of the rotary embedding, those of the
        longest row as well where they differ.
    """
    decoder = model.decoder
    weights = hashlib.sha256(json.dumps(asdict(decoder.geometry), sort_keys=True).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        weights.update(f"{jax.tree_util.keystr(path)} {leaf.shape}".encode())
        first = leaf[(0,) * (leaf.ndim - 1)][:SAMPLE] if leaf.ndim else leaf
        weights.update(np.asarray(first.astype(jnp.bfloat16)).tobytes())
    lengths = jnp.asarray([1, decoder.max_positions], jnp.int32)
    short, long = np.asarray(decoder.inverse_frequencies(lengths), np.float32)
    rates = short if np.array_equal(short, long) else np.stack([short, long])
    rope = hashlib.sha256(f"{decoder.geometry.head_dim} ".encode() + rates.tobytes())
    return {"weights": weights.hexdigest(), "rope": rope.hexdigest()}
