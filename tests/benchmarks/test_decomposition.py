"""The decomposition's rows, without the GPU that its profile is of."""

import json

import numpy as np
import pytest

from benchmarks import decomposition
from tests.benchmarks.small import shrink


def test_floors_count_what_is_read() -> None:
    scan = 4 * (131072 - 5)
    assert decomposition.floor_rows("exact_scan", 131072, None) == scan
    assert decomposition.floor_rows("full_attention", 131072, None) == 2 * scan
    reuse = np.full((1, 1, 28), -1.0)
    assert decomposition.floor_rows("exact_scan", 131072, reuse) == 0
    one = np.where(np.arange(28) == 7, 2.0, reuse)
    assert decomposition.floor_rows("exact_scan", 131072, one) == scan / 4
    assert decomposition.floor_rows("retopk_finish", 131072, one) == 28 * 512
    assert decomposition.floor_rows("exact_select", 131072, None) is None


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
    table = (tmp_path / "decomposition.md").read_text()
    assert "| exact | scan | 8.0 (0.0) | 8.0 (0.01) |" in table
    assert "| exact | exact_unheard_of | 1.5 | 1.5 |" in table
    assert (tmp_path / "decomposition.png").stat().st_size > 0
