"""Support scores as a Triton kernel: a program reads a block of one head's chosen keys."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.candidates.triton import score_keys
from pallas_kernels.triton_lib import Ref, call, check, load_at, store_at

_WARPS = 4
_BLOCK = 32 * _WARPS
"""Keys of a program: one a thread."""


def support_scores(q: jax.Array, keys: jax.Array, support: jax.Array) -> jax.Array:
    """See `pallas_kernels.support_scores.support_scores`."""
    batch, heads, dim = q.shape
    groups, stored = keys.shape[1:3]
    budget = support.shape[2]
    check(dim <= 256, "up to 256 dimensions")
    rows = batch * heads

    def kernel(
        q_ref: Ref,  # [BH, D]
        keys_ref: Ref,  # [BG, S, D]
        support_ref: Ref,  # [BH, K]
        scores_ref: Ref,  # [BH, K]
    ) -> None:
        row = pl.program_id(0)
        k = pl.program_id(1) * _BLOCK + lax.iota(jnp.int32, _BLOCK)
        token = load_at(support_ref, row, k, mask=k < budget, other=-1)
        group = row // (heads // groups)
        scores = score_keys(q_ref, keys_ref, row, group, token, token >= 0)
        store_at(scores_ref, scores, row, k, mask=k < budget)

    (scores,) = call(
        kernel,
        name="support_scores",
        grid=(rows, -(-budget // _BLOCK)),
        outputs=[jax.ShapeDtypeStruct((rows, budget), jnp.float32)],
        warps=_WARPS,
    )(
        q.reshape(rows, dim),
        keys.reshape(batch * groups, stored, dim),
        support.reshape(rows, budget),
    )
    return scores.reshape(batch, heads, budget)
