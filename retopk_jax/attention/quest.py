"""Quest: rank pages of keys by an upper bound of their scores (Tang et al. 2024)."""

from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.full_attention import full_attention
from pallas_kernels.numerics import clean_scores
from pallas_kernels.sparse_attend import sparse_attend
from pallas_kernels.support_scores import support_scores
from pallas_kernels.top_k import top_k
from retopk_jax.attention.base import AttentionMethod, Report, Step, every_key, support_elements
from retopk_jax.attention.checks import check_choice, check_integer
from retopk_jax.errors import ConfigError
from retopk_jax.kv_cache import append_token
from retopk_jax.language_model import Geometry

LAST_PAGE = ("always", "competes")
SELECT_PER = ("query_head", "kv_group", "layer")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PageBounds:
    """Per dimension, the smallest and largest key of every page.

    Attributes:
        low: ``[B, G, P, D]``, 0 where a page holds no token.
        high: ``[B, G, P, D]``, 0 where a page holds no token.
    """

    low: jax.Array
    high: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quest(AttentionMethod):
    """Attends to the pages whose scores could be largest.

    The bound of page p is ``sum_d max(q_d · high_pd, q_d · low_pd)``, at least ``q · k`` of every
    key in it. Equal bounds: the lower page.

    Attributes:
        budget: K, tokens attended at most; ``budget // page_size`` pages.
        page_size: tokens a page.
        last_page: the page of the current token ``"always"`` is attended, within the budget, or
            ``"competes"`` like any other.
        select_per: whose pages are chosen together: every ``"query_head"`` for itself, the heads of
            a ``"kv_group"`` by their mean query, or all of a ``"layer"`` by the sum of the groups'
            bounds.
        dense_layers: first layers with full attention.
    """

    budget: int = field(default=512, metadata={"static": True})
    page_size: int = field(default=16, metadata={"static": True})
    last_page: str = field(default="always", metadata={"static": True})
    select_per: str = field(default="query_head", metadata={"static": True})
    dense_layers: int = field(default=0, metadata={"static": True})

    name: ClassVar[str] = "quest"

    def __post_init__(self) -> None:
        check_integer("page_size", self.page_size, minimum=1)
        check_integer("budget", self.budget, minimum=1)
        check_integer("dense_layers", self.dense_layers, minimum=0)
        check_choice("last_page", self.last_page, LAST_PAGE)
        check_choice("select_per", self.select_per, SELECT_PER)
        if self.budget < self.page_size:
            raise ConfigError(
                f"budget={self.budget}: expected at least a page of page_size={self.page_size}"
            )

    @property
    def pages(self) -> int:
        """Pages attended at most."""
        return self.budget // self.page_size

    def prime(
        self,
        layer: int,
        keys: jax.Array,
        values: jax.Array,
        tail_queries: jax.Array,
        lengths: jax.Array,
    ) -> PageBounds | tuple[()]:
        """Bounds of the prompt's pages."""
        if layer < self.dense_layers:
            return ()
        batch, groups, slots, dim = keys.shape
        pages = -(-slots // self.page_size)
        padded = jnp.pad(keys, ((0, 0), (0, 0), (0, pages * self.page_size - slots), (0, 0)))
        paged = padded.reshape(batch, groups, pages, self.page_size, dim)
        token = jnp.arange(pages * self.page_size).reshape(1, 1, pages, self.page_size, 1)
        known = token < lengths[:, None, None, None, None]
        used = known[:, :, :, 0]  # [B, 1, P, 1]
        return PageBounds(
            jnp.where(used, jnp.min(jnp.where(known, paged, jnp.inf), axis=3), 0),
            jnp.where(used, jnp.max(jnp.where(known, paged, -jnp.inf), axis=3), 0),
        )

    def attend(
        self,
        layer: int | jax.Array,
        state: PageBounds | tuple[()],
        q: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        step: Step,
    ) -> tuple[jax.Array, PageBounds | tuple[()], Report]:
        """See `AttentionMethod.attend`."""
        if not isinstance(state, PageBounds):
            dense = full_attention(q, keys, values, step.lengths)
            return dense, (), Report(key_elements=every_key(keys, step))
        bounds = self._append(state, keys, step)
        pages = self._choose(q, bounds, step.lengths)  # [B, H, pages]
        offset = jnp.arange(self.page_size, dtype=jnp.int32)
        tokens = pages[..., None] * self.page_size + offset[None, None, None]
        known = (pages[..., None] >= 0) & (tokens < step.lengths[:, None, None, None])
        support = jnp.where(known, tokens, -1).reshape(*q.shape[:2], -1)
        scores = support_scores(q, keys, support)
        pages_known = -(-step.lengths // self.page_size)
        bound_elements = pages_known.astype(jnp.float32) * (2 * keys.shape[1] * keys.shape[3])
        sharing = 1 if self.select_per == "query_head" else q.shape[1] // keys.shape[1]
        chosen = support_elements(keys, support, sharing)
        out = sparse_attend(values, support, scores)
        read = bound_elements + chosen
        return out, bounds, Report(support, key_elements=read, value_elements=chosen)

    def _append(self, bounds: PageBounds, keys: jax.Array, step: Step) -> PageBounds:
        """Widens the current token's page by its key, or opens it."""
        rows = jnp.arange(keys.shape[0])
        newest = step.lengths - 1
        key = keys[rows, :, newest]  # [B, G, D]
        page = newest // self.page_size
        opened = (newest % self.page_size == 0)[:, None, None]
        low = jnp.where(opened, key, jnp.minimum(bounds.low[rows, :, page], key))
        high = jnp.where(opened, key, jnp.maximum(bounds.high[rows, :, page], key))
        page = jnp.where(step.active, page, bounds.low.shape[2])  # dropped
        return PageBounds(
            append_token(bounds.low, low, page), append_token(bounds.high, high, page)
        )

    def page_scores(self, q: jax.Array, bounds: PageBounds) -> jax.Array:
        """Upper bounds of ``q · k`` of every page, float32 ``[B, X, P]``.

        X is H, G or 1, as `select_per` says. Pages without a token score 0.
        """
        batch, heads, dim = q.shape
        groups = bounds.low.shape[1]
        grouped = q.reshape(batch, groups, heads // groups, dim)
        if self.select_per != "query_head":
            grouped = jnp.mean(grouped.astype(jnp.float32), axis=2, keepdims=True)

        def dot(part: jax.Array, bound: jax.Array) -> jax.Array:
            return jnp.einsum(
                "bgqd,bgpd->bgqp",
                part,
                bound.astype(part.dtype),
                precision=lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            )

        total = dot(jnp.maximum(grouped, 0), bounds.high)
        total = total + dot(jnp.minimum(grouped, 0), bounds.low)
        total = total.reshape(batch, -1, total.shape[-1])
        return jnp.sum(total, axis=1, keepdims=True) if self.select_per == "layer" else total

    def _choose(self, q: jax.Array, bounds: PageBounds, lengths: jax.Array) -> jax.Array:
        """Pages of every head, int32 ``[B, H, pages]``, ascending with −1 last."""
        scores = self.page_scores(q, bounds)
        last = ((lengths - 1) // self.page_size)[:, None, None]
        page = jnp.arange(scores.shape[-1], dtype=jnp.int32)[None, None]
        scores = clean_scores(scores, page <= last)
        if self.last_page == "always":
            scores = jnp.where(page == last, jnp.inf, scores)
        chosen, _ = top_k(scores, budget=self.pages)
        return jnp.repeat(chosen, q.shape[1] // chosen.shape[1], axis=1)

    def state_bytes(self, geometry: Geometry, batch: int, capacity: int, dtype: DTypeLike) -> int:
        """Two vectors a page and key-value head, of every layer that is not dense."""
        layers = max(geometry.num_layers - self.dense_layers, 0)
        pages = -(-capacity // self.page_size)
        vectors = 2 * layers * batch * geometry.num_kv_heads * pages
        return vectors * geometry.head_dim * jnp.dtype(dtype).itemsize
