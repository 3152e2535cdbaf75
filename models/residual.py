"""How much of the residual stream a change of a head's output is."""

from functools import partial

import jax
import jax.numpy as jnp

from retopk_jax.language_model import Params

from .decoder import TransformerDecoder


@partial(jax.jit, static_argnames=("decoder",))
def residual_metric(decoder: TransformerDecoder, params: Params, tokens: jax.Array) -> jax.Array:
    """``M`` such that ``d @ M @ d = |W d|² / x²`` for a change d of the output of a head.

    W is the head's part of the output projection, and x the norm of what enters the layer: its
    median over the given tokens, as the first of a text have norms of another size.

    Args:
        decoder: the model's functions.
        params: the weights.
        tokens: int32 ``[B, T]``, read densely.

    Returns:
        float32 ``[layers, H, D, D]``.
    """
    config = decoder.config

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        def row(one: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            q, k, v = (x[None] for x in one)
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)[0]

        return jax.lax.map(row, (q, k, v))

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    lengths = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    stream = decoder.residuals(params, tokens, positions, lengths, attend)[:-1]
    metrics = []
    for layer, x in enumerate(stream):
        norm = jnp.median(jnp.linalg.norm(x.astype(jnp.float32), axis=-1))
        kernel = params["layers"][layer]["self_attn"]["o_proj"]["kernel"].astype(jnp.float32)
        heads = kernel.reshape(config.num_heads, config.head_dim, -1) / norm  # [H, D, E]
        metrics.append(jnp.einsum("hde,hfe->hdf", heads, heads, precision="highest"))
    return jnp.stack(metrics)
