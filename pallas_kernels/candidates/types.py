"""What `candidates` returns."""

from typing import NamedTuple

import jax


class Candidates(NamedTuple):
    """Scored candidates, N = R * K + W slots a head.

    Attributes:
        ids: int32 ``[B, H, N]``, ascending where the score is finite; every token at most once.
        scores: float32 ``[B, H, N]``; −inf in unused slots and where the score is not finite.
        unique: int32 ``[B, H]``, number of unique candidates M.
    """

    ids: jax.Array
    scores: jax.Array
    unique: jax.Array
