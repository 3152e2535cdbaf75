"""ReTopK: rank only what similar past queries attended to, and scan when none is similar."""

import functools
from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.recall import recall
from pallas_kernels.retopk_step import Remembered
from pallas_kernels.retopk_step.types import FALLBACK, REFRESH, REUSE, SIGNALS
from retopk_jax.attention.base import AttentionMethod, PathStatistics, Report, Step
from retopk_jax.attention.checks import check_choice, check_integer, check_number
from retopk_jax.attention.path_policy import Risk, scanning
from retopk_jax.errors import ConfigError
from retopk_jax.language_model import Geometry
from retopk_jax.positions import retopk_step
from retopk_jax.recall_cache import RecallCache, fill_from_prompt, recall_cache_bytes
from retopk_jax.sharding import SEQUENCE, TENSOR

__all__ = ["FALLBACK", "RECALL_BY", "REFRESH", "REUSE", "ReTopK", "ReTopKState", "Risk"]

RECALL_BY = ("similarity", "recency")

_REUSE_ANYWAY, _SCAN_ANYWAY = -2.0, 2.0
"""Thresholds beyond every similarity, by which a head is told its path."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReTopKState:
    """What ReTopK remembers of one layer.

    Attributes:
        cache: remembered queries and supports.
        paths: int32 ``[B, H, 3]``, head-steps by path: reuse, fallback, refresh.
        candidates: int32 ``[B, H]``, unique candidates summed over the reuse steps.
        signals: int32 ``[B, H, *SIGNALS]``, zeros between steps; see `Remembered`.
        scanned: int32 ``[B, G]``, steps in which some head of the group scanned.
        predicted: float32 ``[B, H]``, expected errors summed over the reuse steps; None without
            maps of them.
    """

    cache: RecallCache
    paths: jax.Array
    candidates: jax.Array
    signals: jax.Array
    scanned: jax.Array
    predicted: jax.Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReTopK(AttentionMethod):
    """Similarity-guided reuse of top-K supports.

    A sequence of at most K tokens is attended whole, as by `Full`, if W >= C; with a shorter window
    a reuse can miss tokens that are older than the window and newer than every recalled support.

    A head scans where its similarity is below `tau`. With `share_scan` the other heads of its KV
    group then scan too: their keys are read anyway, and what they remember is fresher. With `risk`
    a group scans where the expected errors of its heads add up to more than theta, whatever `tau`.

    Changing `tau`, `refresh` or `risk` does not recompile a step; the sizes do.

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
        share_scan: all heads of a KV group scan where one does.
        risk: maps of expected errors, from `retopk calibrate --method retopk`; groups scan whole.
    """

    budget: int = field(default=512, metadata={"static": True})
    capacity: int = field(default=32, metadata={"static": True})
    recall: int = field(default=4, metadata={"static": True})
    window: int = field(default=32, metadata={"static": True})
    tau: float | jax.Array = 0.85
    refresh: int | jax.Array = 128
    recall_by: str = field(default="similarity", metadata={"static": True})
    share_scan: bool = field(default=False, metadata={"static": True})
    risk: Risk | None = None

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
        if isinstance(self.tau, (bool, int, float, str, np.generic)):  # traced inside jit
            check_number("tau", self.tau, minimum=-1.0)
        if isinstance(self.refresh, (bool, int, float, str, np.generic)):
            check_integer("refresh", self.refresh, minimum=0)
        if not isinstance(self.share_scan, bool):
            raise ConfigError(f"share_scan={self.share_scan!r}: expected True or False")
        if self.share_scan and self.risk is not None:
            raise ConfigError("share_scan=True: groups scan whole under risk: leave it out")

    @property
    def tail_queries(self) -> int:
        """C: the recall cache is filled from the last C prompt tokens."""
        return self.capacity

    @property
    def shards(self) -> frozenset[str]:
        """Positions, and heads where each has its own path: a group may lie on several devices."""
        return frozenset({SEQUENCE} if self._by_group else {TENSOR, SEQUENCE})

    @property
    def _by_group(self) -> bool:
        return self.share_scan or self.risk is not None

    def check(self, geometry: Geometry) -> None:
        """Refuses maps of expected errors that do not fit the model's shapes."""
        if self.risk is not None:
            self.risk.check(geometry)

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
            jnp.zeros((batch, heads, *SIGNALS), jnp.int32),
            jnp.zeros((batch, keys.shape[1]), jnp.int32),
            None if self.risk is None else jnp.zeros((batch, heads), jnp.float32),
        )

    def attend(
        self,
        layer: int | jax.Array,
        state: ReTopKState,
        q: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        step: Step,
    ) -> tuple[jax.Array, ReTopKState, Report]:
        """One step of the method; see `AttentionMethod.attend`."""
        cache, groups = state.cache, keys.shape[1]
        tau, expected = self.tau, None
        if self._by_group:
            similar = recall(q, cache.queries, cache.pushed, entries=self.recall).rho_max
            theta = 0.0
            if self.risk is not None:
                expected, theta = self.risk.expected(layer, similar), self.risk.theta
            scan = scanning(similar, groups, tau, expected, theta)
            tau = jnp.where(scan, _SCAN_ANYWAY, _REUSE_ANYWAY)
        done = retopk_step(
            q,
            keys,
            values,
            Remembered(
                cache.queries,
                cache.supports,
                cache.pushed,
                state.paths,
                state.candidates,
                state.signals,
            ),
            step.lengths,
            self.refresh_due(step),
            step.active,
            tau,
            entries=self.recall,
            window=self.window,
            by_recency=self.recall_by == "recency",
        )
        new = done.remembered
        reused = (done.path == REUSE) & step.active[:, None]
        scans = (done.path != REUSE) & step.active[:, None]
        scans = scans.reshape(scans.shape[0], groups, -1)  # [B, G, H / G]
        each = scans.shape[2]
        # One by one: as a reduction it would be one more kernel in every layer.
        scanned = functools.reduce(jnp.logical_or, (scans[:, :, i] for i in range(each)))
        predicted = state.predicted
        if predicted is not None and expected is not None:
            predicted = predicted + jnp.where(reused, expected, 0.0)
        state = ReTopKState(
            RecallCache(new.queries, new.supports, new.pushed),
            new.paths,
            new.candidates,
            new.signals,
            state.scanned + scanned.astype(jnp.int32),
            predicted,
        )
        scan = jnp.where(scanned, step.lengths[:, None], 0)[..., None]  # at a group's first head
        scan = jnp.pad(scan, ((0, 0), (0, 0), (0, each - 1))).reshape(done.unique.shape)
        read = (scan + done.unique).astype(jnp.float32) * keys.shape[3]
        return done.out, state, Report(done.support, done.path, done.rho_max, done.unique, read)

    def refresh_due(self, step: Step) -> jax.Array:
        """Rows whose heads all scan by schedule, bool ``[B]``."""
        period = jnp.asarray(self.refresh, jnp.int32)
        return (period > 0) & (step.index > 0) & (step.index % jnp.maximum(period, 1) == 0)

    def state_bytes(self, geometry: Geometry, batch: int, capacity: int, dtype: DTypeLike) -> int:
        """Bytes of the recall caches."""
        return recall_cache_bytes(geometry, batch, self.capacity, self.budget, dtype)

    def path_statistics(self, states: tuple[ReTopKState, ...]) -> list[PathStatistics]:
        """Counts of every row, summed, and those of paths per layer and head."""
        paths = np.stack([np.asarray(s.paths) for s in states], axis=1)  # [B, layers, H, 3]
        totals = np.stack([np.asarray(s.candidates) for s in states], axis=1)  # [B, layers, H]
        scanned = np.stack([np.asarray(s.scanned) for s in states], axis=1)  # [B, layers, G]
        steps = paths.sum(axis=(1, 2, 3)) // (paths.shape[1] * paths.shape[2])
        rows = []
        by_head = np.concatenate([paths, totals[..., None]], axis=-1).astype(np.int64)
        for row, counts in enumerate(by_head):
            reuse, fallback, refresh, unique = (int(n) for n in counts.sum(axis=(0, 1)))
            predicted = None
            if self.risk is not None:
                predicted = float(sum(np.asarray(s.predicted)[row].sum() for s in states))
            rows.append(
                PathStatistics(
                    reuse,
                    fallback,
                    refresh,
                    unique,
                    counts.tolist(),
                    groups_scanned=int(scanned[row].sum()),
                    group_steps=int(steps[row]) * scanned[row].size,
                    predicted_error=predicted,
                )
            )
        return rows
