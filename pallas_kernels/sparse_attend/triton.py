"""Sparse attend as a Triton kernel: programs split the dimensions, so nothing is combined after."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.select.triton import Listing, load_picked
from pallas_kernels.triton_lib import Array, Ref, call, check, load_at, round_up, store_at

_PROGRAMS = 256
"""Programs that select, and no more, which a GPU runs at once."""


def splits(rows: int, dim: int) -> int:
    """Programs a head, a power of two: enough to fill a GPU, each with at least 32 dimensions."""
    pieces = max(1, min(round_up(dim) // 32, _PROGRAMS // rows))
    return 1 << (pieces.bit_length() - 1)


def at_once(rows: int) -> bool:
    """Whether the kernel that selects attends, too: not where its programs take turns."""
    return rows <= _PROGRAMS


def attend(
    load: Callable[[Array], Listing],
    budget: int,
    values_ref: Ref,  # [BG, S, D]
    out_ref: Ref,  # [BH, D]
    row: Array,
    split: Array,
    *,
    pieces: int,
) -> None:
    """Output of one head in the ``split``-th of ``pieces`` ranges of dimensions.

    Args:
        load: gives entries of the support; −1 and −inf beyond it.
        budget: K.
        values_ref: values.
        out_ref: to write.
        row: of the head.
        split: of the program.
        pieces: programs of the head.
    """
    dim = values_ref.shape[2]
    width = round_up(dim) // pieces
    group = row // (out_ref.shape[0] // values_ref.shape[0])
    d = split * width + lax.iota(jnp.int32, width)
    block = min(round_up(budget), max(16, 16384 // width))
    steps = -(-budget // block)

    def part(i: Array | int) -> Listing:
        return load(i * block + lax.iota(jnp.int32, block))

    def load_values(token: Array) -> Array:
        return load_at(
            values_ref,
            group,
            jnp.maximum(token, 0)[:, None],
            d[None, :],
            mask=(token >= 0)[:, None] & (d < dim)[None, :],
            other=0.0,
        )

    def sums(values: Array, score: Array, best: Array) -> tuple[Array, Array]:
        weights = jnp.exp(score - best)
        return jnp.sum(values.astype(jnp.float32) * weights[:, None], axis=0), jnp.sum(weights)

    def finite(best: Array) -> Array:
        return jnp.where(best > -float("inf"), best, 0.0)

    if steps == 1:
        token, score = part(0)
        values = load_values(token)  # on its way while the maximum is found
        out, total = sums(values, score, finite(jnp.max(score)))
    else:
        best = lax.fori_loop(
            0,
            steps,
            lambda i, best: jnp.maximum(best, jnp.max(part(i).scores)),
            jnp.float32(-float("inf")),
        )
        best = finite(best)

        def add(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            token, score = part(i)
            out, total = sums(load_values(token), score, best)
            return carry[0] + out, carry[1] + total

        start = (jnp.zeros((width,), jnp.float32), jnp.float32(0.0))
        out, total = lax.fori_loop(0, steps, add, start)
    out /= jnp.where(total > 0.0, total, 1.0)
    store_at(out_ref, out.astype(out_ref.dtype), row, d, mask=d < dim)


def sparse_attend(values: jax.Array, support: jax.Array, scores: jax.Array) -> jax.Array:
    """See `pallas_kernels.sparse_attend.sparse_attend`."""
    batch, heads, budget = support.shape
    groups, stored, dim = values.shape[1:]
    out = attend_rows(
        values.reshape(batch * groups, stored, dim),
        support.reshape(batch * heads, budget),
        scores.reshape(batch * heads, budget),
    )
    return out.reshape(batch, heads, dim)


def attend_rows(values: jax.Array, support: jax.Array, scores: jax.Array) -> jax.Array:
    """Outputs ``[BH, D]`` of heads.

    Args:
        values: ``[BG, S, D]``.
        support: int32 ``[BH, K]``.
        scores: float32 ``[BH, K]``.
    """
    (rows, budget), dim = support.shape, values.shape[2]
    check(dim <= 256, "up to 256 dimensions")
    pieces = splits(rows, dim)

    def kernel(
        values_ref: Ref,  # [BG, S, D]
        support_ref: Ref,  # [BH, K]
        scores_ref: Ref,  # [BH, K]
        out_ref: Ref,  # [BH, D]
    ) -> None:
        row, split = pl.program_id(0), pl.program_id(1)

        load = partial(load_picked, support_ref, scores_ref, row)
        attend(load, budget, values_ref, out_ref, row, split, pieces=pieces)

    run = call(
        kernel,
        name="sparse_attend",
        grid=(rows, pieces),
        outputs=[jax.ShapeDtypeStruct((rows, dim), values.dtype)],
        warps=4,
    )
    (out,) = run(values, support, scores)
    return out


def part_of(budget: int, split: Array, pieces: int) -> Array:
    """Entries of a support that the ``split``-th of ``pieces`` programs writes; some beyond K."""
    size = round_up(-(-budget // pieces))
    return split * size + lax.iota(jnp.int32, size)
