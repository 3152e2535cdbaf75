"""ReTopK: rank only what similar past queries attended to, and scan when none is similar."""

from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.candidates import candidates
from pallas_kernels.exact_support import exact_support
from pallas_kernels.recall import recall
from pallas_kernels.select import select
from pallas_kernels.sparse_attend import sparse_attend
from retopk_jax.attention.base import AttentionMethod, PathStatistics, Report, Step
from retopk_jax.attention.checks import check_choice, check_integer, check_number
from retopk_jax.errors import ConfigError
from retopk_jax.language_model import Geometry
from retopk_jax.recall_cache import RecallCache, fill_from_prompt, push, recall_cache_bytes

RECALL_BY = ("similarity", "recency")

REUSE, FALLBACK, REFRESH = 0, 1, 2
"""Paths of a head-step."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReTopKState:
    """What ReTopK remembers of one layer.

    Attributes:
        cache: remembered queries and supports.
        paths: int32 ``[B, H, 3]``, head-steps by path: reuse, fallback, refresh.
        candidates: int32 ``[B, H]``, unique candidates summed over the reuse steps.
    """

    cache: RecallCache
    paths: jax.Array
    candidates: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReTopK(AttentionMethod):
    """Similarity-guided reuse of top-K supports.

    Changing `tau` or `refresh` does not recompile a step; the sizes do.

    Attributes:
        budget: K, tokens attended.
        capacity: C, remembered (query, support) pairs a head.
        recall: R, most similar entries whose supports are merged; at most C.
        window: W, most recent tokens that are always candidates; 0 for none.
        tau: similarity below which a head scans all keys; above 1 always, −1 never (but for a
            query of zero or non-finite norm, or an empty cache).
        refresh: T_r, scan whenever the row's step t > 0 is a multiple of it; 0 never.
        recall_by: which R entries are merged, those most alike in ``"similarity"`` or, as an
            ablation, the last R by ``"recency"``. The path depends on the largest similarity to any
            entry in either case.
    """

    budget: int = field(default=512, metadata={"static": True})
    capacity: int = field(default=32, metadata={"static": True})
    recall: int = field(default=4, metadata={"static": True})
    window: int = field(default=32, metadata={"static": True})
    tau: float | jax.Array = 0.85
    refresh: int | jax.Array = 128
    recall_by: str = field(default="similarity", metadata={"static": True})

    name: ClassVar[str] = "retopk"

    def __post_init__(self) -> None:
        check_integer("budget", self.budget, minimum=1)
        check_integer("capacity", self.capacity, minimum=1)
        check_integer("recall", self.recall, minimum=1)
        check_integer("window", self.window, minimum=0)
        check_choice("recall_by", self.recall_by, RECALL_BY)
        if self.recall > self.capacity:
            raise ConfigError(
                f"recall={self.recall}: expected at most capacity={self.capacity}, "
                "the entries there are to recall"
            )
        if isinstance(self.tau, (bool, int, float, str)):  # traced inside jit
            check_number("tau", self.tau, minimum=-1.0)
        if isinstance(self.refresh, (bool, int, float, str)):
            check_integer("refresh", self.refresh, minimum=0)

    @property
    def tail_queries(self) -> int:
        """C: the recall cache is filled from the last C prompt tokens."""
        return self.capacity

    def prime(
        self,
        layer: int,
        keys: jax.Array,
        values: jax.Array,
        tail_queries: jax.Array,
        lengths: jax.Array,
    ) -> ReTopKState:
        """See `AttentionMethod.prime`."""
        batch, _, heads, _ = tail_queries.shape
        return ReTopKState(
            fill_from_prompt(tail_queries, keys, lengths, budget=self.budget),
            jnp.zeros((batch, heads, 3), jnp.int32),
            jnp.zeros((batch, heads), jnp.int32),
        )

    def attend(
        self,
        layer: int,
        state: ReTopKState,
        q: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        step: Step,
    ) -> tuple[jax.Array, ReTopKState, Report]:
        """One step of the method; see `AttentionMethod.attend`."""
        cache = state.cache
        with jax.named_scope("recall"):
            recalled = recall(q, cache.queries, cache.pushed, entries=self.recall)
            slots = recalled.slots
            if self.recall_by == "recency":
                slots = newest_slots(cache, slots.shape)
            path = self.choose_path(recalled.rho_max, step)  # [B, H]
            wanted = (path != REUSE) & step.active[:, None]
        with jax.named_scope("candidates"):
            scored = candidates(q, keys, cache.supports, slots, step.lengths, window=self.window)
            support, scores = select(scored.ids, scored.scores, budget=self.budget)
        with jax.named_scope("scan"):
            exact, exact_scores = exact_support(q, keys, step.lengths, wanted, budget=self.budget)
            support = jnp.where(wanted[..., None], exact, support)
            scores = jnp.where(wanted[..., None], exact_scores, scores)
        with jax.named_scope("attend"):
            out = sparse_attend(values, support, scores)
        counted = step.active[:, None]
        reused = (path == REUSE) & counted
        taken = (path[..., None] == jnp.arange(3)[None, None]) & counted[..., None]  # [B, H, 3]
        # Makes the ring's write wait for its reads; free to overlap, XLA would copy it first.
        qbar, support = jax.lax.optimization_barrier((recalled.qbar, support))
        state = ReTopKState(
            push(cache, qbar, support, step.active),
            state.paths + taken.astype(jnp.int32),
            state.candidates + jnp.where(reused, scored.unique, 0),
        )
        groups = keys.shape[1]
        scanned = jnp.any(wanted.reshape(wanted.shape[0], groups, -1), axis=2)  # [B, G]
        scan = jnp.sum(scanned, axis=1) * step.lengths
        ranked = jnp.sum(jnp.where(path == REUSE, scored.unique, 0), axis=1)
        read = (scan + ranked).astype(jnp.float32) * keys.shape[3]
        return out, state, Report(support, path, recalled.rho_max, scored.unique, read)

    def choose_path(self, rho_max: jax.Array, step: Step) -> jax.Array:
        """Path of every head, int32 ``[B, H]``: refresh on schedule, else reuse if similar enough.

        Args:
            rho_max: float32 ``[B, H]``, −inf without a comparable entry.
            step: the decode step.
        """
        period = jnp.asarray(self.refresh, jnp.int32)
        due = (period > 0) & (step.index > 0) & (step.index % jnp.maximum(period, 1) == 0)
        cosine = jnp.clip(rho_max, -1.0, 1.0)  # rounding may have carried it beyond
        similar = (cosine >= jnp.asarray(self.tau, jnp.float32)) & (rho_max > -jnp.inf)
        return jnp.where(due[:, None], REFRESH, jnp.where(similar, REUSE, FALLBACK))

    def state_bytes(self, geometry: Geometry, batch: int, capacity: int, dtype: DTypeLike) -> int:
        """Bytes of the recall caches."""
        return recall_cache_bytes(geometry, batch, self.capacity, self.budget, dtype)

    def path_statistics(self, states: tuple[ReTopKState, ...]) -> list[PathStatistics]:
        """Path counts of every row, summed and per layer and head."""
        paths = np.stack([np.asarray(s.paths) for s in states], axis=1)  # [B, layers, H, 3]
        totals = np.stack([np.asarray(s.candidates) for s in states], axis=1)  # [B, layers, H]
        rows = []
        for counts in np.concatenate([paths, totals[..., None]], axis=-1).astype(np.int64):
            reuse, fallback, refresh, unique = (int(n) for n in counts.sum(axis=(0, 1)))
            rows.append(PathStatistics(reuse, fallback, refresh, unique, counts.tolist()))
        return rows


def newest_slots(cache: RecallCache, shape: tuple[int, ...]) -> jax.Array:
    """Slots of the last R entries, the newest first, −1 where fewer are filled.

    Args:
        cache: the ring.
        shape: ``(B, H, R)`` of the result.
    """
    age = jnp.arange(shape[2], dtype=jnp.int32)[None]
    pushed = cache.pushed[:, None]
    slots = jnp.where(age < pushed, (pushed - 1 - age) % cache.capacity, -1)  # [B, R]
    return jnp.broadcast_to(slots[:, None], shape)
