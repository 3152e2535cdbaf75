"""The stages run on a CPU, small, and compute the same step."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import stages
from benchmarks.kernel_workload import Layer
from pallas_kernels import specs
from pallas_kernels.exact_support import exact_support
from pallas_kernels.retopk_step import retopk_step
from tests.benchmarks.small import SIZES, shrink


@pytest.mark.parametrize("in_place", [False, True])
def test_a_step_of_parts_is_the_step(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    shape = specs.Shape(r=SIZES["ENTRIES"], w=SIZES["WINDOW"])
    p = specs.problem(shape, (90, 23))
    q, remembered, no = p["q"], p["remembered"], jnp.zeros((shape.b,), jnp.bool_)
    expected = retopk_step(
        *(q, p["keys"], p["values"], remembered, p["lengths"], no, ~no, 0.85),
        entries=shape.r,
        window=shape.w,
        implementation="reference",
    )
    assert len(np.unique(expected.path)) == 2
    plain = {"implementation": "reference"}
    monkeypatch.setattr(stages, "exact_support", lambda *a, **k: exact_support(*a, **k | plain))
    take = jax.jit(stages.step_of(stages.Parts("reference", "reference", in_place)))
    layer = Layer(p["keys"], p["values"], q[None], p["lengths"])
    got = take(q, layer, remembered, jnp.full((shape.b, shape.h), 0.85))
    np.testing.assert_allclose(got[0], expected.out, rtol=1e-5, atol=1e-5)
    for have, want in zip(got[1], expected.remembered, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-6)


def test_a_run_writes_rows_a_table_and_a_plot(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    only = ["--only", "L1", "L5"]
    stages.main(["--out", str(tmp_path), "--lengths", "64", "--commit", "abc", *only])
    written = json.loads((tmp_path / "stages.json").read_text())
    first, last = written["rows"]
    assert (first["method"], last["method"]) == ("L1", "L5")
    assert first["speedup"] == 1
    assert last["speedup"] == pytest.approx(first["microseconds"] / last["microseconds"], 0.01)
    assert last["same_support"] > 0.9
    assert set(written["settings"]["stages"]) == {"L1", "L2", "L3", "L4", "L5"}
    assert "| L5 |" in (tmp_path / "stages.md").read_text()
    assert (tmp_path / "stages.png").stat().st_size > 0


def test_a_run_in_which_every_row_failed_is_a_failure(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(monkeypatch)

    def fail(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(stages, "retopk_loop", fail)
    with pytest.raises(SystemExit, match=r"all 5 rows failed; the first: .*no such kernel"):
        stages.main(["--out", str(tmp_path), "--lengths", "64", "--commit", "abc"])
    assert len(json.loads((tmp_path / "stages.json").read_text())["rows"]) == 5
