"""Ahead-of-time compilation with its time kept apart from the time of running."""

import time
from collections.abc import Hashable
from typing import Any

import jax
from jax.stages import Compiled

_COMPILED: dict[Hashable, Compiled] = {}


def _signature(leaf: Any) -> Hashable:
    if isinstance(leaf, jax.Array):
        return jax.typeof(leaf), leaf.sharding
    return type(leaf)


def program(function: Any, *args: Any, **static: Hashable) -> tuple[Compiled, float]:
    """Compiles a jitted function for these arguments, once per shapes, dtypes and shardings.

    Args:
        function: what `jax.jit` returned; its static arguments are keyword arguments.
        *args: the arguments it will be called with.
        **static: its static arguments.

    Returns:
        A callable of ``*args`` alone, and the seconds spent compiling (0 if it was compiled).
    """
    leaves, tree = jax.tree.flatten(args)
    key = (
        function,
        tree,
        tuple(_signature(leaf) for leaf in leaves),
        tuple(sorted(static.items(), key=lambda item: item[0])),
    )
    if key in _COMPILED:
        return _COMPILED[key], 0.0
    began = time.perf_counter()
    _COMPILED[key] = function.lower(*args, **static).compile()
    return _COMPILED[key], time.perf_counter() - began
