"""Candidates as a Triton kernel: repeats are found before their keys are read.

A program takes a block of one recalled support. A binary search of every token in the other
recalled supports gives its rank in their merged order and says whether an earlier one has it too;
only the remaining keys are read. Scores are written at the ranks, so that slots ascend by token.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.candidates.types import Candidates
from pallas_kernels.triton_lib import (
    LAST,
    Array,
    Ref,
    call,
    check,
    finite_scores,
    load_at,
    round_up,
    store_at,
)


def block_rows(dim: int, itemsize: int) -> int:
    """Keys that a program of 4 warps holds."""
    return max(16, min(64, 16384 // (round_up(dim) * itemsize)))


def score_programs(budget: int, entries: int, window: int, block: int) -> int:
    """Programs of one head."""
    return entries * -(-budget // block) + -(-window // block)


def _search(supports_ref: Ref, row: Array, slot: Array, tokens: Array) -> tuple[Array, Array]:
    """Entries of one support below each token, and whether it holds the token."""
    budget = supports_ref.shape[2]

    def at(index: Array) -> Array:
        token = load_at(supports_ref, row, jnp.maximum(slot, 0), jnp.minimum(index, budget - 1))
        return jnp.where((token < 0) | (slot < 0) | (index >= budget), LAST, token)

    below = jnp.zeros(tokens.shape, jnp.int32)
    step = round_up(budget) // 2
    while step:
        below = jnp.where(at(below + (step - 1)) < tokens, below + step, below)
        step //= 2
    last = at(below)
    return jnp.where(last < tokens, below + 1, below), last == tokens


def _score_keys(
    q_ref: Ref, keys_ref: Ref, row: Array, group: Array, tokens: Array, wanted: Array
) -> Array:
    """Scores of one block of keys; those not wanted are not read."""
    dim = q_ref.shape[1]
    d = lax.iota(jnp.int32, round_up(dim))
    q = load_at(q_ref, row, d, mask=d < dim, other=0.0).astype(jnp.float32)
    keys = load_at(
        keys_ref,
        group,
        jnp.maximum(tokens, 0)[:, None],
        d[None, :],
        mask=wanted[:, None] & (d < dim)[None, :],
        other=0.0,
    )
    dots = jnp.sum(keys.astype(jnp.float32) * q[None, :], axis=1)
    return finite_scores(dots, dim**-0.5, wanted)


def score_block(
    q_ref: Ref,  # [BH, D]
    keys_ref: Ref,  # [BG, S, D]
    supports_ref: Ref,  # [BH, C, K]
    slots_ref: Ref,  # [BH, R]
    ids_ref: Ref,  # [BH, N]
    scores_ref: Ref,  # [BH, N]
    row: Array,
    program: Array,
    length: Array,
    *,
    block: int,
    window: int,
) -> None:
    """Program number ``program`` of head ``row``: a block of a support, or of the window."""
    heads, _, budget = supports_ref.shape
    entries = slots_ref.shape[1]
    group = row // (heads // keys_ref.shape[0])
    parts = -(-budget // block)
    lane = lax.iota(jnp.int32, block)
    start = length - window

    @pl.when(program < entries * parts)
    def _() -> None:
        mine = program // parts
        position = (program % parts) * block + lane
        inside = position < budget
        slots = [slots_ref[row, r] for r in range(entries)]
        slot = slots[0]
        for r in range(1, entries):
            slot = jnp.where(mine == r, slots[r], slot)
        token = load_at(
            supports_ref, row, jnp.maximum(slot, 0), position, mask=inside & (slot >= 0), other=-1
        )
        token = jnp.where(token < 0, LAST, token)
        drop = token >= start
        rank = position
        for r in range(1, entries):
            other = mine + r
            other = jnp.where(other >= entries, other - entries, other)
            their_slot = slots[0]
            for o in range(1, entries):
                their_slot = jnp.where(other == o, slots[o], their_slot)
            below, found = _search(supports_ref, row, their_slot, token)
            earlier = other < mine
            drop |= earlier & found
            full = jnp.where(found, 1, 0) + below
            rank += jnp.where(earlier, jnp.where(token == LAST, budget, full), below)
        drop |= ~inside
        scores = _score_keys(q_ref, keys_ref, row, group, jnp.where(drop, -1, token), ~drop)
        store_at(ids_ref, jnp.where(drop, -1, token), row, rank, mask=inside)
        store_at(scores_ref, scores, row, rank, mask=inside)

    @pl.when(program >= entries * parts)
    def _() -> None:
        position = (program - entries * parts) * block + lane
        token = start + position
        wanted = (position < window) & (token >= 0)
        scores = _score_keys(q_ref, keys_ref, row, group, token, wanted)
        place = entries * budget + position
        store_at(ids_ref, jnp.where(wanted, token, -1), row, place, mask=position < window)
        store_at(scores_ref, scores, row, place, mask=position < window)


def check_candidates(dim: int, entries: int, budget: int, window: int) -> None:
    """Raises NotImplementedError for sizes that the selection after it does not hold."""
    check(dim <= 256, "up to 256 dimensions")
    slots = round_up(entries * budget) + round_up(window)
    check(slots < 2**15, "fewer than 32,768 candidate slots")


def candidates(
    q: jax.Array,
    keys: jax.Array,
    supports: jax.Array,
    slots: jax.Array,
    lengths: jax.Array,
    *,
    window: int,
) -> Candidates:
    """See `pallas_kernels.candidates.candidates`."""
    batch, heads, dim = q.shape
    capacity, budget = supports.shape[2:]
    groups, stored = keys.shape[1:3]
    entries = slots.shape[2]
    check_candidates(dim, entries, budget, window)
    rows, total = batch * heads, entries * budget + window
    block = block_rows(dim, keys.dtype.itemsize)

    def kernel(
        q_ref: Ref,  # [BH, D]
        keys_ref: Ref,  # [BG, S, D]
        supports_ref: Ref,  # [BH, C, K]
        slots_ref: Ref,  # [BH, R]
        lengths_ref: Ref,  # [B]
        ids_ref: Ref,  # [BH, N]
        scores_ref: Ref,  # [BH, N]
    ) -> None:
        row = pl.program_id(0)
        score_block(
            q_ref,
            keys_ref,
            supports_ref,
            slots_ref,
            ids_ref,
            scores_ref,
            row,
            pl.program_id(1),
            lengths_ref[row // heads],
            block=block,
            window=window,
        )

    run = call(
        kernel,
        name="candidates",
        grid=(rows, score_programs(budget, entries, window, block)),
        outputs=[
            jax.ShapeDtypeStruct((rows, total), jnp.int32),
            jax.ShapeDtypeStruct((rows, total), jnp.float32),
        ],
        warps=4,
    )
    ids, scores = run(
        q.reshape(rows, dim),
        keys.reshape(batch * groups, stored, dim),
        supports.reshape(rows, capacity, budget),
        slots.reshape(rows, entries),
        lengths,
    )
    ids = ids.reshape(batch, heads, total)
    unique = jnp.sum(ids >= 0, axis=-1, dtype=jnp.int32)
    return Candidates(ids, scores.reshape(batch, heads, total), unique)
