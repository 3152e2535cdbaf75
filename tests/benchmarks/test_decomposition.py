"""The decomposition's rows, without the GPU that its profile is of."""

import json

import pytest

from benchmarks import decomposition
from tests.benchmarks.small import shrink


def test_kernels_become_parts(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    times = {"exact_scan": 8.0, "exact_unheard_of": 1.5}
    monkeypatch.setattr(decomposition, "kernel_microseconds", lambda run: times)
    sizes = ["--lengths", "64", "128", "--only", "exact", "full"]
    decomposition.main(["--out", str(tmp_path), *sizes])
    rows = json.loads((tmp_path / "decomposition.json").read_text())["rows"]
    parts = [(row["method"], row["part"], row["microseconds"]) for row in rows]
    scan, other = ("scan", 8.0), ("exact_unheard_of", 1.5)
    of_length = [(method, *part) for method in ("full", "exact") for part in (scan, other)]
    assert parts == of_length * 2
    assert "| exact | scan | 8.0 | 8.0 |" in (tmp_path / "decomposition.md").read_text()
    assert (tmp_path / "decomposition.png").stat().st_size > 0
