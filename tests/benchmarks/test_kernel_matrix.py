"""The matrix of kernels, small, in interpret mode; and that it can tell a difference."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import kernel_matrix
from benchmarks.kernel_matrix import Case, differences

SMALL = Case(b=2, g=1, each=2, d=16, s=64, k=8, c=4, r=2, w=4)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_matrix, "copy_bytes_per_microsecond", lambda: 1e3)
    monkeypatch.setattr(kernel_matrix, "STEPS_TIMED", 2)
    for name, op in kernel_matrix.OPS.items():
        cases = {"base": SMALL, "clustered": replace(SMALL, scores="clustered")}
        monkeypatch.setitem(kernel_matrix.OPS, name, op._replace(cases=cases))


def rows(tmp_path) -> list[dict]:
    return json.loads((tmp_path / "kernel_matrix.json").read_text())["rows"]


@pytest.mark.long
def test_kernels_are_checked_and_timed(small, tmp_path, capsys) -> None:
    kernel_matrix.main(["--out", str(tmp_path), "--only", "base"])
    assert [row["method"] for row in rows(tmp_path)] == list(kernel_matrix.OPS)
    assert all(row["equal"] and row["microseconds"] > 0 for row in rows(tmp_path))
    assert all(row["floor_microseconds"] > 0 for row in rows(tmp_path))
    assert "3 of 3" in capsys.readouterr().out


def test_what_is_remembered_is_well_formed() -> None:
    problem = kernel_matrix.OPS["retopk_step"].problem(SMALL)
    ring = problem.carried
    assert ring is not None
    supports, lengths = np.asarray(ring.supports), np.asarray(problem.fixed[2])
    assert (supports < lengths[:, None, None, None]).all()
    assert (supports[:, :, -1, -3:] == -1).all()
    assert (supports[:, :, :-1] >= 0).all()
    assert (np.diff(supports[:, :, :-1]) > 0).all()
    q = np.asarray(problem.queries[0], np.float32)
    cosine = np.einsum("bhd,bhcd->bhc", q, np.asarray(ring.queries, np.float32))
    cosine = np.sort(cosine / np.linalg.norm(q, axis=-1, keepdims=True))
    assert (np.diff(cosine) > 0.1).all()
    np.testing.assert_allclose(cosine[..., -1], 0.99, atol=0.01)


def test_a_difference_is_an_error(small, tmp_path, monkeypatch) -> None:
    op = kernel_matrix.OPS["exact_support"]

    def other(case, implementation, q, fixed, carried):
        budget = case.k if implementation == "triton" else case.k + 1
        (support, scores), _ = op.call(replace(case, k=budget), "reference", q, fixed, carried)
        return (support[..., : case.k], scores[..., : case.k]), None

    monkeypatch.setitem(kernel_matrix.OPS, "exact_support", op._replace(call=other))
    with pytest.raises(SystemExit, match="exact_support, clustered"):
        kernel_matrix.main(["--out", str(tmp_path), "--only", "exact_support"])
    assert not any(row["equal"] for row in rows(tmp_path))


def test_differences_beyond_rounding_only() -> None:
    floats = jnp.array([1.0, -np.inf, 3.0], jnp.bfloat16)
    ids = jnp.array([1, 2, 3])
    assert not differences((ids, floats), (ids, floats.at[0].add(jnp.bfloat16(2**-7))))
    assert list(differences((ids, floats), (ids.at[0].add(1), floats))) == ["[0]"]
    for bad in (np.nan, np.inf, 1.1):
        assert list(differences((ids, floats), (ids, floats.at[0].set(bad)))) == ["[1]"]
