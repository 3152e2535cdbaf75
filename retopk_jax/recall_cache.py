"""The recall cache: a ring of the last C (normalised query, support) pairs of every head."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.numerics import PAD
from pallas_kernels.recall.reference import normalise
from retopk_jax.language_model import Geometry
from retopk_jax.positions import prefill_supports


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecallCache:
    """One layer's remembered queries and supports; its size does not depend on L.

    Push number n lies in slot n % C: the oldest entry is the one overwritten.

    Attributes:
        queries: ``[B, H, C, D]``, q / |q| after positional encoding, in the dtype of the keys.
        supports: int32 ``[B, H, C, K]``, ascending, −1 last.
        pushed: int32 ``[B]``, pushes so far; min(pushed, C) entries are filled.
    """

    queries: jax.Array
    supports: jax.Array
    pushed: jax.Array

    @property
    def capacity(self) -> int:
        """Entries, C."""
        return self.queries.shape[2]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FilledRecall:
    """What the prompts of a context filled the recall caches with.

    Attributes:
        layers: recall cache of every layer.
        lengths: int32 ``[B]``, tokens of each row at the time.
    """

    layers: tuple[RecallCache, ...]
    lengths: jax.Array

    @property
    def sizes(self) -> tuple[int, int]:
        """Entries and tokens of each, (C, K)."""
        capacity, budget = self.layers[0].supports.shape[2:]
        return capacity, budget


def recall_cache_bytes(
    geometry: Geometry, batch: int, capacity: int, budget: int, dtype: DTypeLike
) -> int:
    """Bytes of the recall caches of all layers."""
    entry = geometry.head_dim * jnp.dtype(dtype).itemsize + 4 * budget
    return geometry.num_layers * batch * (geometry.num_heads * capacity * entry + 4)


@functools.partial(jax.jit, static_argnames=("budget",))
def fill_from_prompt(
    tail_queries: jax.Array,
    keys: jax.Array,
    lengths: jax.Array,
    known: tuple[RecallCache, jax.Array] | None = None,
    *,
    budget: int,
) -> RecallCache:
    """Fills the ring from the last min(C, prompt) prompt tokens.

    Each entry is a prompt token's normalised query and its exact top-K support under the causal
    mask at its own position.

    Args:
        tail_queries: ``[B, C, H, D]``, queries of the last C prompt tokens, the newest last.
        keys: ``[B, G, S, D]``.
        lengths: int32 ``[B]``, prompt tokens.
        known: a cache of these sizes, filled when the rows had fewer tokens or as many, int32
            ``[B]``; its supports are not searched again.
        budget: K.
    """
    capacity = tail_queries.shape[1]
    filled = jnp.minimum(lengths, capacity)  # [B]
    slot = jnp.arange(capacity, dtype=jnp.int32)[None, :]  # [1, C]: the oldest entry in slot 0
    source = jnp.clip(capacity - filled[:, None] + slot, 0, capacity - 1)
    queries = jnp.take_along_axis(tail_queries, source[:, :, None, None], axis=1)
    queries = jnp.moveaxis(queries, 1, 2)  # [B, H, C, D]
    positions = jnp.where(slot < filled[:, None], lengths[:, None] - filled[:, None] + slot, -1)
    qbar, _ = normalise(queries)
    if known is None:
        supports = prefill_supports(queries, keys, positions, budget=budget)
    else:
        supports = _missing_supports(queries, keys, positions, *known, budget=budget)
    return RecallCache(qbar.astype(keys.dtype), supports, filled)


def _missing_supports(
    queries: jax.Array,
    keys: jax.Array,
    positions: jax.Array,
    known: RecallCache,
    known_lengths: jax.Array,
    *,
    budget: int,
) -> jax.Array:
    """Supports ``[B, H, C, K]``, of which those at known positions are taken over."""
    before = known_lengths[:, None]
    slot = positions - before + known.pushed[:, None]  # [B, C], in the known cache
    held = (positions >= 0) & (positions < before) & (slot >= 0)
    missing = jnp.where(held, -1, positions)
    kept = jnp.clip(slot, 0, known.capacity - 1)[:, None, :, None]
    kept = jnp.take_along_axis(known.supports, kept, axis=2)
    return lax.cond(
        jnp.any(missing >= 0),
        lambda: jnp.where(
            held[:, None, :, None],
            kept,
            prefill_supports(queries, keys, missing, budget=budget),
        ),
        lambda: jnp.where(held[:, None, :, None], kept, PAD),
    )
