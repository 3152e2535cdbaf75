"""StreamingLLM: attention sinks and a sliding window (Xiao et al. 2024)."""

from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.sparse_attend import sparse_attend
from pallas_kernels.support_scores import support_scores
from retopk_jax.attention.base import AttentionMethod, Report, Step, support_elements
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
        layer: int | jax.Array,
        state: tuple[()],
        q: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        step: Step,
    ) -> tuple[jax.Array, tuple[()], Report]:
        """See `AttentionMethod.attend`."""
        lengths = step.lengths[:, None]
        evicted = jnp.maximum(lengths - self.budget, 0)  # [B, 1]
        slot = jnp.arange(self.budget, dtype=jnp.int32)[None]
        tokens = jnp.where(slot < self.sinks, slot, slot + evicted)
        tokens = jnp.where(slot < lengths, tokens, -1)  # [B, K]
        support = jnp.broadcast_to(tokens[:, None], (*q.shape[:2], self.budget))
        if self.position_mode == "cache_relative" and self.sinks > 0:
            sinks = self._moved_sinks(keys, step)
            first, last = support[..., : self.sinks], support[..., self.sinks :]
            scores = jnp.concatenate(
                [support_scores(q, sinks, first), support_scores(q, keys, last)], axis=-1
            )
        else:
            scores = support_scores(q, keys, support)
        read = support_elements(keys, support, q.shape[1] // keys.shape[1])
        out = sparse_attend(values, support, scores)
        return out, (), Report(support, key_elements=read, value_elements=read)

    def _moved_sinks(self, keys: jax.Array, step: Step) -> jax.Array:
        """Sink keys as far from the query as their slots in the cache, ``[B, G, sinks, D]``.

        Moved by the query's position t and back by its slot K − 1, one after the other: the query's
        own angles, as they were rounded in float32, cancel. The angle of the difference would be
        rounded anew, by 0.004 radians at t = 100,000.
        """
        if step.inverse_frequencies is None:
            raise ValueError("step.inverse_frequencies=None: cache-relative positions need it")
        sinks = jnp.moveaxis(keys[:, :, : self.sinks], 2, 1)  # [B, sinks, G, D]
        rates = step.inverse_frequencies[:, None]  # [B, 1, D/2]
        position = (step.lengths - 1).astype(jnp.float32)[:, None, None]
        moved = rotate(sinks.astype(jnp.float32), position * rates)
        moved = rotate(moved, -(self.budget - 1.0) * rates).astype(keys.dtype)
        evicting = (step.lengths > self.budget)[:, None, None, None]
        return jnp.moveaxis(jnp.where(evicting, moved, sinks), 1, 2)
