"""Device time of a step, measured so that neither dispatch nor the L2 cache flatters it."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


Advance = Callable[[Chain, Any, Any, jax.Array, int], tuple[Chain, Any]]
"""A step: takes the chain, what is fixed and what is carried of one layer, the number of the
layer's step so far (traced), and the number of the step in the body of the loop; returns the chain
and what is carried."""


@dataclass(frozen=True)
class StepLoop:
    """Steps of several layers in turn, each after the one before it, in one compiled loop.

    Attributes:
        run: compiled; takes what is fixed and what is carried, which it uses up.
        fixed: of the layers.
        carried: of the layers, before the first step.
        steps: of a call.
    """

    run: jax.stages.Compiled
    fixed: Sequence[Any]
    carried: Sequence[Any]
    steps: int

    @classmethod
    def compile(
        cls,
        step: Advance,
        fixed: Sequence[Any],
        carried: Sequence[Any],
        *,
        steps: int,
        rounds: int,
    ) -> "StepLoop":
        """Compiles the loop; nothing runs.

        Args:
            step: see `Advance`.
            fixed: of several layers, larger together than the L2 cache; steps take them in turn.
            carried: of the same layers.
            steps: in the body of the loop, a multiple of the number of layers.
            rounds: of the loop.
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

        run = jax.jit(loop, donate_argnums=1).lower(fixed, list(carried)).compile()
        return cls(run, fixed, carried, rounds * steps)

    def time(self, repeats: int = 7) -> tuple[float, list[Any]]:
        """Median device microseconds of a step, and what is carried at the end.

        Args:
            repeats: timed calls, after one that is not.
        """
        states = jax.tree.map(jnp.copy, list(self.carried))
        times = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            chain, states = self.run(self.fixed, states)
            jax.block_until_ready(chain)
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:]) / self.steps * 1e6, states


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
