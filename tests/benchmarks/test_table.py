import importlib

import pytest

from benchmarks.__main__ import main
from benchmarks.table import BENCHMARKS


@pytest.fixture(autouse=True)
def _no_compilation_cache(monkeypatch):
    monkeypatch.setenv("RETOPK_COMPILATION_CACHE", "off")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_entry_is_a_module_with_a_main(name):
    assert callable(importlib.import_module(f"benchmarks.{name.replace('-', '_')}").main)


def test_lists_them_without_a_name(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in BENCHMARKS)


def test_unknown_name(capsys):
    assert main(["nope"]) == 2
    complaint = capsys.readouterr().err
    assert "'nope'" in complaint
    assert "demo" in complaint


def test_bad_settings_are_one_line(capsys, tmp_path):
    assert main(["cpu_decode", "--out", str(tmp_path), "--steps", "0"]) == 2
    assert "--steps 0: expected 1 or more" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file")]) == 2
    assert "file" in capsys.readouterr().err
