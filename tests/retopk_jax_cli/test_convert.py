import json

import pytest

from retopk_jax.cli import main


def tokens(source, tmp_path):
    out = tmp_path / "out.json"
    options = ["--prompt", "Hello there", "--max-new-tokens", "6", "--json", str(out)]
    assert main(["generate", "--model", str(source), "--attention", "full", *options]) == 0
    return json.loads(out.read_text())["tokens"]


def test_converted_model_gives_the_same_tokens(tiny, tmp_path):
    assert main(["convert", str(tiny), str(tmp_path / "converted")]) == 0
    assert tokens(tmp_path / "converted", tmp_path) == tokens(tiny, tmp_path)


def test_existing_target_is_left_alone(tiny, tmp_path, capsys):
    (tmp_path / "kept.txt").write_text("mine")
    assert main(["convert", str(tiny), str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


def test_missing_source(tmp_path, capsys):
    assert main(["convert", "/nowhere/model", str(tmp_path / "out")]) == 2
    assert "/nowhere/model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_failed_write_is_one_line(tiny, tmp_path, monkeypatch, capsys):
    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("models.loading.write_checkpoint", full_disk)
    assert main(["convert", str(tiny), str(tmp_path / "out")]) == 1
    assert "No space left on device" in capsys.readouterr().err


def test_no_command():
    with pytest.raises(SystemExit) as leaving:
        main([])
    assert leaving.value.code == 2
