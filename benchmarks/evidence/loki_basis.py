"""Principal components of a model's keys, for Loki: fitted on a document that is not scored."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.evidence.documents import token_hash
from benchmarks.evidence.resume import ITEMS
from models import CausalLM
from retopk_jax.prefill import prefill


@jax.jit
def covariance(keys: jax.Array, length: jax.Array) -> jax.Array:
    """Covariance of the keys of every key-value head.

    Args:
        keys: ``[G, S, D]``.
        length: int32 scalar, valid keys.

    Returns:
        float32 ``[G, D, D]``.
    """
    known = (jnp.arange(keys.shape[1]) < length)[None, :, None]
    rows = jnp.where(known, keys.astype(jnp.float32), 0.0)
    count = length.astype(jnp.float32)
    mean = jnp.sum(rows, axis=1, keepdims=True) / count  # [G, 1, D]
    centred = jnp.where(known, rows - mean, 0.0)
    total = jnp.einsum("gsd,gse->gde", centred, centred, precision=lax.Precision.HIGHEST)
    return total / count


def fit_basis(model: CausalLM, tokens: np.ndarray) -> np.ndarray:
    """Components of the keys, after positional encoding, of one text read by the model.

    Args:
        model: the model.
        tokens: int32 ``[N]``.

    Returns:
        float32 ``[layers, G, D, D]``, components in columns, largest variance first.
    """
    read = prefill(model, [tokens.tolist()], new_tokens=1, capacity=None, tail_queries=1)
    length = jnp.int32(len(tokens))
    layers = []
    for keys in read.context.cache.keys:
        _, vectors = np.linalg.eigh(np.asarray(covariance(keys[0], length), np.float64))
        layers.append(vectors[..., ::-1])  # eigh sorts ascending
    return np.stack(layers).astype(np.float32)


def cached_basis(out: Path, key: str, model: CausalLM, tokens: np.ndarray) -> jax.Array:
    """`fit_basis`, kept in the results' directory.

    Args:
        out: directory of the results.
        key: identifies the model and its RoPE.
        model: the model.
        tokens: int32 ``[N]``.
    """
    path = out / ITEMS / f"loki-{key[:12]}-{token_hash(tokens)[:12]}.npy"
    if path.is_file():
        return jnp.asarray(np.load(path))
    basis = fit_basis(model, tokens)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".aside")
    with aside.open("wb") as file:
        np.save(file, basis)
    aside.replace(path)
    return jnp.asarray(basis)
