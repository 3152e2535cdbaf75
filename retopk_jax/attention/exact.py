"""Exact Top-K: score every key, attend to the K best."""

from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp

from retopk_jax.attention.base import AttentionMethod, Report, Step, every_key
from retopk_jax.attention.checks import check_integer
from retopk_jax.positions import exact_attention
from retopk_jax.sharding import SEQUENCE, TENSOR


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExactTopK(AttentionMethod):
    """Per query head, softmax over the K keys with the largest scores, ties to the lower token.

    Attributes:
        budget: K, tokens attended; the current one competes like any other.
    """

    budget: int = field(default=512, metadata={"static": True})

    name: ClassVar[str] = "exact"

    def __post_init__(self) -> None:
        check_integer("budget", self.budget, minimum=1)

    @property
    def shards(self) -> frozenset[str]:
        """Heads and positions."""
        return frozenset({TENSOR, SEQUENCE})

    def attend(
        self,
        layer: int | jax.Array,
        state: tuple[()],
        q: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        step: Step,
    ) -> tuple[jax.Array, tuple[()], Report]:
        """See `AttentionMethod.attend`."""
        wanted = jnp.broadcast_to(step.active[:, None], q.shape[:2])  # [B, H]
        out, support = exact_attention(q, keys, values, step.lengths, wanted, budget=self.budget)
        return out, (), Report(support, key_elements=every_key(keys, step))
