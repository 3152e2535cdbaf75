"""Select as a Triton kernel: one program a head finds the K-th score and writes what reaches it."""

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
    order_key,
    pick,
    positions_of,
    round_up,
    store_at,
    warps_for,
)


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
    tokens: Array,
    scores: Array,
    support_ref: Ref,  # [BH, K]
    scores_ref: Ref,  # [BH, K]
    row: Array,
) -> None:
    """Writes the support of one head, chosen from ascending tokens."""
    mask, picked = pick(order_key(scores), support_ref.shape[1])
    place = positions_of(mask)
    store_at(support_ref, tokens, row, place, mask=mask)
    store_at(scores_ref, scores, row, place, mask=mask)
    pad_support(support_ref, scores_ref, row, picked)


def select_slots(
    ids_ref: Ref,  # [BH, N]
    candidate_scores_ref: Ref,  # [BH, N]
    support_ref: Ref,  # [BH, K]
    scores_ref: Ref,  # [BH, K]
    row: Array,
) -> Array:
    """Selects among the slots of one head; returns how many hold a token."""
    total = ids_ref.shape[1]
    lane = lax.iota(jnp.int32, round_up(total))
    tokens = load_at(ids_ref, row, lane, mask=lane < total, other=-1)
    scores = load_at(candidate_scores_ref, row, lane, mask=lane < total, other=-float("inf"))
    write_picked(tokens, scores, support_ref, scores_ref, row)
    return jnp.sum(jnp.where(tokens >= 0, 1, 0))


def select_warps(total: int) -> int:
    """Warps of a program that holds ``total`` slots."""
    return warps_for(total, each=8, least=4, most=16)


def select(ids: jax.Array, scores: jax.Array, *, budget: int) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.select.select`."""
    batch, heads, total = ids.shape
    check(round_up(total) < 2**15, "up to 16,384 candidate slots")
    rows = batch * heads

    def kernel(
        ids_ref: Ref,  # [BH, N]
        candidate_scores_ref: Ref,  # [BH, N]
        support_ref: Ref,  # [BH, K]
        scores_ref: Ref,  # [BH, K]
    ) -> None:
        row = pl.program_id(0)
        select_slots(ids_ref, candidate_scores_ref, support_ref, scores_ref, row)

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
