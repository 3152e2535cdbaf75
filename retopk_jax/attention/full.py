"""Full attention: every key, every step."""

from dataclasses import dataclass
from typing import ClassVar

import jax

from retopk_jax.attention.base import AttentionMethod, Report, Step, every_key
from retopk_jax.positions import full_attention
from retopk_jax.sharding import SEQUENCE, TENSOR


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Full(AttentionMethod):
    """Softmax over all L keys; the reference of every other method."""

    name: ClassVar[str] = "full"

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
        return (
            full_attention(q, keys, values, step.lengths),
            (),
            Report(key_elements=every_key(keys, step)),
        )
