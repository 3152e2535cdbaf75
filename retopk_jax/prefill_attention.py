"""Causal attention of a chunk of prompt tokens over the cache of one row."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.packed import slots_between
from retopk_jax.sharding import SEQUENCE, place_of, ways

BLOCK = 1024
"""Keys read at a time; the scores of one chunk against one block are the largest temporary."""


def chunk_attention(
    q: jax.Array, keys: jax.Array, values: jax.Array, row: jax.Array, start: jax.Array
) -> jax.Array:
    """Softmax attention of T tokens over the cache, block by block with a running maximum.

    Work grows with ``start + T``, not with the cache's capacity. Where positions are sharded, every
    device attends to its own and the results are merged.

    Args:
        q: ``[T, H, D]``, tokens at positions ``start … start + T − 1``.
        keys: ``[B, G, S, D]``, these tokens included.
        values: ``[B, G, S, D]``, these tokens included.
        row: int32 scalar, row of the cache.
        start: int32 scalar, valid tokens of the row before these.

    Returns:
        ``[T, H, D]`` in the dtype of ``q``; scores, softmax and sums in float32.
    """
    tokens, heads, dim = q.shape
    groups, slots = keys.shape[1:3]
    block = min(BLOCK, slots)
    grouped = jnp.moveaxis(q.reshape(tokens, groups, heads // groups, dim), 0, 2)  # [G, g, T, D]
    grouped = grouped.reshape(groups, heads // groups * tokens, dim)
    position = jnp.tile(start + jnp.arange(tokens, dtype=jnp.int32), heads // groups)  # [g * T]

    own = place_of(SEQUENCE, slots)  # position of the first slot

    def body(
        i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        best, total, out = carry  # [G, g * T], [G, g * T], [G, g * T, D]
        first = i * block
        offset = jnp.minimum(first, slots - block)
        k, v = (slots_between(x, row, offset, block) for x in (keys, values))
        slot = offset + jnp.arange(block, dtype=jnp.int32)
        visible = (slot[None, :] >= first) & (own + slot[None, :] <= position[:, None])
        scores = jnp.einsum(
            "gtd,gsd->gts",
            grouped,
            k,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        scores = jnp.where(visible[None], scores * dim**-0.5, -jnp.inf)
        higher = jnp.maximum(best, jnp.max(scores, axis=-1))
        shift = jnp.where(higher > -jnp.inf, higher, 0.0)
        weights = jnp.exp(scores - shift[..., None])
        decay = jnp.exp(best - shift)
        update = jnp.einsum(
            "gts,gsd->gtd",
            weights.astype(v.dtype),
            v,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        total = total * decay + jnp.sum(weights, axis=-1)
        return higher, total, out * decay[..., None] + update

    rows = (groups, grouped.shape[1])
    carry = (
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((*rows, dim), jnp.float32),
    )
    blocks = jnp.clip((start + tokens - own + block - 1) // block, 0, -(-slots // block))
    best, total, out = lax.fori_loop(0, blocks, body, carry)
    if ways(SEQUENCE) > 1:
        highest = lax.pmax(best, SEQUENCE)
        decay = jnp.exp(best - jnp.where(highest > -jnp.inf, highest, 0.0))
        total, out = lax.psum((total * decay, out * decay[..., None]), SEQUENCE)
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
    out = out.reshape(groups, heads // groups, tokens, dim)
    return jnp.moveaxis(out, 2, 0).reshape(tokens, heads, dim).astype(q.dtype)


def prompt_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of a whole prompt over itself, through cuDNN.

    Args:
        q: ``[T, H, D]``, bfloat16 or float16.
        k: ``[T, G, D]``.
        v: ``[T, G, D]``.

    Returns:
        ``[T, H, D]``.
    """
    return jax.nn.dot_product_attention(
        q[None], k[None], v[None], is_causal=True, implementation="cudnn"
    )[0]


def cudnn_serves(head_dim: int, dtype: jnp.dtype) -> bool:
    """Whether `prompt_attention` runs here."""
    return (
        jax.default_backend() == "gpu"
        and dtype.itemsize == 2
        and head_dim % 8 == 0
        and head_dim <= 128
    )
