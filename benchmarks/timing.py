"""Device time of a step, measured so that neither dispatch nor the L2 cache flatters it."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Chain = jax.Array
"""A float32 zero that each step must produce before the next may start."""


def after(chain: Chain, x: jax.Array) -> jax.Array:
    """``x``, not before the step that made ``chain`` has ended."""
    return x + chain.astype(x.dtype)


def chain_of(out: jax.Array) -> Chain:
    """A zero that exists once ``out`` does."""
    first = out.ravel()[0].astype(jnp.float32)
    return jnp.where(jnp.isfinite(first), first, 0.0) * 1e-38 * 1e-38


def step_microseconds(
    step: Callable[[Chain, Any, Any, jax.Array, int], tuple[Chain, Any]],
    fixed: Sequence[Any],
    carried: Sequence[Any],
    *,
    steps: int,
    rounds: int,
    repeats: int = 7,
) -> tuple[float, list[Any]]:
    """Median device time of one step in a chain inside one compiled loop.

    Args:
        step: takes the chain, what is fixed and what is carried of one layer, the number of the
            layer's step so far (traced), and the number of the step in the body of the loop;
            returns the chain and what is carried.
        fixed: of several layers, larger together than the L2 cache; steps take them in turn.
        carried: of the same layers; donated.
        steps: in the body of the loop, a multiple of the number of layers.
        rounds: of the loop.
        repeats: timed calls; the median is returned.

    Returns:
        Microseconds, and what is carried at the end.
    """
    layers = len(fixed)

    def loop(fixed: Sequence[Any], carried: list[Any]) -> tuple[Chain, list[Any]]:
        def body(turn: jax.Array, carry: tuple[Chain, list[Any]]) -> tuple[Chain, list[Any]]:
            chain, states = carry
            states = list(states)
            for i in range(steps):
                at, number = i % layers, turn * (steps // layers) + i // layers
                chain, states[at] = step(chain, fixed[at], states[at], number, i)
            return chain, states

        return lax.fori_loop(0, rounds, body, (jnp.float32(0.0), carried))

    run = jax.jit(loop, donate_argnums=1)
    chain, states = run(fixed, list(carried))
    jax.block_until_ready(chain)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        chain, states = run(fixed, states)
        jax.block_until_ready(chain)
        times.append(time.perf_counter() - start)
    return statistics.median(times) / (rounds * steps) * 1e6, states


def call_microseconds(run: Callable[..., Any], *args: Any, repeats: int = 5) -> float:
    """Median time of a call that takes so long that its dispatch does not matter."""
    jax.block_until_ready(run(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def copy_bytes_per_microsecond(gigabytes: float = 2.0) -> float:
    """Bandwidth of a device copy, counting what it reads and what it writes."""
    count = int(gigabytes * 1e9) // 4
    source = jnp.arange(count, dtype=jnp.int32)
    copy = jax.jit(lambda x: x + 1)
    jax.block_until_ready(copy(source))
    times = []
    for _ in range(9):
        start = time.perf_counter()
        jax.block_until_ready([copy(source) for _ in range(4)])
        times.append((time.perf_counter() - start) / 4)
    return 2 * 4 * count / statistics.median(times) / 1e6
