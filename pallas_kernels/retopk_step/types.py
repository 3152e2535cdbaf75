"""What `retopk_step` takes and returns."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

REUSE, FALLBACK, REFRESH = 0, 1, 2
"""Paths of a head-step."""
WORDS = 32
"""Integers of a line of the cache."""
SIGNALS = (2, WORDS)
"""Of a head, by which the programs of a kernel wait for each other. Where two signals share a line,
those that wait for the one slow down those that give the other."""


class Remembered(NamedTuple):
    """What one layer remembers between steps; push number n lies in slot n % C.

    Attributes:
        queries: ``[B, H, C, D]``, normalised queries.
        supports: int32 ``[B, H, C, K]``, ascending, −1 last.
        pushed: int32 ``[B]``, pushes so far.
        paths: int32 ``[B, H, 3]``, head-steps by path so far.
        candidates: int32 ``[B, H]``, unique candidates summed over the reuse steps so far.
        signals: int32 ``[B, H, *SIGNALS]``, by which the programs of a kernel wait for each
            other; zeros between steps.
    """

    queries: jax.Array
    supports: jax.Array
    pushed: jax.Array
    paths: jax.Array
    candidates: jax.Array
    signals: jax.Array

    @classmethod
    def of(cls, queries: jax.Array, supports: jax.Array, pushed: jax.Array) -> "Remembered":
        """Before the first step."""
        heads = queries.shape[:2]
        return cls(
            queries,
            supports,
            pushed,
            paths=jnp.zeros((*heads, 3), jnp.int32),
            candidates=jnp.zeros(heads, jnp.int32),
            signals=jnp.zeros((*heads, *SIGNALS), jnp.int32),
        )


class ReTopKStep(NamedTuple):
    """One step of one layer.

    Attributes:
        out: ``[B, H, D]`` in the dtype of the values; zeros in rows that are not active.
        remembered: what the next step takes; rows that are not active keep theirs.
        support: int32 ``[B, H, K]``, tokens attended, ascending, −1 last; all −1 in rows that are
            not active.
        path: int32 ``[B, H]``: 0 reuse, 1 fallback, 2 refresh.
        rho_max: float32 ``[B, H]``, the largest similarity; −inf without any.
        unique: int32 ``[B, H]``, unique candidates of a head that reuses; 0 of another.
    """

    out: jax.Array
    remembered: Remembered
    support: jax.Array
    path: jax.Array
    rho_max: jax.Array
    unique: jax.Array
