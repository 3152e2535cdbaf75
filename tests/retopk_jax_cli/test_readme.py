"""What the README tells people to type works."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import models
from retopk_jax import cli
from retopk_jax.calibration import LokiBasis, save_basis
from retopk_jax.calibration.loki import FORMAT

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_python_examples_run(tiny, monkeypatch, capsys):
    model = models.load_model(tiny)
    monkeypatch.setattr(models, "load_model", lambda source: model)
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(block, names)
    assert len(names["reports"]) == model.config.num_layers
    assert names["again"].context.cache.batch == 1
    assert "reuse" in capsys.readouterr().out


@pytest.mark.parametrize("line", re.findall(r"^retopk .*", README, re.MULTILINE))
def test_command_lines_parse(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("BOOK.txt", "QUESTION.txt"):
        Path(name).write_text("Who?", encoding="utf-8")
    basis, variance = np.eye(4, dtype=np.float32)[None, None], np.ones((1, 1, 4), np.float32)
    save_basis("basis.npz", LokiBasis(basis, variance, {"format": FORMAT}))
    cli._parser().parse_args(shlex.split(line, comments=True)[1:])
