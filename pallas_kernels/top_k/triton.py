"""Top-K as Triton kernels: nothing is sorted.

Few scores are selected from by one program a row, which holds them all. Of many, a first kernel
finds the largest of scores that lie far apart; the exact support's bound, filter and selection do
the rest.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.exact_support.triton import Scan, run_bound, run_filter, run_select, sets_of
from pallas_kernels.select.triton import Destination, Listing, select_warps, write_picked
from pallas_kernels.triton_lib import Ref, call, load_at, round_up, store_at

_HELD = 8192
"""Scores that one program holds."""
_TILE = 4096
"""Scores that a program finds the largest in."""


def _select_held(scores: jax.Array, budget: int) -> tuple[jax.Array, jax.Array]:
    rows, stored = scores.shape
    warps = select_warps(stored)

    def kernel(
        all_scores_ref: Ref,  # [BH, S]
        support_ref: Ref,  # [BH, K]
        scores_ref: Ref,  # [BH, K]
    ) -> None:
        row = pl.program_id(0)
        token = lax.iota(jnp.int32, round_up(stored))
        score = load_at(all_scores_ref, row, token, mask=token < stored, other=-float("inf"))
        to = Destination(support_ref, scores_ref, row)
        to.pad(write_picked([Listing(token, score)], to, warps=warps).number)

    support, kept = call(
        kernel,
        name="top_k_select",
        grid=(rows,),
        outputs=[
            jax.ShapeDtypeStruct((rows, budget), jnp.int32),
            jax.ShapeDtypeStruct((rows, budget), jnp.float32),
        ],
        warps=warps,
    )(scores)
    return support, kept


def _largest(scores: jax.Array, tile: int, sets: int) -> jax.Array:
    """Of every tile the largest scores that are a number of sets apart, ``[BH, tiles * sets]``."""
    rows, stored = scores.shape
    tiles = -(-stored // tile)

    def kernel(
        all_scores_ref: Ref,  # [BH, S]
        highest_ref: Ref,  # [BH, tiles * sets]
    ) -> None:
        row, program = pl.program_id(0), pl.program_id(1)
        turn, place = lax.iota(jnp.int32, tile // sets), lax.iota(jnp.int32, sets)
        token = program * tile + turn[:, None] * sets + place[None, :]
        score = load_at(all_scores_ref, row, token, mask=token < stored, other=-float("inf"))
        store_at(highest_ref, jnp.max(score, axis=0), row, program * sets + place)

    (highest,) = call(
        kernel,
        name="top_k_largest",
        grid=(rows, tiles),
        outputs=[jax.ShapeDtypeStruct((rows, tiles * sets), jnp.float32)],
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
        sets = sets_of(budget)
        tile = max(_TILE, sets)
        split = Scan.of_scores(rows, stored, budget, sets, -(-stored // tile))
        lengths = jnp.full((rows,), stored, jnp.int32)
        highest = _largest(flat, tile, sets)
        bounds = run_bound(highest, lengths, split, budget)
        listed = run_filter(flat, bounds, lengths, split)
        support, kept = run_select(listed, lengths, split, budget)
    return support.reshape(batch, heads, budget), kept.reshape(batch, heads, budget)
