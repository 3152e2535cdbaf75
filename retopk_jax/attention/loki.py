"""Loki: rank keys in the leading principal components (Singhania et al. 2024)."""

from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.numerics import clean_scores
from pallas_kernels.sparse_attend import sparse_attend
from pallas_kernels.support_scores import support_scores
from pallas_kernels.top_k import top_k
from retopk_jax.attention.base import AttentionMethod, Report, Step, support_elements
from retopk_jax.attention.checks import check_integer
from retopk_jax.errors import ConfigError
from retopk_jax.kv_cache import append_token
from retopk_jax.language_model import Geometry


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Loki(AttentionMethod):
    """Chooses tokens by scores over the first r principal components of the keys.

    With P the orthonormal basis of a layer and key-value head, ranks by ``(q P)[:r] · (k P)[:r]``,
    then scores the K best exactly. Ranking is per query head, and no token is forced.

    Attributes:
        budget: K, tokens attended.
        rank: r; None for D / 2.
        basis: float32 ``[layers, G, D, D]``, components in columns, largest variance first, from
            `retopk calibrate --method loki`.
    """

    budget: int = field(default=512, metadata={"static": True})
    rank: int | None = field(default=None, metadata={"static": True})
    basis: jax.Array | None = None

    name: ClassVar[str] = "loki"

    def __post_init__(self) -> None:
        check_integer("budget", self.budget, minimum=1)
        if self.rank is not None:
            check_integer("rank", self.rank, minimum=1)

    def _rank(self, dim: int) -> int:
        return max(dim // 2, 1) if self.rank is None else self.rank

    def check(self, geometry: Geometry) -> None:
        """Refuses a missing basis, one of other shapes, and a rank above the head dimension."""
        dim = geometry.head_dim
        basis = self.check_basis()
        if self._rank(dim) > dim:
            raise ConfigError(f"rank={self.rank}: expected at most the head dimension {dim}")
        needed = (geometry.num_layers, geometry.num_kv_heads, dim, dim)
        if basis.shape != needed:
            raise ConfigError(f"basis of shape {basis.shape}: this model needs {needed}")
        if basis.dtype != jnp.float32:
            raise ConfigError(f"basis of dtype {basis.dtype}: expected float32")

    def check_basis(self) -> jax.Array:
        """The basis; refuses to be without one."""
        if self.basis is None:
            raise ConfigError(
                "basis=None: Loki ranks in the principal components of a model's keys; fit them "
                "with: retopk calibrate --method loki --model MODEL --text FILE --out BASIS"
            )
        return self.basis

    def _projection(self, layer: int | jax.Array, dim: int) -> jax.Array:
        """The r leading components of a layer, float32 ``[G, D, r]``."""
        return self.check_basis()[layer, :, :, : self._rank(dim)]

    def prime(
        self,
        layer: int,
        keys: jax.Array,
        values: jax.Array,
        tail_queries: jax.Array,
        lengths: jax.Array,
    ) -> jax.Array:
        """The prompt's keys in the leading components, ``[B, G, S, r]``."""
        projection = self._projection(layer, keys.shape[3])
        known = jnp.arange(keys.shape[2])[None, None, :, None] < lengths[:, None, None, None]
        return jnp.where(known, project(keys, projection), 0)

    def attend(
        self,
        layer: int | jax.Array,
        state: jax.Array,
        q: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        step: Step,
    ) -> tuple[jax.Array, jax.Array, Report]:
        """See `AttentionMethod.attend`."""
        batch, heads, dim = q.shape
        groups, slots = keys.shape[1:3]
        projection = self._projection(layer, dim)
        rows = jnp.arange(batch)
        newest = keys[rows, :, step.lengths - 1]  # [B, G, D]
        slot = jnp.where(step.active, step.lengths - 1, slots)
        added = project(newest[:, :, None], projection)[:, :, 0]
        state = append_token(state, added, slot)
        grouped = q.reshape(batch, groups, heads // groups, dim)
        scores = jnp.einsum(
            "bgqr,bgsr->bgqs",
            project(grouped, projection),
            state,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        ).reshape(batch, heads, slots)
        known = jnp.arange(slots)[None, None] < step.lengths[:, None, None]
        support, _ = top_k(clean_scores(scores, known), budget=self.budget)
        exact = support_scores(q, keys, support)
        ranked = step.lengths.astype(jnp.float32) * (groups * projection.shape[-1])
        read = ranked + support_elements(keys, support)
        return sparse_attend(values, support, exact), state, Report(support, key_elements=read)

    def state_bytes(self, geometry: Geometry, batch: int, capacity: int, dtype: DTypeLike) -> int:
        """Projected keys of all layers, and the basis."""
        r = self._rank(geometry.head_dim)
        heads = geometry.num_layers * geometry.num_kv_heads
        projected = batch * heads * capacity * r * jnp.dtype(dtype).itemsize
        return projected + heads * geometry.head_dim**2 * 4


def project(rows: jax.Array, projection: jax.Array) -> jax.Array:
    """``[B, G, N, D]`` onto ``[G, D, r]`` in float32, returned in the dtype of ``rows``."""
    projected = jnp.einsum(
        "bgnd,gdr->bgnr",
        rows.astype(jnp.float32),
        projection,
        precision=lax.Precision.HIGHEST,
    )
    return projected.astype(rows.dtype)
