"""Select as a Triton kernel: one program a head finds the K-th score and writes what reaches it."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.triton_lib import (
    Array,
    Ref,
    call,
    check,
    first_positions,
    load_at,
    order_key,
    pick,
    round_up,
    store_at,
    warps_for,
)


def pieces_of(total: int, tail: int) -> list[tuple[int, int]]:
    """Start and true size of the parts that a program holds: a tail of its own pads far less."""
    sizes = [(0, total - tail), (total - tail, tail)]
    return [(start, size) for start, size in sizes if size]


def pad_support(
    support_ref: Ref,  # [BH, K]
    scores_ref: Ref,  # [BH, K]
    row: Array,
    picked: Array,
) -> None:
    """Writes −1 and −inf from entry ``picked`` on."""
    budget = support_ref.shape[1]

    @pl.when(picked < budget)
    def _() -> None:
        k = lax.iota(jnp.int32, round_up(budget))
        empty = (k >= picked) & (k < budget)
        store_at(support_ref, jnp.full(k.shape, -1, jnp.int32), row, k, mask=empty)
        store_at(scores_ref, jnp.full(k.shape, -float("inf"), jnp.float32), row, k, mask=empty)


def write_picked(
    tokens: Sequence[Array],
    scores: Sequence[Array],
    support_ref: Ref,  # [BH, K]
    scores_ref: Ref,  # [BH, K]
    row: Array,
) -> None:
    """Writes the support of one head, chosen from ascending tokens with their scores."""
    budget = support_ref.shape[1]
    masks, picked = pick([order_key(s) for s in scores], budget)
    for mask, place, token, score in zip(
        masks, first_positions(masks), tokens, scores, strict=True
    ):
        store_at(support_ref, token, row, place, mask=mask)
        store_at(scores_ref, score, row, place, mask=mask)
    pad_support(support_ref, scores_ref, row, picked)


def select_slots(
    ids_ref: Ref,  # [BH, N]
    candidate_scores_ref: Ref,  # [BH, N]
    support_ref: Ref,  # [BH, K]
    scores_ref: Ref,  # [BH, K]
    row: Array,
    *,
    tail: int,
) -> Array:
    """Selects among the slots of one head; returns how many hold a token."""
    tokens, scores = [], []
    for start, size in pieces_of(ids_ref.shape[1], tail):
        lane = lax.iota(jnp.int32, round_up(size))
        inside = lane < size
        tokens.append(load_at(ids_ref, row, start + lane, mask=inside, other=-1))
        scores.append(
            load_at(candidate_scores_ref, row, start + lane, mask=inside, other=-float("inf"))
        )
    write_picked(tokens, scores, support_ref, scores_ref, row)
    unique = jnp.int32(0)
    for token in tokens:
        unique += jnp.sum(jnp.where(token >= 0, 1, 0))
    return unique


def select_warps(total: int) -> int:
    """Warps of a program that holds ``total`` slots."""
    return warps_for(total, each=8, least=4, most=16)


def select(ids: jax.Array, scores: jax.Array, *, budget: int) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.select.select`."""
    batch, heads, total = ids.shape
    whole = round_up(total)
    tail = 0 if whole == total else total - whole // 2
    check(whole <= 2**15 and round_up(tail) <= 2**14, "up to 32,768 candidate slots")
    rows = batch * heads

    def kernel(
        ids_ref: Ref,  # [BH, N]
        candidate_scores_ref: Ref,  # [BH, N]
        support_ref: Ref,  # [BH, K]
        scores_ref: Ref,  # [BH, K]
    ) -> None:
        row = pl.program_id(0)
        select_slots(ids_ref, candidate_scores_ref, support_ref, scores_ref, row, tail=tail)

    run = call(
        kernel,
        name="select",
        grid=(rows,),
        outputs=[
            jax.ShapeDtypeStruct((rows, budget), jnp.int32),
            jax.ShapeDtypeStruct((rows, budget), jnp.float32),
        ],
        warps=select_warps(total),
    )
    support, kept = run(ids.reshape(rows, total), scores.reshape(rows, total))
    return support.reshape(batch, heads, budget), kept.reshape(batch, heads, budget)
