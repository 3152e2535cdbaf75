"""What the Triton kernels share: the call itself, order-preserving keys, and exact selection.

Names ending in ``p`` (``Kp``, ``Dp``) are sizes rounded up to a power of two, the only ones that
Triton has; lanes beyond the true size are masked.
"""

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
NOTHING = -(2**31) + 0x7FFFFF
"""`order_key` of minus infinity; every finite score has a larger key."""
INFINITE = 0x7F800000
"""`order_key` of plus infinity."""

Array = jax.Array
Ref = Any
Count = Callable[[Array, Array], tuple[Array, Array]]
"""Numbers of keys that are at least each of two probes."""


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
    """Adds to an integer once all that the program has stored so far can be seen."""
    barrier()
    if interpreted():
        ref[indices] += amount
    else:
        plt.atomic_add(ref, indices, jnp.asarray(amount, jnp.int32))


def await_signals(ref: Ref, *indices: Any, least: Array | int, mask: Any = None) -> Array:
    """Integers once each is at least ``least``; only programs earlier in the grid may add to them.

    A GPU starts programs in their order, so that those are running or have ended.
    """
    shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in indices))
    at = ref.at[full_index(shape, *indices)]

    def load() -> Array:
        return plt.load(at, mask=mask, other=None if mask is None else LAST, volatile=True)

    return lax.while_loop(lambda seen: jnp.min(seen) < least, lambda _: load(), load())


def acquire(ref: Ref, *indices: Any) -> None:
    """Makes what other programs stored before they signalled visible to this one."""
    if not interpreted():
        plt.atomic_add(ref, indices, jnp.int32(0))
        barrier()


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


def largest_threshold(
    count: Count,
    low: Array,
    count_low: Array,
    high: Array,
    budget: int,
    spare: int = 0,
    count_high: Array | int = 0,
) -> tuple[Array, Array]:
    """A key t that at least ``budget`` and at most ``budget + spare`` keys reach, if there is one.

    If ties leave none, the largest t that at least ``budget`` reach. A round counts at two probes
    around where the budget should lie if scores were spread evenly between the bounds; every
    fourth round halves the bracket of keys instead, so that it always ends.

    Args:
        count: see `Count`.
        low: a key that at least ``budget`` keys reach, or that all reach.
        count_low: number of keys that reach ``low``.
        high: a key that none reaches, or fewer than ``budget``.
        budget: K.
        spare: how many more than K may reach t.
        count_high: number of keys that reach ``high``.

    Returns:
        t and the number of keys that reach it; below ``budget`` only if all keys together are.
    """

    def unfinished(carry: tuple[Array, ...]) -> Array:
        low, count_low, high, _, _ = carry
        return (count_low > budget + spare) & (low + 1 < high)

    def narrow(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        low, count_low, high, count_high, turn = carry
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        below, span = key_score(low), key_score(high) - key_score(low)
        inside = (count_low - count_high).astype(jnp.float32)
        share = ((count_low - budget).astype(jnp.float32) - (0.5 * spare - 0.5)) / inside
        margin = 0.5 * lax.rsqrt(inside)
        first = order_key(below + span * (share - margin))
        second = order_key(below + span * (share + margin))
        even = turn % 4 == 3
        first = jnp.clip(jnp.where(even, middle, first), low + 1, high - 1)
        second = jnp.maximum(jnp.clip(jnp.where(even, middle, second), low + 1, high - 1), first)
        count_first, count_second = count(first, second)
        up, between = count_second >= budget, count_first >= budget
        return (
            jnp.where(up, second, jnp.where(between, first, low)),
            jnp.where(up, count_second, jnp.where(between, count_first, count_low)),
            jnp.where(up, high, jnp.where(between, second, first)),
            jnp.where(up, count_high, jnp.where(between, count_second, count_first)),
            turn + 1,
        )

    carry = (low, count_low, high, jnp.asarray(count_high, jnp.int32), jnp.int32(0))
    low, count_low, _, _, _ = lax.while_loop(unfinished, narrow, carry)
    return low, count_low


def threshold_within(
    count: Count,
    low: Array,
    valid: Array,
    highest: Array,
    infinite: Array,
    budget: int,
    spare: int = 0,
) -> tuple[Array, Array]:
    """`largest_threshold` of keys of which some may be `INFINITE`: those have no place on a line.

    Args:
        count: see `largest_threshold`.
        low: the smallest key above `NOTHING`, or a key below it that is.
        valid: number of keys that reach ``low``.
        highest: the largest key below `INFINITE`.
        infinite: number of keys that are `INFINITE`.
        budget: K.
        spare: see `largest_threshold`.
    """
    enough = infinite >= budget
    return largest_threshold(
        count,
        jnp.where(enough, INFINITE, low),
        jnp.where(enough, infinite, valid),
        jnp.where(enough, INFINITE + 1, highest + 1),
        budget,
        spare,
        jnp.where(enough, 0, infinite),
    )


def count_pair(keys: Array, first: Array, second: Array) -> tuple[Array, Array]:
    """Numbers of keys at or above two probes, in one reduction (of fewer than 2**15 keys)."""
    hits = jnp.where(keys >= first, 1, 0) + jnp.where(keys >= second, 1 << 16, 0)
    packed = jnp.sum(hits)
    return packed & 0xFFFF, packed >> 16


def threshold_of(
    pieces: Sequence[Array], budget: int, spare: int = 0, *, finite: bool = False
) -> tuple[Array, Array]:
    """`largest_threshold` of the keys above `NOTHING` in all pieces (of fewer than 2**15 keys).

    Args:
        pieces: keys.
        budget: K.
        spare: see `largest_threshold`.
        finite: whether no key is `INFINITE`.
    """
    lowest, highest = jnp.int32(LAST), jnp.int32(NOTHING)
    valid, infinite = jnp.int32(0), jnp.int32(0)
    for keys in pieces:
        lowest = jnp.minimum(lowest, jnp.min(jnp.where(keys > NOTHING, keys, LAST)))
        bounded = keys if finite else jnp.where(keys < INFINITE, keys, NOTHING)
        highest = jnp.maximum(highest, jnp.max(bounded))
        hits = jnp.where(keys > NOTHING, 1, 0)
        if not finite:
            hits += jnp.where(keys == INFINITE, 1 << 16, 0)
        packed = jnp.sum(hits)
        valid, infinite = valid + (packed & 0xFFFF), infinite + (packed >> 16)

    def count(first: Array, second: Array) -> tuple[Array, Array]:
        one, two = jnp.int32(0), jnp.int32(0)
        for keys in pieces:
            here, there = count_pair(keys, first, second)
            one, two = one + here, two + there
        return one, two

    return threshold_within(count, lowest, valid, highest, infinite, budget, spare)


class Picked(NamedTuple):
    """The best of some keys.

    Attributes:
        places: by piece, the position of every picked key among the picked, else −1.
        number: how many.
    """

    places: list[Array]
    number: Array


def pick(pieces: Sequence[Array], budget: int, *, finite: bool = False) -> Picked:
    """Exact top-``budget`` of int32 keys, never `NOTHING`; ties to the earlier position.

    Args:
        pieces: keys ``[n]``, each piece after the one before it.
        budget: K.
        finite: whether no key is `INFINITE`.
    """
    threshold, reached = threshold_of(pieces, budget, finite=finite)

    def break_ties() -> list[Array]:
        room = jnp.int32(budget)
        for keys in pieces:
            room -= jnp.sum(jnp.where(keys > threshold, 1, 0))
        masks = []
        for keys in pieces:
            tied = jnp.where(keys == threshold, 1, 0)
            first = (tied > 0) & (jnp.cumsum(tied) <= room)
            masks.append(((keys > threshold) | first).astype(jnp.int32))
            room -= jnp.sum(tied)
        return masks

    masks = lax.cond(
        reached > budget,
        break_ties,
        lambda: [jnp.where(keys >= threshold, 1, 0) for keys in pieces],
    )
    number = jnp.minimum(reached, budget)
    places, start = [], jnp.int32(0)
    for i, mask in enumerate(masks):
        if 0 < i == len(masks) - 1:  # a short piece last: its own number is found sooner
            start = number - jnp.sum(mask)
        places.append(jnp.where(mask > 0, start + jnp.cumsum(mask) - 1, -1))
        if i < len(masks) - 2:
            start += jnp.sum(mask)
    return Picked(places, number)


def warps_for(elements: int, *, each: int, least: int = 1, most: int = 16) -> int:
    """Warps so that a thread holds about ``each`` of ``elements``, a power of two."""
    return min(most, max(least, round_up(-(-elements // (32 * each)))))


def check(condition: bool, what: str) -> None:
    """Raises NotImplementedError, on which `dispatch` tries the next implementation."""
    if not condition:
        raise NotImplementedError(f"the Triton kernels: {what}")
