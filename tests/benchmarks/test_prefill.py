"""The prefill benchmark: its floor, and a tiny run."""

import json

import pytest

from benchmarks import prefill
from benchmarks.model_shapes import SHAPES


def test_the_floor_counts_every_product_once() -> None:
    config, tokens = SHAPES["qwen2.5-7b"], 131072
    work = prefill.flops(config, tokens)
    # 28 layers of 3584 x (3584 + 2 * 512 + 3584 + 3 * 18944); biases and norms are nothing.
    matrices = 28 * 3584 * (2 * 3584 + 2 * 512 + 3 * 18944)
    assert work["blocks"] == pytest.approx(2 * matrices * tokens, rel=1e-4)
    assert work["attention"] == pytest.approx(28 * 28 * 2 * 2 * 128 * tokens**2 / 2, rel=1e-4)


def test_a_tiny_run(tmp_path, capsys) -> None:
    run = ["--out", str(tmp_path), "--model", "tiny", "--lengths", "600", "--runs", "1"]
    prefill.main([*run, "--matmul", "64", "--commit", "abc"])
    document = json.loads((tmp_path / "prefill.json").read_text())
    (row,) = document["rows"]
    assert row["length"] == 600
    assert 0 < row["floor_seconds"] < row["seconds"]
    assert 0 < row["recall_cache_share"] < 1
    assert row["temporary_bytes"] > 0
    assert "600 tokens in" in capsys.readouterr().out
