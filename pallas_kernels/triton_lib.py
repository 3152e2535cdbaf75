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
    count: Callable[[Array, Array], tuple[Array, Array]],
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
        count: numbers of keys that are at least each of two probes.
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
    count: Callable[[Array, Array], tuple[Array, Array]],
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


class Picked(NamedTuple):
    """The best of some keys.

    Attributes:
        mask: which keys.
        number: how many.
    """

    mask: Array
    number: Array


def threshold_of(keys: Array, budget: int, spare: int = 0) -> tuple[Array, Array]:
    """`largest_threshold` of the keys above `NOTHING` (of fewer than 2**15 keys)."""
    lowest = jnp.min(jnp.where(keys > NOTHING, keys, LAST))
    highest = jnp.max(jnp.where(keys < INFINITE, keys, NOTHING))
    valid, infinite = count_pair(keys, jnp.int32(NOTHING + 1), jnp.int32(INFINITE))
    return threshold_within(
        lambda first, second: count_pair(keys, first, second),
        lowest,
        valid,
        highest,
        infinite,
        budget,
        spare,
    )


def pick(keys: Array, budget: int) -> Picked:
    """Exact top-``budget`` of int32 keys ``[n]``, never `NOTHING`; ties to the earlier position."""
    threshold, reached = threshold_of(keys, budget)

    def break_ties() -> Array:
        above = jnp.sum(jnp.where(keys > threshold, 1, 0))
        tied = jnp.where(keys == threshold, 1, 0)
        return (keys > threshold) | ((tied > 0) & (above + jnp.cumsum(tied) <= budget))

    mask = lax.cond(reached > budget, break_ties, lambda: keys >= threshold)
    return Picked(mask, jnp.minimum(reached, budget))


def positions_of(mask: Array) -> Array:
    """Position of every set lane among the set lanes."""
    return jnp.cumsum(jnp.where(mask, 1, 0)) - 1


def warps_for(elements: int, *, each: int, least: int = 1, most: int = 16) -> int:
    """Warps so that a thread holds about ``each`` of ``elements``, a power of two."""
    return min(most, max(least, round_up(-(-elements // (32 * each)))))


def check(condition: bool, what: str) -> None:
    """Raises NotImplementedError, on which `dispatch` tries the next implementation."""
    if not condition:
        raise NotImplementedError(f"the Triton kernels: {what}")
