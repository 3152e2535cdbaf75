"""Select as a Triton kernel: one program a head finds the K-th score and writes what reaches it."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.triton_lib import (
    Array,
    Bracket,
    Ref,
    call,
    check,
    constant,
    load_at,
    pick,
    round_up,
    store_at,
    warps_for,
)


class Listing(NamedTuple):
    """Tokens, ascending, and their scores.

    Attributes:
        tokens: int32 ``[n]``.
        scores: float32 ``[n]``, −inf where there is no token.
    """

    tokens: Array
    scores: Array


class Destination(NamedTuple):
    """Where a program writes what is picked for its head.

    Attributes:
        support: int32 ``[BH, K + spare]``.
        scores: float32 ``[BH, K + spare]``, or None where they can be found by what is picked.
        row: of the head.
        spare: how many more than K there may be.
    """

    support: Ref
    scores: Ref | None
    row: Array
    spare: int = 0

    @property
    def budget(self) -> int:
        """K."""
        return self.support.shape[1] - self.spare

    def put(self, k: Array, picked: Listing, mask: Array) -> None:
        """Writes entries ``k`` where ``mask`` is set."""
        store_at(self.support, picked.tokens, self.row, k, mask=mask)
        if self.scores is not None:
            store_at(self.scores, picked.scores, self.row, k, mask=mask)

    def pad(self, start: Array) -> None:
        """Writes −1 and −inf from entry ``start`` on."""

        @pl.when(start < self.budget)
        def _() -> None:
            k = lax.iota(jnp.int32, round_up(self.budget))
            empty = (k >= start) & (k < self.budget)
            none = Listing(
                jnp.full(k.shape, -1, jnp.int32), jnp.full(k.shape, -float("inf"), jnp.float32)
            )
            self.put(k, none, empty)


class Shortlist(NamedTuple):
    """What a program has written of its head: the K best and few more.

    Attributes:
        number: of entries.
        bracket: of the K-th score, which all entries reach.
    """

    number: Array
    bracket: Bracket

    @classmethod
    def none(cls) -> "Shortlist":
        """Without an entry."""
        return cls(constant(0), Bracket.empty())


def load_picked(
    support_ref: Ref, scores_ref: Ref, row: Array, k: Array, number: Array | int
) -> Listing:
    """Entries ``k`` of what was picked for one head; −1 and −inf beyond ``number``.

    Args:
        support_ref: int32 ``[BH, K]``.
        scores_ref: float32 ``[BH, K]``.
        row: of the head.
        k: int32, any shape.
        number: of entries, at most K.
    """
    mask = k < number
    token = load_at(support_ref, row, k, mask=mask, other=-1)
    return Listing(token, load_at(scores_ref, row, k, mask=mask, other=-float("inf")))


def write_picked(pieces: Sequence[Listing], to: Destination, *, warps: int) -> Shortlist:
    """Writes the K best of one head and as many more as there is room for, by token.

    Args:
        pieces: each with higher tokens than the one before it.
        to: where.
        warps: of the program.
    """
    scores = [piece.scores for piece in pieces]
    picked = pick(scores, to.budget, warps=warps, spare=to.spare)
    for piece, place in zip(pieces, picked.places, strict=True):
        to.put(place, piece, place >= 0)
    return Shortlist(picked.number, picked.bracket)


def slot_pieces(total: int) -> list[tuple[int, int]]:
    """Starts and sizes of one or two pieces of slots, so that few lanes stay empty."""
    whole = round_up(total)
    if whole == total:
        return [(0, whole)]
    most = whole // 2
    rest = max(64, round_up(total - most))
    return [(0, whole)] if most + rest >= whole else [(0, most), (most, rest)]


def load_slots(ref: Ref, row: Array, other: float) -> list[Array]:
    """What is in the slots of one head, by piece of `slot_pieces`.

    Args:
        ref: ``[BH, N]``.
        row: of the head.
        other: what is in lanes that are no slots.
    """
    total = ref.shape[1]
    pieces = []
    for start, size in slot_pieces(total):
        slot = start + lax.iota(jnp.int32, size)
        mask = None if start + size <= total else slot < total
        pieces.append(load_at(ref, row, slot, mask=mask, other=None if mask is None else other))
    return pieces


def select_warps(total: int) -> int:
    """Warps of a program that holds ``total`` slots."""
    return warps_for(total, each=8, least=4, most=16)


def select(ids: jax.Array, scores: jax.Array, *, budget: int) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.select.select`."""
    batch, heads, total = ids.shape
    check(round_up(total) < 2**15, "up to 16,384 candidate slots")
    rows, warps = batch * heads, select_warps(total)

    def kernel(
        ids_ref: Ref,  # [BH, N]
        scores_ref: Ref,  # [BH, N]
        support_ref: Ref,  # [BH, K]
        kept_ref: Ref,  # [BH, K]
    ) -> None:
        row = pl.program_id(0)
        slots = load_slots(ids_ref, row, -1), load_slots(scores_ref, row, -float("inf"))
        pieces = [Listing(*piece) for piece in zip(*slots, strict=True)]
        to = Destination(support_ref, kept_ref, row)
        to.pad(write_picked(pieces, to, warps=warps).number)

    run = call(
        kernel,
        name="select",
        grid=(rows,),
        outputs=[
            jax.ShapeDtypeStruct((rows, budget), jnp.int32),
            jax.ShapeDtypeStruct((rows, budget), jnp.float32),
        ],
        warps=warps,
    )
    support, kept = run(ids.reshape(rows, total), scores.reshape(rows, total))
    return support.reshape(batch, heads, budget), kept.reshape(batch, heads, budget)
