"""Full attention: every key, every step."""

from dataclasses import dataclass
from typing import ClassVar

import jax
from jax.typing import DTypeLike

from pallas_kernels.full_attention import full_attention
from retopk_jax.attention.base import PathStatistics, Report, Step
from retopk_jax.language_model import Geometry


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Full:
    """Softmax over all L keys; the reference of every other method."""

    name: ClassVar[str] = "full"
    tail_queries: ClassVar[int] = 0

    def prime(
        self,
        layer: int,
        keys: jax.Array,
        values: jax.Array,
        tail_queries: jax.Array,
        lengths: jax.Array,
    ) -> tuple[()]:
        """Remembers nothing."""
        return ()

    def attend(
        self,
        layer: int,
        state: tuple[()],
        q: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        step: Step,
    ) -> tuple[jax.Array, tuple[()], Report]:
        """See `AttentionMethod.attend`."""
        return full_attention(q, keys, values, step.lengths), (), Report()

    def state_bytes(self, geometry: Geometry, batch: int, capacity: int, dtype: DTypeLike) -> int:
        """Zero."""
        return 0

    def path_statistics(self, states: tuple[tuple[()], ...]) -> list[PathStatistics] | None:
        """None: there is one path."""
        return None
