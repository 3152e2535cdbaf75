"""Recall: cosine similarity of a query to the remembered ones, and the R most similar."""

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import dispatch
from pallas_kernels.recall import mosaic_tpu, reference, triton
from pallas_kernels.recall.types import Recalled

_IMPLEMENTATIONS = {
    "reference": reference.recall,
    "triton": triton.recall,
    "mosaic_tpu": mosaic_tpu.recall,
}
_PREFERENCE = {"gpu": ("triton",), "tpu": ("mosaic_tpu",)}


def recall(
    q: jax.Array,
    queries: jax.Array,
    pushed: jax.Array,
    *,
    entries: int,
    implementation: str | None = None,
) -> Recalled:
    """Finds the remembered queries most similar to the current one (equations 6 and 7).

    ``rho_c = (q / |q|) · queries_c`` in float32, kept within ±1, over the filled slots of a ring.
    Ties go to the more recent entry. A query whose float32 norm is zero or not finite resembles
    nothing.

    Args:
        q: ``[B, H, D]`` current queries, after positional encoding.
        queries: ``[B, H, C, D]`` ring of normalised queries; push number n lies in slot n % C.
        pushed: int32 ``[B]``, pushes so far; min(pushed, C) slots are filled.
        entries: R, entries to recall, at most C.
        implementation: name of one, or None for the platform's best.

    Returns:
        The normalised query, the slots and the largest similarity.
    """
    batch, heads, capacity, dim = queries.shape
    chex.assert_shape(q, (batch, heads, dim))
    chex.assert_shape(pushed, (batch,))
    chex.assert_type(pushed, jnp.int32)
    if not 1 <= entries <= capacity:
        raise ValueError(f"entries={entries}: expected 1 to the ring's capacity {capacity}")
    run = dispatch("recall", _IMPLEMENTATIONS, implementation, _PREFERENCE)
    return run(q, queries, pushed, entries=entries)


__all__ = ["Recalled", "recall"]
