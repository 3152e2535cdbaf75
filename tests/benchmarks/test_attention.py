"""The attention benchmark runs on a CPU, small; its kernels in interpret mode."""

import json
from pathlib import Path

import pytest

from benchmarks import attention, kernel_workload

_SMALL = {
    "HEADS": 4,
    "GROUPS": 2,
    "DIM": 16,
    "BUDGET": 16,
    "CAPACITY": 4,
    "ENTRIES": 2,
    "WINDOW": 4,
    "QUERIES": 2,
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in _SMALL.items():
        monkeypatch.setattr(kernel_workload, name, value)
        if hasattr(attention, name):
            monkeypatch.setattr(attention, name, value)
    monkeypatch.setattr(kernel_workload, "layers_for", lambda *_: 1)
    monkeypatch.setattr(kernel_workload, "loop_size", lambda _: {"steps": 1, "rounds": 2})
    monkeypatch.setattr(attention, "copy_bytes_per_microsecond", lambda: 1e6)
    monkeypatch.setattr(attention, "torch_microseconds", lambda *_: None)


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
    assert failed(rows) == [("full", "cudnn")]


def test_failures_are_rows_too(small, tmp_path, capsys) -> None:
    rows = measured(tmp_path, "--only", "streaming", "full")
    steps = [("full", "step"), ("streaming", "step")]
    assert list(rows) == [("full", "triton"), ("full", "cudnn"), *steps]
    assert failed(rows) == [("full", "cudnn")]
    assert "failed" in capsys.readouterr().out
