"""SparQ: approximate the scores from a query's largest components (Ribar et al. 2024)."""

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
from retopk_jax.language_model import Geometry


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SparQ(AttentionMethod):
    """Chooses tokens by scores over r of D components, shared by the heads of a KV group.

    With I the r components of largest ``sum_h |q_h|`` in the group, the approximate distribution of
    head h is ``softmax(q_h[I] · k[I] / tau_h)``, ``tau_h = sqrt(D |q_h[I]|_1 / |q_h|_1)``. Tokens
    are ranked by its sum over the group; the last `local` always come first. The output is
    ``alpha y + (1 − alpha) mean(v)``, alpha the approximate mass of the chosen tokens.

    Attributes:
        budget: K, tokens attended, the local ones included.
        components: r; None for D / 4.
        local: last tokens that are always chosen, the current one included; None for K / 4.
        reallocate: mix the mean value in; otherwise the output is y.
    """

    budget: int = field(default=512, metadata={"static": True})
    components: int | None = field(default=None, metadata={"static": True})
    local: int | None = field(default=None, metadata={"static": True})
    reallocate: bool = field(default=True, metadata={"static": True})

    name: ClassVar[str] = "sparq"

    def __post_init__(self) -> None:
        check_integer("budget", self.budget, minimum=1)
        if self.local is not None:
            check_integer("local", self.local, minimum=1)
        if self.components is not None:
            check_integer("components", self.components, minimum=1)
        if self.local is not None and self.local > self.budget:
            raise ConfigError(f"local={self.local}: expected at most budget={self.budget}")

    @property
    def _local(self) -> int:
        return max(self.budget // 4, 1) if self.local is None else self.local

    def _components(self, dim: int) -> int:
        return max(dim // 4, 1) if self.components is None else self.components

    def check(self, geometry: Geometry) -> None:
        """Refuses more components than the head dimension has."""
        r = self._components(geometry.head_dim)
        if r > geometry.head_dim:
            raise ConfigError(
                f"components={r}: expected at most the head dimension {geometry.head_dim}"
            )

    def prime(
        self,
        layer: int,
        keys: jax.Array,
        values: jax.Array,
        tail_queries: jax.Array,
        lengths: jax.Array,
    ) -> jax.Array:
        """Sum of the prompt's values, float32 ``[B, G, D]``."""
        known = jnp.arange(values.shape[2])[None, None, :, None] < lengths[:, None, None, None]
        return jnp.sum(jnp.where(known, values, 0), axis=2, dtype=jnp.float32)

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
        batch, heads, _ = q.shape
        groups = keys.shape[1]
        rows = jnp.arange(batch)
        newest = values[rows, :, step.lengths - 1].astype(jnp.float32)  # [B, G, D]
        total = state + jnp.where(step.active[:, None, None], newest, 0.0)
        mass = self.approximate_mass(q, keys, step.lengths)  # [B, G, g, S]
        token = jnp.arange(keys.shape[2], dtype=jnp.int32)[None, None]
        length = step.lengths[:, None, None]
        ranking = clean_scores(jnp.sum(mass, axis=2), token < length)
        ranking = jnp.where((token < length) & (token >= length - self._local), jnp.inf, ranking)
        chosen, _ = top_k(ranking, budget=self.budget)  # [B, G, K]
        support = jnp.repeat(chosen, heads // groups, axis=1)
        scores = support_scores(q, keys, support)
        out = sparse_attend(values, support, scores)
        if self.reallocate:
            taken = jnp.take_along_axis(mass, jnp.maximum(chosen, 0)[:, :, None], axis=3)
            taken = jnp.where((chosen >= 0)[:, :, None], taken, 0.0)
            alpha = jnp.where(length <= self.budget, 1.0, jnp.sum(taken, axis=3))
            alpha = alpha.reshape(batch, heads, 1)
            mean = total / step.lengths[:, None, None].astype(jnp.float32)
            mean = jnp.repeat(mean, heads // groups, axis=1)  # [B, H, D]
            mixed = alpha * out.astype(jnp.float32) + (1.0 - alpha) * mean
            out = mixed.astype(values.dtype)
        ranked = step.lengths.astype(jnp.float32) * (groups * self._components(keys.shape[3]))
        read = support_elements(keys, support, heads // groups)
        return out, total, Report(support, key_elements=ranked + read, value_elements=read)

    def approximate_mass(self, q: jax.Array, keys: jax.Array, lengths: jax.Array) -> jax.Array:
        """Approximate attention of every head to every token, float32 ``[B, G, g, S]``.

        The query's other components are set to zero instead of gathering the r columns of the keys:
        a gather copies them, ``[B, G, S, r]``, and, the keys lying token by token, has to touch
        nearly all of them to do so.
        """
        batch, heads, dim = q.shape
        groups, slots = keys.shape[1:3]
        r = self._components(dim)
        grouped = q.reshape(batch, groups, heads // groups, dim)
        size = jnp.abs(grouped.astype(jnp.float32))
        _, picked = lax.top_k(jnp.sum(size, axis=2), r)  # [B, G, r]
        component = jnp.arange(dim, dtype=picked.dtype)[None, None, None]
        large = jnp.any(picked[..., None] == component, axis=2)[:, :, None]  # [B, G, 1, D]
        share = jnp.sum(jnp.where(large, size, 0.0), axis=3)
        whole = jnp.sum(size, axis=3)
        share = share / jnp.where(whole > 0, whole, 1.0)
        temperature = jnp.sqrt(dim * jnp.where(share > 0, share, 1.0))  # [B, G, g]
        logits = jnp.einsum(
            "bgqd,bgsd->bgqs",
            jnp.where(large, grouped, 0),
            keys,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        known = jnp.arange(slots)[None, None, None] < lengths[:, None, None, None]
        logits = clean_scores(logits / temperature[..., None], known)
        best = jnp.max(logits, axis=-1, keepdims=True)
        weights = jnp.exp(logits - jnp.where(best > -jnp.inf, best, 0.0))
        mass = jnp.sum(weights, axis=-1, keepdims=True)
        return weights / jnp.where(mass > 0, mass, 1.0)

    def state_bytes(self, geometry: Geometry, batch: int, capacity: int, dtype: DTypeLike) -> int:
        """A float32 vector a key-value head and layer."""
        return geometry.num_layers * batch * geometry.num_kv_heads * geometry.head_dim * 4
