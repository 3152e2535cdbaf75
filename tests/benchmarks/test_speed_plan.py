"""The plan runs benchmarks that exist, with arguments that they take."""

import importlib
import subprocess
from pathlib import Path

import pytest

from benchmarks import speed_plan
from benchmarks.table import BENCHMARKS
from retopk_jax import ConfigError


@pytest.mark.parametrize("step", speed_plan.STEPS)
def test_steps_are_taken(step: str, tmp_path: Path) -> None:
    name, *arguments = speed_plan.STEPS[step]
    assert name in BENCHMARKS
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="expected a directory"):  # with all arguments read
        importlib.import_module(f"benchmarks.{name}").main(
            [*arguments, "--out", str(tmp_path / "file"), "--seconds", "9", "--commit", "abc"]
        )
    assert all(Path(file).is_file() for file in speed_plan.RECORDED)


def test_a_failed_step_is_told_after_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(command[3])
        assert 0 < float(command[command.index("--seconds") + 1]) <= 9.7
        return subprocess.CompletedProcess(command, int(command[3] == "stages"))

    monkeypatch.setattr(speed_plan.subprocess, "run", run)
    with pytest.raises(SystemExit, match="failed: stages"):
        speed_plan.main(["--out", str(tmp_path), "--only", "stages", "prefill", "--seconds", "9.7"])
    assert ran == ["stages", "prefill"]
    with pytest.raises(ConfigError, match="--only none: expected one of attention; "):
        speed_plan.main(["--out", str(tmp_path), "--only", "none"])


def test_time_that_is_over_ends_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speed_plan.subprocess, "run", lambda *_, **__: pytest.fail("ran"))
    speed_plan.main(["--out", str(tmp_path), "--seconds", "1e-9"])
    assert "time is over before attention" in capsys.readouterr().err
