import json
import math

import pytest

from benchmarks.results_file import commit, write_results


def test_says_where_and_from_what_it_was_measured(tmp_path):
    write_results(tmp_path / "x.json", "x", {"steps": 3}, [{"a": 1}, {"a": 2}], note="n")
    document = json.loads((tmp_path / "x.json").read_text())
    assert document["benchmark"] == "x"
    assert document["settings"] == {"steps": 3}
    assert document["rows"] == [{"a": 1}, {"a": 2}]
    assert document["note"] == "n"
    assert document["machine"]["backend"] == "cpu"
    assert document["machine"]["jax"]
    assert "commit" in document
    assert '\n    {"a": 1},\n    {"a": 2}\n' in (tmp_path / "x.json").read_text()


def test_failure_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("old")
    with pytest.raises(ValueError, match="JSON"):
        write_results(path, "x", {}, [{"a": math.nan}])
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_an_archive_names_its_commit(tmp_path, monkeypatch):
    archived = tmp_path / ".git_archival.txt"
    monkeypatch.setattr("benchmarks.results_file.ARCHIVED", archived)
    archived.write_text("node: 0123abc\n")
    assert commit() == "0123abc"
    archived.write_text("node: $Format:%H$\n")  # in a checkout
    assert commit() != "0123abc"
