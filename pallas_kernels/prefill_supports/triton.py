"""Prefill supports on the exact scan: the queries of several tokens share a read of the keys."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.exact_support.triton import exact_rows
from pallas_kernels.triton_lib import check


def prefill_supports(
    queries: jax.Array, keys: jax.Array, positions: jax.Array, *, budget: int
) -> jax.Array:
    """See `pallas_kernels.prefill_supports.prefill_supports`."""
    batch, heads, count, dim = queries.shape
    groups, stored = keys.shape[1:3]
    each = heads // groups
    check(each <= 64, "up to 64 query heads a key-value head")
    together = min(count, max(1, 16 // each))  # more rows spill registers in the scan
    steps = -(-count // together)
    extra = steps * together - count
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, extra), (0, 0)))
    positions = jnp.pad(positions, ((0, 0), (0, extra)), constant_values=-1)
    queries = queries.reshape(batch * groups, each, steps, together, dim)
    lengths = jnp.clip(positions + 1, 0, stored).reshape(batch, steps, together)
    flat_keys = keys.reshape(batch * groups, stored, dim)

    def one(step: tuple[jax.Array, jax.Array]) -> jax.Array:
        q, visible = step  # [BG, each, together, D], [B, together]
        visible = jnp.broadcast_to(visible[:, None], (batch, heads, together))
        support, _ = exact_rows(
            q.reshape(batch * heads * together, dim), flat_keys, visible.ravel(), budget=budget
        )
        return support.reshape(batch, heads, together, budget)

    supports = lax.map(one, (jnp.moveaxis(queries, 2, 0), jnp.moveaxis(lengths, 1, 0)))
    supports = jnp.moveaxis(supports, 0, 2)  # [B, H, steps, together, K]
    return supports.reshape(batch, heads, steps * together, budget)[:, :, :count]
