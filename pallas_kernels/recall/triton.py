"""Recall as a Triton kernel: one program a head, the whole ring at once."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.recall.types import Recalled
from pallas_kernels.triton_lib import (
    Array,
    Ref,
    call,
    check,
    load_at,
    round_up,
    store_at,
    warps_for,
)


class RingMatch(NamedTuple):
    """How a query compares with its ring.

    Attributes:
        qbar: float32 ``[Dp]``, the query, normalised.
        rho: float32 ``[Cp]``, similarities; −inf where there is nothing to compare with.
        age: int32 ``[Cp]``, pushes since that of a slot.
        rho_max: float32, the largest similarity.
    """

    qbar: Array
    rho: Array
    age: Array
    rho_max: Array


def match_ring(
    q_ref: Ref,  # [BH, D]
    queries_ref: Ref,  # [BH, C, D]
    row: Array,
    pushed: Array,
) -> RingMatch:
    """Compares the query of one head with its ring."""
    _, capacity, dim = queries_ref.shape
    d = lax.iota(jnp.int32, round_up(dim))
    c = lax.iota(jnp.int32, round_up(capacity))
    q = load_at(q_ref, row, d, mask=d < dim, other=0.0).astype(jnp.float32)
    norm = jnp.sqrt(jnp.sum(q * q))
    usable = (norm > 0.0) & (norm < float("inf"))
    divisor = jnp.where(usable, norm, 1.0)
    qbar = jnp.where(usable, q / divisor, 0.0)
    width = min(round_up(dim), max(16, 16384 // round_up(capacity)))
    rho = jnp.zeros(c.shape, jnp.float32)
    for start in range(0, dim, width):
        d = start + lax.iota(jnp.int32, width)
        part = load_at(q_ref, row, d, mask=d < dim, other=0.0).astype(jnp.float32) / divisor
        ring = load_at(
            queries_ref,
            row,
            c[:, None],
            d[None, :],
            mask=(c < capacity)[:, None] & (d < dim)[None, :],
            other=0.0,
        )
        rho += jnp.sum(ring.astype(jnp.float32) * part[None, :], axis=1)
    rho = jnp.minimum(jnp.maximum(rho, -1.0), 1.0)  # rounding may carry a cosine beyond
    newest = (pushed + capacity - 1) % capacity
    age = newest - c
    age = jnp.where(age < 0, age + capacity, age)
    known = (c < capacity) & (age < pushed) & usable
    rho = jnp.where(known, rho, -float("inf"))
    return RingMatch(qbar, rho, age, jnp.max(rho))


def most_similar(match: RingMatch, entries: int) -> list[Array]:
    """The R slots of a ring most similar to a query, in that order; −1 where there is none."""
    rho, age = match.rho, match.age
    slot = lax.iota(jnp.int32, rho.shape[0])
    before = (rho[None, :] > rho[:, None]) | (
        (rho[None, :] == rho[:, None]) & (age[None, :] < age[:, None])
    )
    rank = jnp.sum(jnp.where(before, 1, 0), axis=1)
    slots = []
    for first in range(0, entries, 4):  # four slots a number: at most 128, and 0 for none
        place = rank - first
        here = (rho > -float("inf")) & (place >= 0) & (place < 4)
        packed = jnp.sum(jnp.where(here, (slot + 1) << (8 * jnp.where(here, place, 0)), 0))
        for i in range(min(4, entries - first)):
            slots.append(((packed >> (8 * i)) & 0xFF) - 1)
    return slots


def ring_warps(capacity: int, dim: int) -> int:
    """Warps of a program that holds a ring."""
    return warps_for(round_up(capacity) * round_up(dim), each=64, most=8)


def recall(q: jax.Array, queries: jax.Array, pushed: jax.Array, *, entries: int) -> Recalled:
    """See `pallas_kernels.recall.recall`."""
    batch, heads, capacity, dim = queries.shape
    check(capacity <= 128 and dim <= 256, "rings of up to 128 entries of up to 256 dimensions")
    rows = batch * heads

    def kernel(
        q_ref: Ref,  # [BH, D]
        queries_ref: Ref,  # [BH, C, D]
        pushed_ref: Ref,  # [B]
        qbar_ref: Ref,  # [BH, D]
        slots_ref: Ref,  # [BH, R]
        rho_ref: Ref,  # [BH]
    ) -> None:
        row = pl.program_id(0)
        found = match_ring(q_ref, queries_ref, row, pushed_ref[row // heads])
        d = lax.iota(jnp.int32, round_up(dim))
        store_at(qbar_ref, found.qbar, row, d, mask=d < dim)
        for r, slot in enumerate(most_similar(found, entries)):
            slots_ref[row, r] = slot
        rho_ref[row] = found.rho_max

    run = call(
        kernel,
        name="recall",
        grid=(rows,),
        outputs=[
            jax.ShapeDtypeStruct((rows, dim), jnp.float32),
            jax.ShapeDtypeStruct((rows, entries), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ],
        warps=ring_warps(capacity, dim),
    )
    qbar, slots, rho_max = run(q.reshape(rows, dim), queries.reshape(rows, capacity, dim), pushed)
    return Recalled(
        qbar.reshape(batch, heads, dim),
        slots.reshape(batch, heads, entries),
        rho_max.reshape(batch, heads),
    )
