"""The TPU kernels beside the plain XLA forms, on the arguments of the GPU kernels.

They run in interpret mode here. `test_mosaic_tpu_aot` compiles them for real chips.
"""

import functools
import importlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import specs
from pallas_kernels.exact_support import exact_support
from pallas_kernels.packed import PackedRows, pack, rows_of, slots_between
from pallas_kernels.support_scores import support_scores
from pallas_kernels.top_k import top_k
from tests.pallas_kernels.test_ops import CASES, assert_same

_OF_OTHER_SIZES = (
    "window_covers_all",
    "no_window",
    "one_group_odd_sizes",
    "one_head_each",
    "five_heads_each",
    "seven_heads_each",
    "eight_heads_each",
)  # compiled alone
TPU_CASES = [
    pytest.param(
        op,
        name,
        id=f"{op}-{name}",
        marks=[pytest.mark.long] if name in _OF_OTHER_SIZES else [],
    )
    for op, name in CASES
    if op != "full_attention" and name != "float16"
]


@functools.cache
def compiled(op: str, implementation: str, kwargs: tuple[tuple[str, Any], ...]):
    function = getattr(importlib.import_module(f"pallas_kernels.{op}"), op)
    return jax.jit(functools.partial(function, implementation=implementation, **dict(kwargs)))


def run(spec: specs.Spec, implementation: str):
    return compiled(spec.op, implementation, tuple(spec.kwargs.items()))(*spec.args)


def packed(spec: specs.Spec) -> specs.Spec:
    """The same arguments with keys and values in a packed cache."""
    function = getattr(importlib.import_module(f"pallas_kernels.{spec.op}"), spec.op)
    arguments = inspect.signature(function).bind(*spec.args, **spec.kwargs).arguments
    some = arguments.get("keys", arguments.get("values"))
    if some is None:
        return spec
    both = pack(*(arguments.get(name, jnp.full_like(some, 7.0)) for name in ("keys", "values")))
    views: dict[str, Any] = dict(zip(("keys", "values"), rows_of(both, some.shape[3]), strict=True))
    names = list(inspect.signature(function).parameters)
    args = tuple(views.get(names[i], argument) for i, argument in enumerate(spec.args))
    return specs.Spec(spec.op, spec.name, args, spec.kwargs)


@pytest.mark.parametrize(("op", "name"), TPU_CASES)
def test_mosaic_tpu_is_reference(op: str, name: str) -> None:
    spec = specs.spec(op, name)
    expected, got = run(spec, "reference"), run(packed(spec), "mosaic_tpu")
    if op != "candidates":
        assert_same(expected, got)
        return
    np.testing.assert_array_equal(got.unique, expected.unique)
    for want, have, ids, tokens in zip(
        *(
            np.asarray(x).reshape(-1, expected.ids.shape[2])
            for x in (expected.scores, got.scores, expected.ids, got.ids)
        ),
        strict=True,
    ):
        np.testing.assert_array_equal(tokens[np.isfinite(have)], ids[np.isfinite(want)])
        np.testing.assert_array_equal(have[np.isfinite(have)], want[np.isfinite(want)])
        assert (np.diff(tokens[tokens >= 0]) > 0).all()  # no token is fetched twice


def test_other_implementations_read_a_packed_cache() -> None:
    spec = specs.spec("exact_support", "ragged")
    assert_same(run(spec, "reference"), run(packed(spec), "reference"))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_what_the_kernels_refuse_runs_in_plain_xla(dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from pallas_kernels import dispatch

    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    p = specs.problem(specs.Shape(dtype=dtype), (90, 23))
    q, keys, lengths, wanted = (p[name] for name in ("q", "keys", "lengths", "wanted"))
    if dtype == jnp.float16:
        keys, _ = rows_of(
            pack(keys, p["values"]), keys.shape[3]
        )  # not a TPU dtype; float32 is, but not packed
    with pytest.raises(NotImplementedError, match="the TPU kernels: "):
        exact_support(q, keys, lengths, wanted, budget=16, implementation="mosaic_tpu")
    expected = exact_support(q, p["keys"], lengths, wanted, budget=16, implementation="reference")
    assert_same(expected, exact_support(q, keys, lengths, wanted, budget=16))


@pytest.mark.parametrize(
    ("heads", "groups", "dim", "budget", "slots", "dtype"),
    [
        (7, 1, 128, 512, 18000, jnp.bfloat16),  # tiles, a part of one, blocks of keys
        pytest.param(8, 1, 64, 1024, 3000, jnp.bfloat16, marks=pytest.mark.long),
        (2, 2, 256, 130, 400, jnp.float32),
    ],
)
def test_long_scans(heads: int, groups: int, dim: int, budget: int, slots: int, dtype: Any) -> None:
    shape = specs.Shape(b=2, h=heads, g=groups, d=dim, s=slots, k=budget, c=2, r=1, dtype=dtype)
    p = specs.problem(shape, (slots - 1, slots // 3))
    keys, _ = rows_of(pack(p["keys"], p["values"]), p["q"].shape[2])
    wanted = jnp.ones((2, heads), jnp.bool_)
    expected = exact_support(
        p["q"], p["keys"], p["lengths"], wanted, budget=budget, implementation="reference"
    )
    got = exact_support(
        p["q"], keys, p["lengths"], wanted, budget=budget, implementation="mosaic_tpu"
    )
    assert_same(expected, got)


def test_top_k_of_a_long_row() -> None:
    rng = np.random.default_rng(0)
    scores = jnp.asarray(rng.standard_normal((1, 3, 20000)), jnp.float32)
    scores = scores.at[:, 0, 15000:].set(-jnp.inf).at[:, 1, 19900:].set(jnp.inf)
    scores = scores.at[:, 2].set(jnp.round(scores[:, 2]))  # ties across blocks
    expected = top_k(scores, budget=512, implementation="reference")
    assert_same(expected, top_k(scores, budget=512, implementation="mosaic_tpu"))


@pytest.mark.long
def test_recall_by_recency() -> None:
    spec = specs.spec("retopk_step", "ragged")
    recent = specs.Spec(spec.op, spec.name, spec.args, {**spec.kwargs, "by_recency": True})
    assert_same(run(recent, "reference"), run(packed(recent), "mosaic_tpu"))


def test_packed_rows_are_the_rows() -> None:
    rng = np.random.default_rng(0)
    keys, values = (jnp.asarray(rng.standard_normal((2, 3, 8, 4)), jnp.float32) for _ in range(2))
    both = pack(keys, values)
    row, start = jnp.int32(1), jnp.int32(3)
    for want, view in zip((keys, values), rows_of(both, 4), strict=True):
        assert isinstance(view, PackedRows)
        assert (view.shape, view.ndim, view.size) == (want.shape, want.ndim, want.size)
        assert view.dtype == want.dtype
        np.testing.assert_array_equal(jnp.asarray(view), want)
        rows = jnp.arange(2)
        np.testing.assert_array_equal(view[rows, :, rows + 3], want[rows, :, rows + 3])
        np.testing.assert_array_equal(view[:, :, :3], want[:, :, :3])
        for cache in (want, view):
            np.testing.assert_array_equal(slots_between(cache, row, start, 4), want[1, :, 3:7])


def simulated(function, *args):
    """Runs a function on the simulated hardware, which sees races in the last kernel."""
    parameters = pltpu.InterpretParams(
        detect_races=True, dma_execution_mode="on_wait", uninitialized_memory="nan"
    )
    try:
        with pltpu.force_tpu_interpret_mode(parameters):
            got = jax.block_until_ready(jax.jit(function)(*args))
        assert interpret_pallas_call.races is not None
        assert not interpret_pallas_call.races.races_found
        return got
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def test_no_races_in_the_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("pallas_kernels.exact_support.mosaic_tpu")
    monkeypatch.setattr(module, "_TILE", 128)
    p = specs.problem(specs.Shape(b=1, h=2, g=1, d=16, s=700, k=6), (690,))
    keys, _ = rows_of(
        pack(p["keys"], p["values"]), p["q"].shape[2]
    )  # six tiles take turns in the memory of four
    scan = functools.partial(exact_support, budget=6)
    args = p["lengths"], p["wanted"]
    got = simulated(functools.partial(scan, implementation="mosaic_tpu"), p["q"], keys, *args)
    assert_same(scan(p["q"], p["keys"], *args, implementation="reference"), got)


def test_no_races_of_row_copies() -> None:
    p = specs.problem(specs.Shape(b=2, h=2, g=1, d=16, s=24, k=6, c=2, r=2), (21, 9))
    keys, _ = rows_of(pack(p["keys"], p["values"]), p["q"].shape[2])
    args = p["q"], keys, p["remembered"].supports[:, :, 0]
    got = simulated(functools.partial(support_scores, implementation="mosaic_tpu"), *args)
    assert_same(support_scores(*args, implementation="reference"), got)
