"""What the Triton kernels share: the call itself, order-preserving keys, and exact selection.

Names ending in ``p`` (``Kp``, ``Dp``) are sizes rounded up to a power of two, the only ones that
Triton has; lanes beyond the true size are masked.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.dispatch import platform

warnings.filterwarnings(
    "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning
)

LAST = 2**31 - 1
"""Sorts after every token."""
LOWEST = float(jnp.finfo(jnp.float32).min)
"""Every score but minus infinity is at least that."""

Array = jax.Array
Ref = Any
Count = Callable[[Array], Array]
"""Numbers of scores that are at least each of some probes, both float32 ``[P]``."""


def round_up(n: int) -> int:
    """The smallest power of two that is at least ``n`` and 1."""
    return pl.next_power_of_2(max(n, 1))


def interpreted() -> bool:
    """Whether kernels run in interpret mode: everywhere but on a GPU."""
    return platform() != "gpu"


def barrier() -> None:
    """Makes a program's stores visible to all its threads."""
    if not interpreted():
        plt.debug_barrier()


def call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: tuple[int, ...],
    outputs: Sequence[jax.ShapeDtypeStruct],
    warps: int,
    stages: int = 1,
    aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """A Triton kernel over whole-array refs: programs index what they need.

    Args:
        kernel: takes one ref per input, then one per output.
        name: shown by profilers.
        grid: programs, at most three axes.
        outputs: shapes of the outputs; scratch that outlives a program is an output, too.
        warps: of a program, 32 threads each.
        stages: of software pipelining in loops that load and multiply.
        aliases: input position to the output position that shares its memory.
    """
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=list(outputs),
        input_output_aliases=dict(aliases or {}),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpreted(),
        name=name,
    )


def full_index(shape: tuple[int, ...], *indices: Any) -> tuple[Array, ...]:
    """Integer index arrays of one ``shape``; interpret mode needs every dimension as an array."""
    return tuple(jnp.broadcast_to(jnp.asarray(i, jnp.int32), shape) for i in indices)


def load_at(ref: Ref, *indices: Any, mask: Any = None, other: Any = None) -> Array:
    """Loads elements at broadcast integer indices; unloaded lanes give ``other``."""
    shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in indices))
    if not shape:
        return plt.load(ref.at[indices])
    if mask is not None:
        mask = jnp.broadcast_to(mask, shape)
    return plt.load(ref.at[full_index(shape, *indices)], mask=mask, other=other)


def store_at(ref: Ref, value: Array, *indices: Any, mask: Any = None) -> None:
    """Stores elements at broadcast integer indices, where ``mask`` is set."""
    shape = jnp.shape(value)
    if mask is not None:
        mask = jnp.broadcast_to(mask, shape)
        if interpreted():  # which writes old values back at the lanes that the mask leaves out
            indices = (*indices[:-1], jnp.where(mask, indices[-1], LAST))
    plt.store(ref.at[full_index(shape, *indices)], value, mask=mask)


def divide(number: Array, by: int) -> tuple[Array, Array]:
    """Quotient and remainder of a number that is not negative."""
    return lax.div(number, jnp.int32(by)), lax.rem(number, jnp.int32(by))


def signal(ref: Ref, *indices: Any, amount: Array | int = 1) -> None:
    """Adds to an integer once all that the program has stored so far can be seen.

    To one only: Pallas lowers the addition to an array of integers as one of float32.
    """
    assert not any(jnp.shape(index) for index in indices), indices
    barrier()
    if interpreted():
        ref[indices] += amount
    else:
        plt.atomic_add(ref, indices, jnp.asarray(amount, jnp.int32))


def bits(words: Array) -> Array:
    """How many bits of some integers are set, all together."""
    return jnp.sum(lax.population_count(words))


def await_signals(
    ref: Ref,
    *indices: Any,
    least: Array | int,
    mask: Any = None,
    measure: Callable[[Array], Array] = jnp.min,
) -> Array:
    """Integers once they measure ``least``; only programs earlier in the grid may add to them.

    A GPU starts programs in their order, so that those are running or have ended. At most as many
    integers as a warp has threads: every warp then sees them all for itself, while of more, some
    could be seen by one warp before and by another after a signal.
    """
    shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in indices))
    assert math.prod(shape) <= 32, shape
    at = ref.at[full_index(shape, *indices)]

    def load() -> Array:
        return plt.load(at, mask=mask, other=None if mask is None else LAST, volatile=True)

    return lax.while_loop(lambda seen: measure(seen) < least, lambda _: load(), load())


def acquire(seen: Array) -> Array:
    """What `await_signals` returned, once what was stored before those signals is visible.

    Only what depends on the result comes after, such as a branch on it.
    """
    if interpreted():
        return seen
    (seen,) = plt.elementwise_inline_asm(
        "fence.acq_rel.gpu; mov.b32 $0, $1;",
        args=[seen],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(seen.shape, seen.dtype)],
    )
    barrier()
    return seen


def order_key(scores: Array) -> Array:
    """Int32 keys in the order of float32 scores (no NaN, no negative zero)."""
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def key_score(key: Array) -> Array:
    """Inverse of `order_key`."""
    return lax.bitcast_convert_type(jnp.where(key < 0, key ^ 0x7FFFFFFF, key), jnp.float32)


def finite_scores(dots: Array, scale: float, valid: Array) -> Array:
    """Scaled scores as `pallas_kernels.numerics.clean_scores` makes them."""
    scores = dots * scale
    finite = valid & (jnp.abs(scores) < float("inf"))
    return jnp.where(finite, jnp.where(scores == 0.0, 0.0, scores), -float("inf"))


def probes_for(scores: int, warps: int) -> int:
    """Probes that a round of `narrow` counts at: a thread then holds 32 scores.

    Args:
        scores: of a program, a power of two.
        warps: of the program.
    """
    return max(2, min(8, 32 * 32 * warps // scores))


def _lanes(pieces: Sequence[Array], probes: int, warps: int) -> int:
    return min(32 * warps // probes, *(scores.shape[0] for scores in pieces))


def _spread(scores: Array, lanes: int) -> Array:
    """Scores ``[n]`` as ``[sums, each, lanes, 1]``: a thread has some of every sum."""
    each = scores.shape[0] // lanes
    sums = min(4, each)
    return scores.reshape(sums, each // sums, lanes)[..., None]


def count_reaching(pieces: Sequence[Array], probes: Array, *, warps: int) -> Array:
    """Numbers float32 of scores at or above each probe, in one exchange between threads.

    A thread adds up what it holds of all pieces first, in sums that do not wait for each other:
    there are as many lanes and probes as threads.

    Args:
        pieces: float32 ``[n]`` each, fewer than 2**24 together: float32 counts them, which takes a
            GPU one instruction less than int32.
        probes: float32 ``[P]``.
        warps: of the program.
    """
    lanes = _lanes(pieces, probes.shape[0], warps)
    hits = jnp.zeros((lanes, probes.shape[0]), jnp.float32)
    for scores in pieces:
        reach = _spread(scores, lanes) >= probes[None, None, None]
        hits += jnp.sum(jnp.sum(jnp.where(reach, 1.0, 0.0), axis=1), axis=0)
    return jnp.sum(hits, axis=0)


def extent(pieces: Sequence[Array], probes: int, *, warps: int) -> tuple[Array, Array]:
    """The lowest score above minus infinity and the highest, in one exchange between threads.

    Threads hold the scores as `count_reaching` has them, so that they are laid out once.

    Args:
        pieces: float32 ``[n]`` each.
        probes: of `count_reaching`.
        warps: of the program.
    """
    side = lax.iota(jnp.int32, probes) & 1
    lanes = _lanes(pieces, probes, warps)
    ends = jnp.full((lanes, probes), -float("inf"), jnp.float32)
    for scores in pieces:
        score = _spread(scores, lanes)
        negated = jnp.where(score > -float("inf"), -score, -float("inf"))
        ends = jnp.maximum(ends, jnp.max(jnp.where(side == 0, score, negated), axis=(0, 1)))
    ends = jnp.max(ends, axis=0)
    highest, negated = (jnp.max(jnp.where(side == i, ends, -float("inf"))) for i in range(2))
    return -negated, highest


def constant(value: int | float) -> Array:
    """An int32 or float32 that a branch of `lax.cond` can return, which a literal cannot be."""
    literal = jnp.int32(value) if isinstance(value, int) else jnp.float32(value)
    return lax.add(literal, jnp.zeros_like(literal))


class Bracket(NamedTuple):
    """Between which scores the K-th is, as a search has found so far.

    Attributes:
        low: int32, `order_key` of a score that ``reached`` reach, K at least if there are so many.
        reached: float32, how many.
        high: int32, `order_key` of a score that fewer than K reach.
        turn: int32, rounds so far.
    """

    low: Array
    reached: Array
    high: Array
    turn: Array

    @classmethod
    def of(cls, lowest: Array, highest: Array) -> "Bracket":
        """Before the first round.

        Args:
            lowest: float32, the lowest of the scores.
            highest: float32, the highest.
        """
        low = order_key(lowest)
        high = jnp.maximum(order_key(highest), low) + 1  # lower where there is no score
        return cls(low, jnp.float32(float("inf")), high, jnp.int32(0))

    @classmethod
    def empty(cls) -> "Bracket":
        """Of no scores, narrowed."""
        return cls(constant(0), constant(0.0), constant(1), constant(1))

    @property
    def threshold(self) -> Array:
        """Score that `number` reach."""
        return key_score(self.low)

    @property
    def number(self) -> Array:
        """Scores that reach the threshold; below K only if all together are."""
        return self.reached.astype(jnp.int32)


def narrow(count: Count, bracket: Bracket, budget: int, spare: int, probes: int) -> Bracket:
    """Narrows a bracket until at most ``budget + spare`` scores reach its lower end.

    If ties leave no such score, until the lower end is the K-th score. A round counts at probes
    that divide the bracket evenly, the first of the first round its lower end, or in every fourth
    round evenly by `order_key`, so that it ends whatever the scores.

    Args:
        count: see `Count`.
        bracket: to start from.
        budget: K.
        spare: how many more than K may reach the lower end.
        probes: of a round, a power of two.
    """
    part, infinity = lax.iota(jnp.int32, probes), jnp.float32(float("inf"))
    halvings = probes.bit_length() - 1

    def unfinished(b: Bracket) -> Array:
        return (b.turn == 0) | ((b.reached > budget + spare) & (b.low + 1 < b.high))

    def by_score(low: Array, high: Array, part: Array) -> tuple[Array, Array]:
        below, above = key_score(low), key_score(jnp.minimum(high, order_key(infinity)))
        step = (above - below) * (1.0 / (probes + 1))
        probe = jnp.where(part == 0, below, below + step * part.astype(jnp.float32))
        return probe, jnp.clip(order_key(probe), low, high)  # rounding may carry it beyond

    def by_key(low: Array, high: Array) -> tuple[Array, Array]:
        key = low + ((high >> halvings) - (low >> halvings)) * (part + 1)
        key = jnp.clip(key, low + 1, high - 1)
        return key_score(key), key

    def turn(b: Bracket) -> Bracket:
        mine = part + (b.turn > 0).astype(jnp.int32)
        probe, key = lax.cond(
            b.turn % 4 == 3, lambda: by_key(b.low, b.high), lambda: by_score(b.low, b.high, mine)
        )
        counts = count(probe)
        enough = counts >= budget
        known = jnp.where(enough | (mine == 0), counts, infinity)
        return Bracket(
            jnp.max(jnp.where(enough, key, b.low)),
            jnp.minimum(b.reached, jnp.min(known)),
            jnp.min(jnp.where(enough, b.high, key)),
            b.turn + 1,
        )

    return lax.while_loop(unfinished, turn, bracket)


def narrow_among(
    pieces: Sequence[Array],
    budget: int,
    *,
    warps: int,
    spare: int = 0,
    bracket: Bracket | None = None,
) -> Bracket:
    """`narrow` for the scores above minus infinity of all pieces.

    Args:
        pieces: float32 ``[n]`` each.
        budget: K.
        warps: of the program.
        spare: see `narrow`.
        bracket: to start from, where it is known.
    """
    probes = probes_for(max(scores.shape[0] for scores in pieces), warps)
    if bracket is None:
        bracket = Bracket.of(*extent(pieces, probes, warps=warps))

    def count(probes: Array) -> Array:
        return count_reaching(pieces, probes, warps=warps)

    return narrow(count, bracket, budget, spare, probes)


class Picked(NamedTuple):
    """The best of some scores.

    Attributes:
        places: by piece, the position of every picked score among the picked, else −1.
        number: how many.
        bracket: of the K-th score.
    """

    places: list[Array]
    number: Array
    bracket: Bracket


def pick(
    pieces: Sequence[Array],
    budget: int,
    *,
    warps: int,
    spare: int = 0,
    bracket: Bracket | None = None,
) -> Picked:
    """Exact top-``budget`` of scores, never minus infinity; ties to the earlier position.

    Args:
        pieces: float32 ``[n]``, each piece after the one before it; no NaN, no negative zero.
        budget: K.
        warps: of the program.
        spare: so many more may be picked, the next best, which is found the sooner.
        bracket: to start from, where it is known; all scores are at least its threshold.
    """
    bracket = narrow_among(pieces, budget, warps=warps, spare=spare, bracket=bracket)
    threshold = bracket.threshold

    def break_ties() -> list[Array]:
        room = jnp.int32(budget)
        for scores in pieces:
            room -= jnp.sum(jnp.where(scores > threshold, 1, 0))
        masks = []
        for scores in pieces:
            tied = jnp.where(scores == threshold, 1, 0)
            first = (tied > 0) & (jnp.cumsum(tied) <= room)
            masks.append(((scores > threshold) | first).astype(jnp.int32))
            room -= jnp.sum(tied)
        return masks

    tied = bracket.number > budget + spare
    masks = lax.cond(
        tied,
        break_ties,
        lambda: [jnp.where(scores >= threshold, 1, 0) for scores in pieces],
    )
    number = jnp.where(tied, budget, bracket.number)
    places, start = [], jnp.int32(0)
    for i, mask in enumerate(masks):
        if 0 < i == len(masks) - 1:  # a short piece last: its own number is found sooner
            start = number - jnp.sum(mask)
        places.append(jnp.where(mask > 0, start + jnp.cumsum(mask) - 1, -1))
        if i < len(masks) - 2:
            start += jnp.sum(mask)
    return Picked(places, number, bracket)


def warps_for(elements: int, *, each: int, least: int = 1, most: int = 16) -> int:
    """Warps so that a thread holds about ``each`` of ``elements``, a power of two."""
    return min(most, max(least, round_up(-(-elements // (32 * each)))))


def check(condition: bool, what: str) -> None:
    """Raises NotImplementedError, on which `dispatch` tries the next implementation."""
    if not condition:
        raise NotImplementedError(f"the Triton kernels: {what}")
