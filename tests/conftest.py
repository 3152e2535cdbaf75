"""Strict JAX: no silent dtype promotion, no rank promotion, one thread of surprises less."""

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="module")
def forget_compiled() -> Iterator[None]:
    """Unmaps programs that no test needs any more: Linux maps 65,530 regions a process, and XLA
    crashes where it gets none."""
    yield
    jax.clear_caches()
