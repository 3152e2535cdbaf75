"""What a model, a context and a batch need in memory, counted before anything is allocated."""

from dataclasses import dataclass

from jax.typing import DTypeLike

from retopk_jax.attention import AttentionMethod
from retopk_jax.kv_cache import kv_cache_bytes
from retopk_jax.language_model import Geometry


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes by purpose.

    Attributes:
        weights: of the model.
        kv_cache: keys and values of all layers.
        recall_cache: the attention method's own state.
    """

    weights: int
    kv_cache: int
    recall_cache: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.kv_cache + self.recall_cache


def memory_need(
    geometry: Geometry,
    method: AttentionMethod,
    *,
    weights: int,
    batch: int,
    capacity: int,
    dtype: DTypeLike,
) -> MemoryNeed:
    """Bytes that decoding holds at once; compiled programs' temporaries come on top.

    Args:
        geometry: shapes of the model.
        method: how it will attend.
        weights: bytes of the weights.
        batch: rows.
        capacity: tokens a row.
        dtype: of keys and values.
    """
    return MemoryNeed(
        weights,
        kv_cache_bytes(geometry, batch, capacity, dtype),
        method.state_bytes(geometry, batch, capacity, dtype),
    )
