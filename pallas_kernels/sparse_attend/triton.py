"""Sparse attend as a Triton kernel: programs split the dimensions, so nothing is combined after."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.select.triton import Listing, Shortlist, load_picked, slot_pieces
from pallas_kernels.triton_lib import Array, Ref, call, check, load_at, pick, round_up, store_at

_PROGRAMS = 256
"""Programs that select, and no more, which a GPU runs at once."""


def splits(rows: int, dim: int) -> int:
    """Programs a head, a power of two: enough to fill a GPU, each with at least 32 dimensions."""
    pieces = max(1, min(round_up(dim) // 32, _PROGRAMS // rows))
    return 1 << (pieces.bit_length() - 1)


def at_once(rows: int) -> bool:
    """Whether the kernel that selects attends, too: not where its programs take turns."""
    return rows <= _PROGRAMS


class Target(NamedTuple):
    """Part of one head's output: of its dimensions.

    Attributes:
        values: ref ``[BG, S, D]``.
        out: ref ``[BH, D]``, to write.
        row: of the head.
        split: of the program.
        pieces: programs of the head, each with a range of dimensions.
    """

    values: Ref
    out: Ref
    row: Array
    split: Array
    pieces: int

    @property
    def width(self) -> int:
        """Dimensions of a program."""
        return round_up(self.values.shape[2]) // self.pieces

    @property
    def dimensions(self) -> Array:
        """Of the program, int32 ``[width]``; some beyond D."""
        return self.split * self.width + lax.iota(jnp.int32, self.width)

    def load(self, token: Array) -> Array:
        """Values ``[n, width]`` of tokens, int32 ``[n]``; 0 for −1."""
        d, dim = self.dimensions, self.values.shape[2]
        return load_at(
            self.values,
            self.row // (self.out.shape[0] // self.values.shape[0]),
            jnp.maximum(token, 0)[:, None],
            d[None, :],
            mask=(token >= 0)[:, None] & (d < dim)[None, :],
            other=0.0,
        )

    def store(self, sums: Array, total: Array) -> None:
        """Writes weighted values ``[width]`` over their weights, 0 where there is none."""
        d = self.dimensions
        out = sums / jnp.where(total > 0.0, total, 1.0)
        store_at(self.out, out.astype(self.out.dtype), self.row, d, mask=d < self.values.shape[2])


def _block(budget: int, width: int) -> int:
    """Tokens whose values a program holds."""
    return min(round_up(budget), max(16, 16384 // width))


def _sums(values: Array, score: Array, best: Array) -> tuple[Array, Array]:
    weights = jnp.exp(score - best)
    return jnp.sum(values.astype(jnp.float32) * weights[:, None], axis=0), jnp.sum(weights)


def _finite(best: Array) -> Array:
    return jnp.where(best > -float("inf"), best, 0.0)


def attend(load: Callable[[Array], Listing], budget: int, target: Target) -> None:
    """Output of one head.

    Args:
        load: gives entries of the support; −1 and −inf beyond it.
        budget: K.
        target: what to write.
    """
    block = _block(budget, target.width)
    steps = -(-budget // block)

    def part(i: Array | int) -> Listing:
        return load(i * block + lax.iota(jnp.int32, block))

    if steps == 1:
        token, score = part(0)
        values = target.load(token)  # on its way while the maximum is found
        target.store(*_sums(values, score, _finite(jnp.max(score))))
        return
    best = lax.fori_loop(
        0,
        steps,
        lambda i, best: jnp.maximum(best, jnp.max(part(i).scores)),
        jnp.float32(-float("inf")),
    )
    best = _finite(best)

    def add(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        token, score = part(i)
        sums, total = _sums(target.load(token), score, best)
        return carry[0] + sums, carry[1] + total

    start = (jnp.zeros((target.width,), jnp.float32), jnp.float32(0.0))
    target.store(*lax.fori_loop(0, steps, add, start))


def spare_entries(budget: int, rows: int, dim: int) -> int:
    """Entries beyond K of a shortlist whose values a program of `attend_shortlist` holds.

    The K-th score takes many rounds of counting, of which the last few only tell apart so many.
    They are done while values are read. None where a program does not hold all values.
    """
    width = round_up(dim) // splits(rows, dim)
    return budget // 8 if at_once(rows) and _block(budget, width) >= budget else 0


def attend_shortlist(
    load: Callable[[Array], Listing],
    shortlist: Shortlist,
    budget: int,
    spare: int,
    target: Target,
    put: Callable[[Array, Array, Array], None],
    *,
    warps: int,
) -> None:
    """Support and output of one head.

    Args:
        load: gives entries of the shortlist; −1 and −inf beyond it.
        shortlist: the K best and up to ``spare`` more.
        budget: K.
        spare: of `spare_entries`.
        target: what to write of the output.
        put: writes the tokens at some places of the support, where a mask is set; called for what
            is the program's to write.
        warps: of the program.
    """
    size = round_up(-(-budget // target.pieces))
    mine = target.split * size

    if not spare:
        k = mine + lax.iota(jnp.int32, size)
        put(k, load(k).tokens, k < budget)
        attend(load, budget, target)
        return
    parts = [load(i + lax.iota(jnp.int32, n)) for i, n in slot_pieces(budget + spare)]
    values = [target.load(part.tokens) for part in parts]  # on their way during what follows
    scores = [part.scores for part in parts]
    picked = pick(scores, budget, warps=warps, bracket=shortlist.bracket)
    for part, place in zip(parts, picked.places, strict=True):
        put(place, part.tokens, (place >= mine) & (place < mine + size))
    k = mine + lax.iota(jnp.int32, size)

    @pl.when(picked.number < mine + size)
    def _() -> None:
        put(k, jnp.full(k.shape, -1, jnp.int32), (k >= picked.number) & (k < budget))

    kept = [
        jnp.where(place >= 0, score, -float("inf"))
        for score, place in zip(scores, picked.places, strict=True)
    ]
    best = jnp.float32(-float("inf"))
    for score in kept:
        best = jnp.maximum(best, jnp.max(score))
    best = _finite(best)
    sums, total = jnp.zeros((target.width,), jnp.float32), jnp.float32(0.0)
    for value, score in zip(values, kept, strict=True):
        more, weights = _sums(value, score, best)
        sums, total = sums + more, total + weights
    target.store(sums, total)


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

        load = partial(load_picked, support_ref, scores_ref, row, number=budget)
        attend(load, budget, Target(values_ref, out_ref, row, split, pieces))

    run = call(
        kernel,
        name="sparse_attend",
        grid=(rows, pieces),
        outputs=[jax.ShapeDtypeStruct((rows, dim), values.dtype)],
        warps=4,
    )
    (out,) = run(values, support, scores)
    return out
