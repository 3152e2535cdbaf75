"""Select as a Triton kernel: one program a head finds the K-th score and writes what reaches it."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.triton_lib import (
    Array,
    Ref,
    call,
    check,
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
    """Where a program writes the support of its head.

    Attributes:
        support: int32 ``[BH, K]``.
        scores: float32 ``[BH, K]``.
        row: of the head.
        supports: int32 ``[BH, C, K]``, a ring that also takes the support, or None.
        slot: of the ring.
    """

    support: Ref
    scores: Ref
    row: Array
    supports: Ref | None = None
    slot: Array | None = None

    @property
    def budget(self) -> int:
        """K."""
        return self.support.shape[1]

    def put(self, k: Array, tokens: Array, scores: Array, mask: Array) -> None:
        """Writes entries ``k`` where ``mask`` is set."""
        store_at(self.support, tokens, self.row, k, mask=mask)
        store_at(self.scores, scores, self.row, k, mask=mask)
        if self.supports is not None:
            store_at(self.supports, tokens, self.row, self.slot, k, mask=mask)

    def pad(self, start: Array) -> None:
        """Writes −1 and −inf from entry ``start`` on."""

        @pl.when(start < self.budget)
        def _() -> None:
            k = lax.iota(jnp.int32, round_up(self.budget))
            empty = (k >= start) & (k < self.budget)
            tokens = jnp.full(k.shape, -1, jnp.int32)
            self.put(k, tokens, jnp.full(k.shape, -float("inf"), jnp.float32), empty)


def write_picked(pieces: Sequence[Listing], to: Destination, *, warps: int) -> None:
    """Writes the support of one head.

    Args:
        pieces: each with higher tokens than the one before it.
        to: where.
        warps: of the program.
    """
    picked = pick([piece.scores for piece in pieces], to.budget, warps=warps)
    for piece, place in zip(pieces, picked.places, strict=True):
        to.put(place, piece.tokens, piece.scores, place >= 0)
    to.pad(picked.number)


def load_slots(ids_ref: Ref, candidate_scores_ref: Ref, row: Array) -> list[Listing]:
    """The slots of one head, in two pieces if so fewer lanes stay empty.

    Args:
        ids_ref: int32 ``[BH, N]``.
        candidate_scores_ref: float32 ``[BH, N]``.
        row: of the head.
    """
    total = ids_ref.shape[1]
    whole = round_up(total)
    most = whole if whole == total else whole // 2
    rest = max(64, round_up(total - most)) if total > most else 0
    pieces, start = [], 0
    for size in (whole,) if most + rest >= whole else (most, rest):
        slot = start + lax.iota(jnp.int32, size)
        mask = None if start + size <= total else slot < total
        pieces.append(
            Listing(
                load_at(ids_ref, row, slot, mask=mask, other=None if mask is None else -1),
                load_at(
                    candidate_scores_ref,
                    row,
                    slot,
                    mask=mask,
                    other=None if mask is None else -float("inf"),
                ),
            )
        )
        start += size
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
        candidate_scores_ref: Ref,  # [BH, N]
        support_ref: Ref,  # [BH, K]
        scores_ref: Ref,  # [BH, K]
    ) -> None:
        row = pl.program_id(0)
        pieces = load_slots(ids_ref, candidate_scores_ref, row)
        write_picked(pieces, Destination(support_ref, scores_ref, row), warps=warps)

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
