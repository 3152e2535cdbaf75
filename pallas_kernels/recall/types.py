"""What `recall` returns."""

from typing import NamedTuple

import jax


class Recalled(NamedTuple):
    """The entries of the recall cache that resemble the current query.

    Attributes:
        qbar: float32 ``[B, H, D]``, the normalised query; zeros where its norm is zero or not
            finite.
        slots: int32 ``[B, H, R]``, most similar first; −1 where fewer are filled.
        rho_max: float32 ``[B, H]``, the largest similarity; −inf without any.
    """

    qbar: jax.Array
    slots: jax.Array
    rho_max: jax.Array
