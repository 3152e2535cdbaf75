"""A ReTopK decode beside which the exact output and that of a reuse are kept, whatever its path."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from retopk_jax.attention.base import AttentionMethod, Report, Step
from retopk_jax.attention.retopk import REFRESH, ReTopK, ReTopKState
from retopk_jax.language_model import Geometry, LanguageModel
from retopk_jax.positions import exact_support, sparse_attend
from retopk_jax.prefill import Context
from retopk_jax.teacher_forcing import score_continuation


@dataclass(frozen=True)
class Samples:
    """Head-steps of a decode; n counts rows times steps.

    Attributes:
        similarity: float32 ``[n, layers, H]``, largest similarities, −inf without any.
        error: float32 ``[n, layers, H]``, relative error of a reuse, taken or not.
        path: int32 ``[n, layers, H]``, taken.
    """

    similarity: NDArray[np.float32]
    error: NDArray[np.float32]
    path: NDArray[np.int32]

    @classmethod
    def joined(cls, parts: Sequence["Samples"]) -> "Samples":
        """Those of several decodes."""
        names = ("similarity", "error", "path")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    @property
    def free(self) -> NDArray[np.bool_]:
        """Steps of a layer whose paths a policy decides, ``[n, layers]``: no refresh, all known."""
        return np.all((self.path != REFRESH) & (self.similarity > -np.inf), axis=2)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShadowState:
    """State of the method, and what was seen of each step.

    Attributes:
        inner: of the method.
        similarity: float32 ``[B, H, N]``.
        error: float32 ``[B, H, N]``.
        path: int32 ``[B, H, N]``.
    """

    inner: ReTopKState
    similarity: jax.Array
    error: jax.Array
    path: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shadow(AttentionMethod):
    """Decodes by a method, and keeps how far a reuse would be from the exact output.

    Attributes:
        inner: the method; its output is the one that the model goes on with.
        steps: N, steps that are kept.
        metric: float32 ``[layers, H, D, D]``, M by which the error of an output that is d away is
            ``sqrt(d @ M @ d)``; None for ``|d|`` over the norm of the exact output.
    """

    inner: ReTopK
    steps: int = field(metadata={"static": True})
    metric: jax.Array | None = None

    name: ClassVar[str] = "shadow"

    @property
    def tail_queries(self) -> int:
        """Those of the method."""
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
    ) -> ShadowState:
        """See `AttentionMethod.prime`."""
        kept = (keys.shape[0], tail_queries.shape[2], self.steps)
        return ShadowState(
            self.inner.prime(layer, keys, values, tail_queries, lengths),
            jnp.zeros(kept, jnp.float32),
            jnp.zeros(kept, jnp.float32),
            jnp.zeros(kept, jnp.int32),
        )

    def attend(
        self,
        layer: int | jax.Array,
        state: ShadowState,
        q: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        step: Step,
    ) -> tuple[jax.Array, ShadowState, Report]:
        """See `AttentionMethod.attend`."""
        out, inner, report = self.inner.attend(layer, state.inner, q, keys, values, step)
        anyway = replace(self.inner, tau=-1.0, refresh=0, share_scan=False, risk=None)
        reused, _, _ = anyway.attend(layer, state.inner, q, keys, values, step)
        wanted = jnp.ones(q.shape[:2], jnp.bool_)
        best = exact_support(q, keys, step.lengths, wanted, budget=self.inner.budget)
        exact = sparse_attend(values, *best).astype(jnp.float32)
        away = reused.astype(jnp.float32) - exact  # [B, H, D]
        if self.metric is None:
            size = jnp.linalg.norm(exact, axis=-1)
            error = jnp.linalg.norm(away, axis=-1) / jnp.where(size > 0, size, 1.0)  # [B, H]
        else:
            square = jnp.einsum(
                "bhd,hde,bhe->bh", away, self.metric[layer], away, precision="highest"
            )
            error = jnp.sqrt(jnp.maximum(square, 0.0))
        rows = jnp.arange(q.shape[0])
        at = jnp.where(step.active, step.index, self.steps)

        def kept(log: jax.Array, seen: jax.Array | None) -> jax.Array:
            return log.at[rows, :, at].set(seen, mode="drop")

        new = ShadowState(
            inner,
            kept(state.similarity, report.rho_max),
            kept(state.error, error),
            kept(state.path, report.path),
        )
        return out, new, report


def collect(
    model: LanguageModel,
    method: ReTopK,
    context: Context,
    tokens: jax.Array,
    metric: jax.Array | None = None,
) -> tuple[Samples, Context]:
    """Decodes given tokens by a method; returns what was seen, and the context to go on with.

    Args:
        model: the model.
        method: whose paths are taken.
        context: from `retopk_jax.prefill`; used up.
        tokens: int32 ``[B, N + 1]``; the last one is not fed.
        metric: of the errors; see `Shadow`.
    """
    shadow = Shadow(method, tokens.shape[1] - 1, metric)
    scored = score_continuation(model, context, shadow, tokens)
    layers: tuple[ShadowState, ...] = scored.state.layers

    def seen(name: str) -> NDArray[Any]:
        log = np.stack([np.asarray(getattr(layer, name)) for layer in layers])  # [layers, B, H, N]
        log = log.transpose(1, 3, 0, 2)
        return log.reshape(-1, *log.shape[2:])

    return Samples(seen("similarity"), seen("error"), seen("path")), scored.context
