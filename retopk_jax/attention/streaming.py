"""StreamingLLM: attention sinks and a sliding window (Xiao et al. 2024)."""

from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.sparse_attend import sparse_attend
from pallas_kernels.support_scores import support_scores
from retopk_jax.attention.base import AttentionMethod, Report, Step, support_keys
from retopk_jax.attention.checks import check_choice, check_integer
from retopk_jax.rotary import rotate

POSITION_MODES = ("cache_relative", "absolute")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StreamingLLM(AttentionMethod):
    """Attends to the first `sinks` tokens and the last `recent`, the current one among them.

    Attributes:
        sinks: first tokens of the sequence, kept for ever.
        recent: last tokens.
        position_mode: ``"cache_relative"`` numbers the kept tokens 0, 1, … as the method does, by
            rotating the sink keys forward by the number of evicted tokens; ``"absolute"`` leaves
            every key at its own position.
    """

    sinks: int = field(default=64, metadata={"static": True})
    recent: int = field(default=448, metadata={"static": True})
    position_mode: str = field(default="cache_relative", metadata={"static": True})

    name: ClassVar[str] = "streaming"

    def __post_init__(self) -> None:
        check_integer("sinks", self.sinks, minimum=0)
        check_integer("recent", self.recent, minimum=1)
        check_choice("position_mode", self.position_mode, POSITION_MODES)

    @property
    def budget(self) -> int:
        """K, tokens attended at most."""
        return self.sinks + self.recent

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
        lengths = step.lengths[:, None]
        sink = jnp.arange(self.sinks, dtype=jnp.int32)[None, :]
        recent = jnp.arange(self.recent, dtype=jnp.int32)[None, :] - self.recent + lengths
        tokens = jnp.concatenate(
            [
                jnp.where(sink < lengths - self.recent, sink, -1),
                jnp.where(recent >= 0, recent, -1),
            ],
            axis=1,
        )  # [B, K]: ascending but for −1
        tokens = jnp.sort(jnp.where(tokens < 0, jnp.iinfo(jnp.int32).max, tokens), axis=1)
        tokens = jnp.where(tokens == jnp.iinfo(jnp.int32).max, -1, tokens)
        support = jnp.broadcast_to(tokens[:, None], (*q.shape[:2], self.budget))
        scores = support_scores(q, keys, support)
        if self.position_mode == "cache_relative" and self.sinks > 0:
            if step.inverse_frequencies is None:
                raise ValueError("step.inverse_frequencies=None: cache-relative positions need it")
            evicted = jnp.maximum(step.lengths - self.budget, 0)  # [B]
            angles = evicted.astype(jnp.float32)[:, None] * step.inverse_frequencies  # [B, D/2]
            moved = rotate(jnp.moveaxis(keys[:, :, : self.sinks], 2, 1), angles[:, None])
            moved = jnp.moveaxis(moved, 1, 2)  # [B, G, sinks, D]
            first = jnp.where(support < self.sinks, support, -1)
            shifted = support_scores(q, moved, first)
            scores = jnp.where(first >= 0, shifted, scores)
        return (
            sparse_attend(values, support, scores),
            (),
            Report(support, key_elements=support_keys(keys, support)),
        )
