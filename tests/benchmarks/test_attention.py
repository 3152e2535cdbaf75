"""The attention benchmark runs on a CPU, small; its kernels in interpret mode."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import attention
from tests.benchmarks.small import shrink


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


def measured(tmp_path: Path, *more: str) -> dict[tuple[str, str], dict]:
    sizes = ["--lengths", "64", "--method-lengths", "64", "--batch-lengths"]
    attention.main(["--out", str(tmp_path), *sizes, "--commit", "abc", *more])
    written = json.loads((tmp_path / "attention.json").read_text())
    assert written["commit"] == "abc"
    return {(r["method"], r["part"]): r for r in written["rows"]}


def failed(rows: dict[tuple[str, str], dict]) -> list[tuple[str, str]]:
    return [key for key, row in rows.items() if row["microseconds"] is None]


@pytest.mark.long
def test_every_method_has_a_row(small, tmp_path) -> None:
    rows = measured(tmp_path)
    steps = {method for method, part in rows if part == "step"}
    names = ("full", "exact", "retopk", "streaming", "quest", "sparq", "loki", "tokenselect")
    assert steps == set(names)
    assert ("tokenselect", "step, kept") in rows
    assert failed(rows) == [("full", "cudnn"), ("prefill", "attention")]


def test_failures_are_rows_too(small, tmp_path, capsys) -> None:
    rows = measured(tmp_path, "--only", "streaming", "full")
    steps = [("full", "step"), ("streaming", "step")]
    assert list(rows) == [("full", "triton"), ("full", "cudnn"), *steps]
    assert failed(rows) == [("full", "cudnn")]
    assert "failed" in capsys.readouterr().out


def test_supports_are_set_beside_prefill_attention(small, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(attention, "prompt_attention", lambda q, k, v: q)
    rows = measured(tmp_path, "--only", "prefill")
    assert list(rows) == [("prefill", "attention"), ("prefill", "supports")]
    times = [row["microseconds"] for row in rows.values()]
    assert rows["prefill", "supports"]["of_attention"] == pytest.approx(times[1] / times[0], 0.01)
    assert "| prefill | supports |" in (tmp_path / "attention.md").read_text()


def test_recorded_paths_are_timed(small, tmp_path) -> None:
    scans = np.zeros((50, 3, 2, attention.HEADS // attention.GROUPS), np.bool_)
    scans[::5, :, 0] = True
    np.savez(tmp_path / "seen.npz", scans=scans)
    rows = measured(tmp_path, "--only", "seen", "--pattern", str(tmp_path / "seen.npz"))
    (row,) = rows.values()
    assert (row["method"], row["part"]) == ("retopk", "seen")
    assert row["microseconds"] is not None
    assert row["scanning_groups"] == pytest.approx(0.1, abs=0.02)
