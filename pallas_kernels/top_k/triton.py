"""Top-K as Triton kernels: nothing is sorted.

Few scores are selected from by one program a row, which holds them all. Of many, a first kernel
finds the largest of every block; the filter and the selection of the exact support do the rest.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.exact_support.triton import Scan, run_filter, run_select
from pallas_kernels.select.triton import Destination, Listing, select_warps, write_picked
from pallas_kernels.triton_lib import Ref, call, load_at, round_up, store_at

_HELD = 8192
"""Scores that one program holds."""
_TILE = 4096
"""Scores that a program finds the largest of blocks in."""


def _select_held(scores: jax.Array, budget: int) -> tuple[jax.Array, jax.Array]:
    rows, stored = scores.shape

    def kernel(
        all_scores_ref: Ref,  # [BH, S]
        support_ref: Ref,  # [BH, K]
        scores_ref: Ref,  # [BH, K]
    ) -> None:
        row = pl.program_id(0)
        token = lax.iota(jnp.int32, round_up(stored))
        score = load_at(all_scores_ref, row, token, mask=token < stored, other=-float("inf"))
        write_picked([Listing(token, score)], Destination(support_ref, scores_ref, row))

    support, kept = call(
        kernel,
        name="top_k_select",
        grid=(rows,),
        outputs=[
            jax.ShapeDtypeStruct((rows, budget), jnp.int32),
            jax.ShapeDtypeStruct((rows, budget), jnp.float32),
        ],
        warps=select_warps(stored),
    )(scores)
    return support, kept


def _largest_of_blocks(scores: jax.Array, block: int) -> jax.Array:
    """``[BH, S / block]``."""
    rows, stored = scores.shape
    blocks = -(-stored // block)
    tile = max(_TILE, block)

    def kernel(
        all_scores_ref: Ref,  # [BH, S]
        highest_ref: Ref,  # [BH, S / block]
    ) -> None:
        row, program = pl.program_id(0), pl.program_id(1)
        token = program * tile + lax.iota(jnp.int32, tile)
        score = load_at(all_scores_ref, row, token, mask=token < stored, other=-float("inf"))
        at = program * (tile // block) + lax.iota(jnp.int32, tile // block)
        highest = jnp.max(score.reshape(tile // block, block), axis=1)
        store_at(highest_ref, highest, row, at, mask=at < blocks)

    (highest,) = call(
        kernel,
        name="top_k_blocks",
        grid=(rows, -(-stored // tile)),
        outputs=[jax.ShapeDtypeStruct((rows, blocks), jnp.float32)],
        warps=4,
    )(scores)
    return highest


def top_k(scores: jax.Array, *, budget: int) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.top_k.top_k`."""
    batch, heads, stored = scores.shape
    rows = batch * heads
    flat = scores.reshape(rows, stored)
    if stored <= _HELD:
        support, kept = _select_held(flat, budget)
    else:
        split = Scan.of_scores(rows, stored, budget)
        lengths = jnp.full((rows,), stored, jnp.int32)
        highest = _largest_of_blocks(flat, split.block)
        tokens, counts = run_filter(flat, highest, lengths, split, budget, finite=False)
        support, kept = run_select(flat, tokens, counts, lengths, split, budget, finite=False)
    return support.reshape(batch, heads, budget), kept.reshape(batch, heads, budget)
