"""Candidates as a Triton kernel: repeats are found before their keys are read.

A program takes a block of one recalled support. A binary search of every token in the other
recalled supports gives its rank in their merged order and says whether an earlier one has it too;
only the remaining keys are read. Scores are written at the ranks, so that slots ascend by token.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.candidates.types import Candidates
from pallas_kernels.triton_lib import (
    Array,
    Ref,
    call,
    check,
    finite_scores,
    load_at,
    round_up,
    store_at,
)

WARPS = 4
_BLOCK = 32 * WARPS
"""Candidates that a program handles: one a thread."""

_PARTS = 16
"""Parts of a support of which the search finds the right one with independent reads."""

_HASH = -1640531535
"""An odd number by which consecutive tokens are spread: 2**32 over the golden ratio."""

_ALL_AT_ONCE = 1024
"""Programs up to which a GPU runs all of them at once."""


class Split(NamedTuple):
    """How the candidates of a head are split over programs.

    Attributes:
        of_support: programs that share a support.
        total: programs of a head, those of the window last.
        at_once: whether a GPU runs the programs of all heads at once: what counts then is how long
            one takes, and otherwise how much it does.
    """

    of_support: int
    total: int
    at_once: bool

    @classmethod
    def of(cls, rows: int, budget: int, entries: int, window: int) -> "Split":
        """For ``rows`` heads."""
        of_support = -(-budget // _BLOCK)
        total = entries * of_support + -(-window // _BLOCK)
        return cls(of_support, total, rows * total <= _ALL_AT_ONCE)


def _search(
    supports_ref: Ref, row: Array, slot: Array, tokens: Array, *, at_once: bool
) -> tuple[Array, Array]:
    """Entries of one support below each token, and whether it holds the token."""
    budget = supports_ref.shape[2]
    wanted = lax.bitcast_convert_type(tokens, jnp.uint32)
    entry = jnp.maximum(slot, 0)
    whole = round_up(budget) == budget

    def at(index: Array) -> Array:  # unsigned, so that an empty slot, -1, sorts last
        mask = None if whole else index < budget
        token = load_at(supports_ref, row, entry, index, mask=mask, other=None if whole else -1)
        return lax.bitcast_convert_type(token, jnp.uint32)

    below = jnp.zeros(tokens.shape, jnp.int32)
    step = round_up(budget)
    if at_once and step > _PARTS:  # more reads, none of which waits, of every line of the support
        step //= _PARTS
        for last in range(step - 1, min(budget, step * (_PARTS - 1)), step):
            below += jnp.where(at(jnp.int32(last)) < wanted, step, 0)
    while step > 1:
        step //= 2
        below = jnp.where(at(below + (step - 1)) < wanted, below + step, below)
    last = at(below)
    below = jnp.where(last < wanted, below + 1, below)
    return jnp.where(slot < 0, 0, below), (last == wanted) & (slot >= 0)


def score_keys(
    q_ref: Ref,
    keys_ref: Ref,
    row: Array,
    group: Array,
    tokens: Array,
    wanted: Array,
    *,
    part: int = 256,
) -> Array:
    """Scores of one block of keys, read ``part`` bytes at a time; those not wanted are not read."""
    dim = q_ref.shape[1]
    width = min(round_up(dim), part // keys_ref.dtype.itemsize)
    dots = jnp.zeros(tokens.shape, jnp.float32)
    for start in range(0, dim, width):
        d = start + lax.iota(jnp.int32, width)
        q = load_at(q_ref, row, d, mask=d < dim, other=0.0).astype(jnp.float32)
        keys = load_at(
            keys_ref,
            group,
            jnp.maximum(tokens, 0)[:, None],
            d[None, :],
            mask=wanted[:, None] & (d < dim)[None, :],
            other=0.0,
        )
        dots += jnp.sum(keys.astype(jnp.float32) * q[None, :], axis=1)
    return finite_scores(dots, dim**-0.5, wanted)


def _choose(index: Array, options: Sequence[Array]) -> Array:
    chosen = options[0]
    for i, option in enumerate(options[1:], 1):
        chosen = jnp.where(index == i, option, chosen)
    return chosen


def score_candidates(
    q_ref: Ref,  # [BH, D]
    keys_ref: Ref,  # [BG, S, D]
    supports_ref: Ref,  # [BH, C, K]
    ids_ref: Ref,  # [BH, N]
    scores_ref: Ref,  # [BH, N]
    row: Array,
    program: Array,
    slots: Sequence[Array],
    length: Array,
    *,
    split: Split,
    window: int,
) -> None:
    """Program number ``program`` of head ``row``: a part of a support, or of the window."""
    heads, _, budget = supports_ref.shape
    entries = len(slots)
    group = row // (heads // keys_ref.shape[0])
    lane = lax.iota(jnp.int32, _BLOCK)
    start = length - window

    def put(slot: Array, token: Array, wanted: Array, inside: Array) -> None:
        part = 256 if split.at_once else 128  # whole keys need more registers
        store_at(ids_ref, token, row, slot, mask=inside)
        scores = score_keys(q_ref, keys_ref, row, group, token, wanted, part=part)
        store_at(scores_ref, scores, row, slot, mask=inside)

    @pl.when(program < entries * split.of_support)
    def _() -> None:
        mine = program // split.of_support
        position = (program % split.of_support) * _BLOCK + lane
        inside = position < budget
        slot = _choose(mine, slots)
        token = load_at(
            supports_ref, row, jnp.maximum(slot, 0), position, mask=inside & (slot >= 0), other=-1
        )
        rank = position
        before, holders = jnp.zeros((_BLOCK,), jnp.int32), jnp.ones((_BLOCK,), jnp.int32)
        for r in range(1, entries):
            other = mine + r
            other = jnp.where(other >= entries, other - entries, other)
            below, found = _search(
                supports_ref, row, _choose(other, slots), token, at_once=split.at_once
            )
            earlier = other < mine
            before += jnp.where(earlier & found, 1, 0)
            holders += jnp.where(found, 1, 0)
            through = jnp.where(token < 0, budget, below + jnp.where(found, 1, 0))
            rank += jnp.where(earlier, through, below)
        # Any of the supports that hold a token may read its key: by a hash, so that all have as
        # much to read. Its slot is the first of the token's.
        reader = (((token * _HASH) >> 16) & 0xFFFF) * holders >> 16
        drop = (token < 0) | (token >= start) | (before != reader)
        shift = jnp.where(before == reader, -before, jnp.where(before < reader, 1, 0))
        rank += jnp.where(token < 0, 0, shift)
        put(rank, jnp.where(drop, -1, token), ~drop, inside)

    @pl.when(program >= entries * split.of_support)
    def _() -> None:
        position = (program - entries * split.of_support) * _BLOCK + lane
        inside = position < window
        wanted = inside & (start + position >= 0)
        put(entries * budget + position, jnp.where(wanted, start + position, -1), wanted, inside)


def check_candidates(dim: int, entries: int, budget: int, window: int) -> None:
    """Raises NotImplementedError for sizes that the selection after it does not hold."""
    check(dim <= 256, "up to 256 dimensions")
    check(round_up(entries * budget + window) < 2**15, "up to 16,384 candidate slots")


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
    split = Split.of(rows, budget, entries, window)

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
        score_candidates(
            q_ref,
            keys_ref,
            supports_ref,
            ids_ref,
            scores_ref,
            row,
            pl.program_id(1),
            [slots_ref[row, r] for r in range(entries)],
            lengths_ref[row // heads],
            split=split,
            window=window,
        )

    ids, scores = call(
        kernel,
        name="candidates",
        grid=(rows, split.total),
        outputs=[
            jax.ShapeDtypeStruct((rows, total), jnp.int32),
            jax.ShapeDtypeStruct((rows, total), jnp.float32),
        ],
        warps=WARPS,
    )(
        q.reshape(rows, dim),
        keys.reshape(batch * groups, stored, dim),
        supports.reshape(rows, capacity, budget),
        slots.reshape(rows, entries),
        lengths,
    )
    ids = ids.reshape(batch, heads, total)
    unique = jnp.sum(ids >= 0, axis=-1, dtype=jnp.int32)
    return Candidates(ids, scores.reshape(batch, heads, total), unique)
