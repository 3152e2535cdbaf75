"""The Triton kernels lower for a GPU at any sizes, or say that they do not: no GPU is needed.

Interpret mode knows no sizes that Triton does not have.
"""

import functools
import importlib
import random

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from tests.pallas_kernels import test_aot

SIZES = {
    "B": (1, 1, 2, 3, 4, 5, 8, 9, 16, 64),
    "D": (16, 64, 72, 80, 96, 128, 256),
    "K": (1, 2, 7, 64, 100, 128, 500, 512, 1000, 2048),
    "C": (1, 5, 32, 128),
    "R": (1, 2, 3, 4, 16),
    "W": (0, 1, 32, 100),
    "S": (1, 15, 64, 1000, 16384, 131072),
}
HEADS = ((28, 4), (9, 3), (14, 2), (40, 8), (32, 8), (12, 12), (8, 1), (64, 8), (5, 1), (24, 1))
OPS = (
    *("recall", "candidates", "select", "top_k", "support_scores", "sparse_attend"),
    *("exact_support", "exact_attention", "full_attention", "prefill_supports", "retopk_step"),
)


def lower(op: str) -> None:
    shapes, kwargs = test_aot._arguments(op)
    function = getattr(importlib.import_module(f"pallas_kernels.{op}"), op)
    call = jax.jit(functools.partial(function, implementation="triton", **kwargs))
    gpu = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), axis_types=(), abstract_device=gpu)):
        call.trace(*shapes).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("op", OPS)
def test_any_sizes_lower(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(op)
    lowered = 0
    for _ in range(24 if op == "retopk_step" else 6):
        sizes = {name: rng.choice(choices) for name, choices in SIZES.items()}
        sizes["H"], sizes["G"] = rng.choice(HEADS)
        sizes["R"] = min(sizes["R"], sizes["C"])
        for name, value in sizes.items():
            monkeypatch.setattr(test_aot, name, value)
        try:
            lower(op)
        except NotImplementedError:
            continue
        except Exception as error:
            raise AssertionError(f"{op} at {sizes}") from error
        lowered += 1
    assert lowered >= 4


@pytest.mark.parametrize("op", ["retopk_step", "exact_attention", "sparse_attend"])
@pytest.mark.parametrize("heads", [(3, 28, 4, 128), (1, 40, 8, 256), (9, 9, 3, 64)])
def test_heads_that_do_not_divide_a_gpu_lower(
    op: str, heads: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip("BHGD", heads, strict=True):
        monkeypatch.setattr(test_aot, name, value)
    monkeypatch.setattr(test_aot, "S", 1000)
    lower(op)
