"""Benchmarks refuse bad arguments before anything is measured."""

import importlib
import re
from pathlib import Path

import pytest

from retopk_jax import ConfigError


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("attention", "decomposition", "end_to_end", "kernel_matrix", "stages"):
        module = importlib.import_module(f"benchmarks.{name}")
        monkeypatch.setattr(module, "copy_bytes_per_microsecond", lambda: pytest.fail("measured"))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("end_to_end", "--model tiny --lengths 512 --only nonsense", "expected one of none; exact"),
        ("end_to_end", "--model tiny --lengths 512 --processes 2", "give --coordinator"),
        ("end_to_end", "--model tiny --lengths 512 --pattern OUT/empty", "no array 'scans'"),
        ("kernel_matrix", "--only nonsense", "expected one of retopk_step; "),
        ("stages", "--only nonsense", "expected one of L1; "),
        ("stages", "--lengths 0", "--lengths=0: expected an integer >= 1"),
        ("attention", "--lengths 0", "--lengths=0: expected an integer >= 1"),
        ("attention", "--batch 0", "--batch=0: expected an integer >= 1"),
        ("attention", "--batch-lengths -1", "--batch-lengths=-1: expected an integer >= 1"),
        ("decomposition", "--lengths 0", "--lengths=0: expected an integer >= 1"),
        ("tpu_static", "--slots -5", "--slots=-5: expected an integer >= 1"),
        ("tpu_static", "--layers 0", "--layers=0: expected an integer >= 1"),
    ],
)
def test_bad_arguments(name: str, arguments: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    options = arguments.replace("OUT", str(tmp_path)).split()
    with pytest.raises(ConfigError, match=re.escape(message)):
        importlib.import_module(f"benchmarks.{name}").main(["--out", str(tmp_path), *options])


@pytest.mark.parametrize(
    "name", ["attention", "decomposition", "end_to_end", "kernel_matrix", "prefill", "stages"]
)
def test_where_to_write_is_checked_first(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="expected a directory"):
        importlib.import_module(f"benchmarks.{name}").main(["--out", str(tmp_path / "file")])


@pytest.mark.parametrize("arguments", ["--seconds nan", "--seconds 0", "--only x"])
def test_options_of_no_use(arguments: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module("benchmarks.prefill").main(
            ["--out", str(tmp_path), *arguments.split()]
        )
