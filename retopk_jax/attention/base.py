"""The one interface of every decode-time attention method."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from retopk_jax.language_model import Geometry

LayerState = Any
"""A pytree of arrays with leading dimension B: what a method remembers of one layer."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
    """One decode step as a method sees it, the same for every layer.

    Attributes:
        lengths: int32 ``[B]``, valid tokens L, the current one included.
        index: int32 ``[B]``, decode steps of the row before this one, t.
        active: bool ``[B]``; the other rows have ended: their output is not used, and nothing of
            them may be remembered or counted.
        inverse_frequencies: float32 ``[B, D / 2]``, radians per position by which the pairs
            (i, i + D / 2) of a key are rotated; None where no method asks for it.
    """

    lengths: jax.Array
    index: jax.Array
    active: jax.Array
    inverse_frequencies: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Report:
    """What one step of one layer attended to; None where the method has no such thing.

    Attributes:
        support: int32 ``[B, H, K]``, tokens attended, ascending, −1 last; None for all tokens.
        path: int32 ``[B, H]``, how the support was found, as the method numbers it.
        rho_max: float32 ``[B, H]``, similarity to the most similar remembered query.
        candidates: int32 ``[B, H]``, unique candidates ranked by a reuse.
        key_elements: float32 ``[B]``, or ``[B, N]`` in N parts to add up: numbers of the keys, or
            of what stands for them in ranking, that the step had to read: a key or a value once for
            all query heads that are bound to read the same, so once a KV head on a scan of all
            keys, and once a head where every head chooses for itself.
        value_elements: the same of the values it had to read; None for those of the support once a
            head, or of all tokens once a KV head.
    """

    support: jax.Array | None = None
    path: jax.Array | None = None
    rho_max: jax.Array | None = None
    candidates: jax.Array | None = None
    key_elements: jax.Array | None = None
    value_elements: jax.Array | None = None


@dataclass(frozen=True)
class PathStatistics:
    """How one row's head-steps were served.

    Attributes:
        reuse: head-steps that ranked only recalled candidates.
        fallback: head-steps that scanned because nothing remembered was similar enough.
        refresh: head-steps that scanned on schedule.
        candidates: unique candidates summed over the reuse head-steps.
        by_head: the same four numbers per layer and head, int ``[layers][H][4]``.
        groups_scanned: group-steps in which some head scanned; None where none can.
        group_steps: KV heads times layers times steps.
        predicted_error: relative errors that were expected of the reuse head-steps, summed; None
            without maps of them.
    """

    reuse: int
    fallback: int
    refresh: int
    candidates: int
    by_head: list[list[list[int]]]
    groups_scanned: int | None = None
    group_steps: int | None = None
    predicted_error: float | None = None

    @property
    def shares(self) -> dict[str, float]:
        """Fractions of all head-steps; zeros before the first step."""
        total = max(self.reuse + self.fallback + self.refresh, 1)
        return {
            "reuse": self.reuse / total,
            "fallback": self.fallback / total,
            "refresh": self.refresh / total,
        }

    @property
    def group_share(self) -> float | None:
        """Share of group-steps that scanned; 0 before the first step."""
        if self.groups_scanned is None:
            return None
        return self.groups_scanned / max(self.group_steps or 0, 1)

    @property
    def mean_predicted_error(self) -> float | None:
        """Expected relative error of a head-step, exact ones counting 0."""
        if self.predicted_error is None:
            return None
        return self.predicted_error / max(self.reuse + self.fallback + self.refresh, 1)

    @property
    def mean_candidates(self) -> float:
        """Unique candidates of a reuse head-step; 0 without any."""
        return self.candidates / max(self.reuse, 1)


class AttentionMethod(ABC):
    """How a decode step attends to the cache. A frozen pytree: numbers may be traced, sizes static.

    All methods follow a dense prefill. `prime` builds their state from its cache once; `attend` is
    called in the jitted step, after the current token's key and value were appended.

    Attributes:
        name: what the command line calls it.
    """

    name: ClassVar[str]

    @property
    def tail_queries(self) -> int:
        """Queries of the last prompt tokens that `prime` needs."""
        return 0

    @property
    def shards(self) -> frozenset[str]:
        """Axes of a mesh, of heads and positions, over which the method can be sharded."""
        return frozenset()

    @property
    def array_specs(self) -> Any:
        """`PartitionSpec`s of the method's own arrays on a mesh; they are on every device."""
        return PartitionSpec()

    def check(self, geometry: Geometry) -> None:
        """Raises ConfigError where the settings do not fit a model's shapes."""
        return

    def prime(
        self,
        layer: int,
        keys: jax.Array,
        values: jax.Array,
        tail_queries: jax.Array,
        lengths: jax.Array,
    ) -> LayerState:
        """State of one layer after a dense prefill; empty for a method that remembers nothing.

        Args:
            layer: index of the layer.
            keys: ``[B, G, S, D]``, after positional encoding.
            values: ``[B, G, S, D]``.
            tail_queries: ``[B, T, H, D]``, queries of the last T = `tail_queries` prompt tokens,
                the newest last; garbage before the prompt's start.
            lengths: int32 ``[B]``, prompt tokens of each row.
        """
        return ()

    @abstractmethod
    def attend(
        self,
        layer: int | jax.Array,
        state: LayerState,
        q: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        step: Step,
    ) -> tuple[jax.Array, LayerState, Report]:
        """Attention output ``[B, H, D]`` of the current queries ``[B, H, D]``, and the new state.

        Args:
            layer: index of the layer, traced in a decode step.
            state: of this layer.
            q: ``[B, H, D]``, after positional encoding.
            keys: ``[B, G, S, D]``, the current token's included.
            values: ``[B, G, S, D]``, the current token's included.
            step: the decode step.
        """

    def state_bytes(self, geometry: Geometry, batch: int, capacity: int, dtype: DTypeLike) -> int:
        """Bytes of the state of all layers, counters left out."""
        return 0

    def path_statistics(self, states: tuple[LayerState, ...]) -> list[PathStatistics] | None:
        """Per row, or None for a method that has only one path."""
        return None


def every_key(keys: jax.Array, step: Step) -> jax.Array:
    """Numbers in the valid keys ``[B, G, S, D]`` of every row, float32 ``[B]``."""
    return step.lengths.astype(jnp.float32) * (keys.shape[1] * keys.shape[3])


def support_elements(cache: jax.Array, support: jax.Array, sharing: int = 1) -> jax.Array:
    """Numbers in the keys, or in the values, of a support, float32 ``[B]``.

    Args:
        cache: ``[B, G, S, D]``.
        support: int32 ``[B, H, K]``, −1 for none.
        sharing: query heads of a KV head that are bound to have the same support.
    """
    tokens = jnp.sum(support >= 0, axis=(1, 2), dtype=jnp.float32)
    return tokens * (cache.shape[3] / sharing)
