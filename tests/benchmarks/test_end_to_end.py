"""Decode steps of whole models: a tiny run, its patterns of scans, and what follows from rows."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import end_to_end, path_patterns, synthetic_decode
from benchmarks.end_to_end import derive
from benchmarks.model_shapes import SHAPES
from models import parameter_count
from retopk_jax import CapacityError, ConfigError, ReTopK

SIZES = (32, 28, 28, 4)


def test_shapes_are_the_models() -> None:
    counts = {name: parameter_count(shape) for name, shape in SHAPES.items()}
    assert counts["qwen2.5-7b"] == 7_615_616_512
    assert counts["qwen2.5-14b"] == 14_770_033_664
    assert counts["llama-3.1-8b"] == 8_030_261_248


def test_patterns_have_the_shares_they_name() -> None:
    alone = path_patterns.independent(*SIZES)
    assert alone.head_share == pytest.approx(0.111, abs=1e-4)
    assert alone.group_share == pytest.approx(1 - 0.889**7, abs=0.02)
    together = path_patterns.traced(*SIZES)
    refresh = path_patterns.REFRESH_SHARE
    assert together.head_share == pytest.approx(0.083 + refresh * 0.917, abs=0.005)
    assert together.group_share == pytest.approx(0.306 + refresh * 0.694, abs=0.003)
    risk = path_patterns.risk(*SIZES)
    assert risk.head_share == risk.group_share == pytest.approx(0.04 + refresh * 0.96, abs=0.002)


def test_a_recorded_pattern_is_spread_over_the_model(tmp_path) -> None:
    rng = np.random.default_rng(0)
    scans = rng.random((50, 24, 2, 7)) < 0.2
    np.savez(tmp_path / "p.npz", scans=scans)
    found = path_patterns.recorded(tmp_path / "p.npz", *SIZES)
    grouped = found.scans.reshape(32, 28, 4, 7)
    np.testing.assert_array_equal(grouped[:, 0, :2], scans[:32, 0])
    np.testing.assert_array_equal(grouped[:, 27, 1], scans[:32, 27 * 24 // 28, 1])
    assert found.head_share == pytest.approx(scans.mean(), abs=0.01)
    with pytest.raises(ConfigError, match=r"\(50, 24, 2, 7\), expected .* 8\]"):
        path_patterns.recorded(tmp_path / "p.npz", 32, 28, 32, 4)
    with pytest.raises(ConfigError, match="no array 'scans'"):
        path_patterns.recorded(tmp_path / "none.npz", *SIZES)


def test_rings_hold_as_many_candidates_as_there_can_be() -> None:
    geometry = SHAPES["tiny"]
    state = synthetic_decode.ring_of(
        jax.random.key(0),
        geometry=end_to_end.TransformerDecoder(geometry, jnp.dtype("bfloat16")).geometry,
        method=(16, 8),
        start=1000,
        dtype=jnp.dtype("bfloat16"),
    )
    supports = np.asarray(state.cache.supports)[0]  # [H, C, K]
    assert supports.min() >= 0
    assert supports.max() < 1000
    assert (np.diff(supports, axis=-1) > 0).all()
    assert all(len(np.unique(head)) == head.size for head in supports)


def test_what_follows_from_rows() -> None:
    def row(part: str, milliseconds: float | None, length: int = 8, **more: object) -> dict:
        at = {"model": "m", "mesh": "", "length": length, "part": part}
        return {**at, "milliseconds": milliseconds, **more}

    rows = [
        row("none", 4.0),
        row("exact", 10.0, 16),
        row("full", 14.0, 16),
        row("reuse", 5.0, 16),
        row("traced", 7.0, 16, group_share=0.3),
        row("risk", None, 16, error="x"),
    ]
    sharded = {"mesh": "tensor=2", "devices": 2}
    found = {r["part"]: r for r in derive([*rows, row("exact", 6.25, 16, **sharded)]) if r["mesh"]}
    assert found["exact"]["efficiency"] == 0.8
    assert found["exact"]["speedup_over_one_device"] == 1.6
    found = {r["part"]: r for r in derive(rows)}
    traced = found["traced"]
    assert traced["speedup_over_exact"] == round(10 / 7, 3)
    assert traced["speedup_over_full"] == 2.0
    assert traced["non_attention_share"] == round(4 / 7, 4)
    assert traced["predicted_attention_milliseconds"] == pytest.approx(1 + 0.3 * 6)
    assert traced["attention_over_predicted"] == round(3 / 2.8, 3)
    assert found["risk"] == rows[-1]


def test_a_tiny_run_is_whole_and_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(end_to_end, "copy_bytes_per_microsecond", lambda: 1e4)
    monkeypatch.setattr(end_to_end, "ReTopK", small_method)
    run = ["--out", str(tmp_path), "--model", "tiny", "--steps", "4", "--calls", "1"]
    run += ["--commit", "abc", "--lengths"]
    with monkeypatch.context() as patch:
        patch.setattr(end_to_end, "buffers_for", lambda *_: 2)
        end_to_end.main([*run, "64", "--only", "full"])
    end_to_end.main([*run, "128", "64", "--only", "full"])
    assert capsys.readouterr().out.count(" full ") == 2, "a row was measured again"
    end_to_end.main([*run, "128", "--kernels"])
    document = json.loads((tmp_path / "end_to_end.json").read_text())
    rows = {row["part"]: row for row in document["rows"] if row["length"] == 128}
    assert len(rows) == len(document["rows"]) - 1 == 7
    assert not [row for row in document["rows"] if row["milliseconds"] is None]
    assert document["rows"][0]["shared"] == "3 layers take 2 buffers in turn"
    assert "shared" not in rows["full"]
    assert rows["none"]["weight_bytes"] == 2 * parameter_count(SHAPES["tiny"])
    assert rows["reuse"]["candidates"] > 0
    for part in ("independent", "traced", "risk"):
        assert "attention_over_predicted" in rows[part]
        assert rows[part]["speedup_over_full"] > 0
    assert rows["exact"]["kernels"] == {}, "there is no GPU"
    assert rows["full"]["recall_bytes"] == 0 < rows["risk"]["recall_bytes"]
    end_to_end.main([*run, "128"])
    assert "nothing left to measure" in capsys.readouterr().out


def small_method() -> ReTopK:
    return ReTopK(budget=16, capacity=4, recall=2, window=4)


def test_as_many_layers_have_buffers_as_fit(monkeypatch) -> None:
    tiny = end_to_end.TransformerDecoder(SHAPES["tiny"], jnp.dtype("bfloat16"))
    layer = 4 * 2 * 1000 * 8
    monkeypatch.setattr(end_to_end, "parameter_bytes", lambda *_: 500)
    monkeypatch.setattr(end_to_end, "free_bytes", lambda device: int((2.5 * layer + 500) / 0.85))
    assert end_to_end.buffers_for(tiny, 1000) == 2
    monkeypatch.setattr(end_to_end, "free_bytes", lambda device: None)
    assert end_to_end.buffers_for(tiny, 1000) == 3
    monkeypatch.setattr(end_to_end, "free_bytes", lambda device: 1000)
    with pytest.raises(CapacityError, match=r"1000 tokens need 62\.5 KiB .* has 1000 B free"):
        end_to_end.buffers_for(tiny, 1000)
