"""TokenSelect: one selection a layer, by a vote of its heads (Wu et al. 2025)."""

from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.exact_support.reference import all_scores
from pallas_kernels.numerics import clean_scores
from pallas_kernels.sparse_attend import sparse_attend
from pallas_kernels.support_scores import support_scores
from pallas_kernels.top_k import top_k
from retopk_jax.attention.base import (
    AttentionMethod,
    PathStatistics,
    Report,
    Step,
    every_key,
    support_elements,
)
from retopk_jax.attention.checks import check_integer, check_number
from retopk_jax.language_model import Geometry

HIT, MISS, WHOLE = 0, 1, 2
"""Paths of a step of a layer: selection kept, selected anew, and every token attended."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SelectionCache:
    """The last selection of one layer.

    Attributes:
        query: float32 ``[B, H * D]``, all heads' queries at the last selection.
        chosen: int32 ``[B, k]``, the tokens it chose, ascending, −1 last.
        known: bool ``[B]``, whether there was one.
        paths: int32 ``[B, H, 3]``, steps by path as `PathStatistics` counts them: hits are reuse,
            misses fallback.
    """

    query: jax.Array
    chosen: jax.Array
    known: jax.Array
    paths: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenSelect(AttentionMethod):
    """Attends to the first, the last and the tokens that the heads of a layer vote for.

    The vote of a head is ``softmax(q · k)``, without 1 / sqrt(D), over the tokens between the first
    and the last; the k largest sums over the heads are chosen. While the layer's query stays
    similar to that of the last selection, the selection is kept: tokens that have left the local
    window since then are not attended. A sequence of at most K tokens is attended whole.

    Attributes:
        initial: first tokens, always attended.
        selected: k, tokens chosen.
        local: last tokens, always attended, the current one included.
        theta: cosine similarity to the query of the last selection from which on it is kept; above
            1 never, −1 always.
    """

    initial: int = field(default=64, metadata={"static": True})
    selected: int = field(default=416, metadata={"static": True})
    local: int = field(default=32, metadata={"static": True})
    theta: float | jax.Array = 0.9

    name: ClassVar[str] = "tokenselect"

    def __post_init__(self) -> None:
        check_integer("initial", self.initial, minimum=0)
        check_integer("selected", self.selected, minimum=1)
        check_integer("local", self.local, minimum=1)
        if isinstance(self.theta, (bool, int, float, str, np.generic)):  # traced inside jit
            check_number("theta", self.theta, minimum=-1.0)

    @property
    def budget(self) -> int:
        """K, tokens attended at most."""
        return self.initial + self.selected + self.local

    def prime(
        self,
        layer: int,
        keys: jax.Array,
        values: jax.Array,
        tail_queries: jax.Array,
        lengths: jax.Array,
    ) -> SelectionCache:
        """No selection yet."""
        batch, _, heads, dim = tail_queries.shape
        return SelectionCache(
            jnp.zeros((batch, heads * dim), jnp.float32),
            jnp.full((batch, self.selected), -1, jnp.int32),
            jnp.zeros(batch, jnp.bool_),
            jnp.zeros((batch, heads, 3), jnp.int32),
        )

    def attend(
        self,
        layer: int | jax.Array,
        state: SelectionCache,
        q: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        step: Step,
    ) -> tuple[jax.Array, SelectionCache, Report]:
        """See `AttentionMethod.attend`."""
        batch, heads, dim = q.shape
        query = q.astype(jnp.float32).reshape(batch, heads * dim)
        similarity = _cosine(query, state.query)  # [B]
        whole = step.lengths <= self.budget  # nothing to choose: every token is attended
        keep = state.known & (similarity >= jnp.asarray(self.theta, jnp.float32))
        anew = step.active & ~keep & ~whole
        voted = lax.cond(
            jnp.any(anew),
            lambda: self.vote(q, keys, step.lengths),
            lambda: jnp.zeros_like(state.chosen),
        )
        chosen = jnp.where(anew[:, None], voted, state.chosen)
        every = jnp.arange(self.budget, dtype=jnp.int32)[None]
        every = jnp.where(every < step.lengths[:, None], every, -1)
        tokens = jnp.where(whole[:, None], every, self._support(chosen, step.lengths))
        support = jnp.broadcast_to(tokens[:, None], (batch, heads, self.budget))
        out = sparse_attend(values, support, support_scores(q, keys, support))
        path = jnp.where(whole, WHOLE, jnp.where(keep, HIT, MISS))[:, None]  # [B, 1]
        taken = (path == jnp.arange(3)[None]) & (step.active & ~whole)[:, None]
        new = SelectionCache(
            jnp.where(anew[:, None], query, state.query),
            chosen,
            state.known | anew,
            state.paths + taken[:, None].astype(jnp.int32),
        )
        read = support_elements(keys, support, heads // keys.shape[1])
        ranked = jnp.where(anew, every_key(keys, step), 0.0)
        paths = jnp.broadcast_to(path, (batch, heads))
        report = Report(support, paths, key_elements=ranked + read, value_elements=read)
        return out, new, report

    def vote(self, q: jax.Array, keys: jax.Array, lengths: jax.Array) -> jax.Array:
        """The k tokens with most votes, int32 ``[B, k]``, ascending with −1 last."""
        slots, dim = keys.shape[2:]
        scores = all_scores(q, keys, lengths) * dim**0.5  # [B, H, S]
        token = jnp.arange(slots, dtype=jnp.int32)[None, None]
        middle = (token >= self.initial) & (token < lengths[:, None, None] - self.local)
        scores = jnp.where(middle, scores, -jnp.inf)
        best = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - jnp.where(best > -jnp.inf, best, 0.0))
        total = jnp.sum(weights, axis=-1, keepdims=True)
        votes = jnp.sum(weights / jnp.where(total > 0, total, 1.0), axis=1, keepdims=True)
        chosen, _ = top_k(clean_scores(votes, middle), budget=self.selected)
        return chosen[:, 0]

    def _support(self, chosen: jax.Array, lengths: jax.Array) -> jax.Array:
        """First, chosen and last tokens of more than K, int32 ``[B, K]``, ascending, −1 last."""
        slot = jnp.arange(self.budget, dtype=jnp.int32)[None]
        count = jnp.sum(chosen >= 0, axis=1, keepdims=True, dtype=jnp.int32)
        index = jnp.clip(slot - self.initial, 0, self.selected - 1)
        middle = jnp.take_along_axis(
            chosen, jnp.broadcast_to(index, chosen.shape[:1] + index.shape[1:]), axis=1
        )
        local = slot - self.initial - count  # [B, K], from 0 where the last tokens are
        tokens = jnp.where(slot < self.initial, slot, middle)
        tokens = jnp.where(local >= 0, lengths[:, None] - self.local + local, tokens)
        return jnp.where(local < self.local, tokens, -1)

    def state_bytes(self, geometry: Geometry, batch: int, capacity: int, dtype: DTypeLike) -> int:
        """Query, selection and flag of every layer."""
        query = 4 * geometry.num_heads * geometry.head_dim
        return geometry.num_layers * batch * (query + 4 * self.selected + 1)

    def path_statistics(self, states: tuple[SelectionCache, ...]) -> list[PathStatistics]:
        """Hits counted as reuse, misses as fallback."""
        paths = np.stack([np.asarray(s.paths) for s in states], axis=1)  # [B, layers, H, 3]
        rows = []
        for counts in np.pad(paths, ((0, 0), (0, 0), (0, 0), (0, 1))).astype(np.int64):
            hits, misses, refreshes, unique = (int(n) for n in counts.sum(axis=(0, 1)))
            rows.append(PathStatistics(hits, misses, refreshes, unique, counts.tolist()))
        return rows


def _cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """Cosine similarity along the last axis; 0 where a norm is zero or not finite."""
    norm = jnp.sqrt(jnp.sum(a * a, axis=-1)) * jnp.sqrt(jnp.sum(b * b, axis=-1))
    usable = jnp.isfinite(norm) & (norm > 0)
    cosine = jnp.where(usable, jnp.sum(a * b, axis=-1) / jnp.where(usable, norm, 1.0), 0.0)
    return jnp.clip(cosine, -1.0, 1.0)  # rounding may have carried it beyond
