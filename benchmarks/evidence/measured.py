"""A method that is measured against exact supports in the very step that it serves."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.exact_support import exact_support
from pallas_kernels.exact_support.reference import all_scores
from pallas_kernels.sparse_attend import sparse_attend
from retopk_jax.attention.base import AttentionMethod, LayerState, PathStatistics, Report, Step
from retopk_jax.language_model import Geometry

EDGES = (0.0, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975)
"""Similarities that part the bins; the first bin lies below the first of them."""

PATHS = ("reuse", "fallback", "refresh")

METRICS = (
    "count",
    "support_recall",
    "retained_mass",
    "exact_mass",
    "relative_mass",
    "distribution_cosine",
    "output_cosine",
    "relative_error",
    "similarity",
    "similarity_squared",
    "error_squared",
    "similarity_times_error",
)
"""What is summed over head-steps, in order.

With p the softmax over all keys, S the method's support, S* the exact one, and o, o* the outputs:
support_recall is ``|S ∩ S*| / |S*|``, retained_mass ``p(S)``, exact_mass ``p(S*)``, relative_mass
their ratio, distribution_cosine that of p restricted to S and to S*, output_cosine that of o and
o*, and relative_error ``|o - o*| / |o*|``. The last four serve correlations.
"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MeasuredState:
    """State of the method inside, and sums.

    Attributes:
        inner: of the method inside.
        sums: float32 ``[B, H, paths, bins, metrics]``.
        groups: float32 ``[B, G, 2]``, steps in which at least one head of the group fell back, and
            steps.
    """

    inner: LayerState
    sums: jax.Array
    groups: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Measured(AttentionMethod):
    """Runs a method, and beside it the exact support of the same query over the same keys.

    Attributes:
        inner: the method; what it returns is what counts.
        budget: K of the exact support.
    """

    inner: AttentionMethod
    budget: int = field(metadata={"static": True})

    name: ClassVar[str] = "measured"

    @property
    def tail_queries(self) -> int:
        """Those of the method inside."""
        return self.inner.tail_queries

    def check(self, geometry: Geometry) -> None:
        """See `AttentionMethod.check`."""
        self.inner.check(geometry)

    def prime(
        self,
        layer: int,
        keys: jax.Array,
        values: jax.Array,
        tail_queries: jax.Array,
        lengths: jax.Array,
    ) -> MeasuredState:
        """See `AttentionMethod.prime`."""
        batch, groups = keys.shape[:2]
        heads = tail_queries.shape[2]
        sums = (batch, heads, len(PATHS), len(EDGES) + 1, len(METRICS))
        return MeasuredState(
            self.inner.prime(layer, keys, values, tail_queries, lengths),
            jnp.zeros(sums, jnp.float32),
            jnp.zeros((batch, groups, 2), jnp.float32),
        )

    def attend(
        self,
        layer: int | jax.Array,
        state: MeasuredState,
        q: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        step: Step,
    ) -> tuple[jax.Array, MeasuredState, Report]:
        """See `AttentionMethod.attend`."""
        out, inner, report = self.inner.attend(layer, state.inner, q, keys, values, step)
        shape = q.shape[:2]
        path = jnp.zeros(shape, jnp.int32) if report.path is None else report.path
        rho = jnp.zeros(shape, jnp.float32) if report.rho_max is None else report.rho_max
        rho = jnp.clip(rho, -1.0, 1.0)
        found = measure(q, keys, values, step.lengths, report.support, out, budget=self.budget)
        error = found["relative_error"]
        found.update(
            count=jnp.ones(shape, jnp.float32),
            similarity=rho,
            similarity_squared=rho * rho,
            error_squared=error * error,
            similarity_times_error=rho * error,
        )
        row = jnp.stack([found[name] for name in METRICS], axis=-1)  # [B, H, M]
        row = jnp.where(step.active[:, None, None], row, 0.0)
        place = jnp.sum(rho[..., None] >= jnp.asarray(EDGES)[None, None], axis=-1)
        b, h = jnp.arange(shape[0])[:, None], jnp.arange(shape[1])[None]
        fell = (path == PATHS.index("fallback")).reshape(shape[0], keys.shape[1], -1)
        counted = jnp.stack([jnp.any(fell, axis=2), jnp.ones_like(fell[..., 0])], axis=-1)
        counted = jnp.where(step.active[:, None, None], counted, False).astype(jnp.float32)
        new = MeasuredState(
            inner, state.sums.at[b, h, path, place].add(row), state.groups + counted
        )
        return out, new, report

    def path_statistics(self, states: tuple[MeasuredState, ...]) -> list[PathStatistics] | None:
        """See `AttentionMethod.path_statistics`."""
        return self.inner.path_statistics(tuple(state.inner for state in states))


def measure(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array,
    support: jax.Array | None,
    out: jax.Array,
    *,
    budget: int,
) -> dict[str, jax.Array]:
    """Fidelity of one step of one layer, each float32 ``[B, H]``; see `METRICS`.

    Args:
        q: ``[B, H, D]``.
        keys: ``[B, G, S, D]``.
        values: ``[B, G, S, D]``.
        lengths: int32 ``[B]``.
        support: int32 ``[B, H, K]``, −1 for none; None for all tokens.
        out: ``[B, H, D]``, the method's output.
        budget: K of the exact support.
    """
    wanted = jnp.ones(q.shape[:2], jnp.bool_)
    best, best_scores = exact_support(q, keys, lengths, wanted, budget=budget)
    exact = sparse_attend(values, best, best_scores).astype(jnp.float32)
    p = jax.nn.softmax(all_scores(q, keys, lengths), axis=-1)  # [B, H, S]
    chosen = members(best, p.shape[-1])
    valid = jnp.broadcast_to(jnp.arange(p.shape[-1])[None, None] < lengths[:, None, None], p.shape)
    held = valid if support is None else members(support, p.shape[-1])
    both = chosen & held

    def total(mask: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(mask, x, 0.0), axis=-1)

    def ratio(a: jax.Array, b: jax.Array) -> jax.Array:
        return a / jnp.where(b > 0, b, 1.0)

    square = p * p
    mass, exact_mass = total(held, p), total(chosen, p)
    o = out.astype(jnp.float32)
    size = jnp.sqrt(jnp.sum(exact * exact, axis=-1))
    away = jnp.sqrt(jnp.sum((o - exact) ** 2, axis=-1))
    return {
        "support_recall": ratio(
            jnp.sum(both, axis=-1, dtype=jnp.float32), jnp.sum(chosen, axis=-1, dtype=jnp.float32)
        ),
        "retained_mass": mass,
        "exact_mass": exact_mass,
        "relative_mass": ratio(mass, exact_mass),
        "distribution_cosine": ratio(
            total(both, square), jnp.sqrt(total(held, square) * total(chosen, square))
        ),
        "output_cosine": ratio(
            jnp.sum(o * exact, axis=-1), jnp.sqrt(jnp.sum(o * o, axis=-1)) * size
        ),
        "relative_error": ratio(away, size),
    }


def members(support: jax.Array, slots: int) -> jax.Array:
    """Which tokens a support holds, bool ``[B, H, S]``."""
    batch, heads = support.shape[:2]
    b, h = jnp.arange(batch)[:, None, None], jnp.arange(heads)[None, :, None]
    place = jnp.where(support >= 0, support, slots)  # beyond: dropped
    return jnp.zeros((batch, heads, slots), jnp.bool_).at[b, h, place].set(True, mode="drop")


def sums_of(layers: tuple[MeasuredState, ...], rows: int) -> dict[str, Any]:
    """Sums of all layers over the first rows, and mean relative errors of each row, as lists.

    ``sums`` is ``[layers, H, paths, bins, metrics]``, ``groups`` ``[layers, G, 2]``, ``errors``
    ``[rows]``.
    """
    each = np.stack([np.asarray(s.sums[:rows], np.float64) for s in layers], axis=1)
    groups = np.stack([np.asarray(s.groups[:rows], np.float64).sum(axis=0) for s in layers])
    by_row = each.sum(axis=(1, 2, 3, 4))  # [rows, metrics]
    return {
        "sums": _rounded(each.sum(axis=0)),
        "groups": groups.tolist(),
        "errors": [means(row)["relative_error"] for row in by_row],
    }


def _rounded(values: np.ndarray) -> list[Any]:
    """Six significant digits: all that float32 sums hold."""
    size = np.where(values == 0, 1.0, np.abs(values))
    scale = 10.0 ** (5 - np.floor(np.log10(size)))
    return (np.round(values * scale) / scale).tolist()


def means(sums: np.ndarray) -> dict[str, float]:
    """Means of the metrics, from sums ``[metrics]``; just the count where it is 0."""
    count = float(sums[0])
    found: dict[str, float] = {"count": count}
    if count > 0:
        last = METRICS.index("similarity") + 1
        found.update(
            {
                name: float(value) / count
                for name, value in zip(METRICS[1:last], sums[1:last], strict=True)
            }
        )
    return found


def correlation(sums: np.ndarray) -> float | None:
    """Pearson correlation of similarity and relative error, from sums ``[metrics]``."""
    named = dict(zip(METRICS, sums.tolist(), strict=True))
    n = named["count"]
    if n < 2:
        return None
    x, y = named["similarity"] / n, named["relative_error"] / n
    spread = (named["similarity_squared"] / n - x * x) * (named["error_squared"] / n - y * y)
    if spread <= 1e-18:
        return None
    return (named["similarity_times_error"] / n - x * y) / spread**0.5
