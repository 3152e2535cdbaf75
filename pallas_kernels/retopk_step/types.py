"""What `retopk_step` takes and returns."""

from typing import NamedTuple

import jax

REUSE, FALLBACK, REFRESH = 0, 1, 2
"""Paths of a head-step."""


class Remembered(NamedTuple):
    """What one layer remembers between steps; push number n lies in slot n % C.

    Attributes:
        queries: ``[B, H, C, D]``, normalised queries.
        supports: int32 ``[B, H, C, K]``, ascending, −1 last.
        pushed: int32 ``[B]``, pushes so far.
        paths: int32 ``[B, H, 3]``, head-steps by path so far.
        candidates: int32 ``[B, H]``, unique candidates summed over the reuse steps so far.
    """

    queries: jax.Array
    supports: jax.Array
    pushed: jax.Array
    paths: jax.Array
    candidates: jax.Array


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
