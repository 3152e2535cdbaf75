"""The toy decoder over a whole sequence at once, in float64 NumPy, with dense causal attention."""

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from tests.retopk_jax.toy import ToyModel


def dense_logits(model: ToyModel, tokens: list[int]) -> NDArray[np.float64]:
    """Logits of the token after each of `tokens`, [T, V]."""

    def array(x: object) -> NDArray[np.float64]:
        return np.asarray(x, np.float64)

    geometry = model.decoder.geometry
    half, count = geometry.head_dim // 2, len(tokens)
    # Angles grow with the position and so does their rounding: the decoder's own, in float32.
    rates = np.asarray(100.0 ** (-jnp.arange(half, dtype=jnp.float32) / half))
    angle = array(np.arange(count, dtype=np.float32)[:, None] * rates)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]  # [T, 1, D / 2]

    def rotate(y: NDArray[np.float64]) -> NDArray[np.float64]:
        a, b = y[..., :half], y[..., half:]
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

    x = array(model.params["embed"])[tokens]
    causal = np.tril(np.ones((count, count), np.bool_))
    for block in model.params["blocks"]:
        q = rotate(np.einsum("te,ehd->thd", x, array(block["q"])))
        k = rotate(np.einsum("te,ehd->thd", x, array(block["k"])))
        v = np.einsum("te,ehd->thd", x, array(block["v"]))
        out = np.zeros_like(q)
        for head in range(geometry.num_heads):
            kv = head // geometry.group_size
            scores = q[:, head] @ k[:, kv].T / np.sqrt(geometry.head_dim)
            scores = np.where(causal, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, kv]
        x = x + np.einsum("thd,hde->te", out, array(block["o"]))
        x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    return x @ array(model.params["head"]).T
