"""Result files: rows with the machine, commit and settings that they were measured under."""

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from retopk_jax.cli_files import write_text
from retopk_jax.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent

ARCHIVED = ROOT / ".git_archival.txt"
"""Where ``git archive`` writes the commit."""


def prepare_directory(path: Path) -> Path:
    """Makes a directory for results and checks that it can be written, before the work.

    Raises:
        ConfigError: it cannot.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror}; expected a directory") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {path} cannot be written: expected a directory to write")
    return path


def write_results(
    path: Path,
    name: str,
    settings: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    **more: Any,
) -> None:
    """Writes a benchmark's results as JSON.

    Args:
        path: the file; written aside and renamed.
        name: the benchmark.
        settings: what it was run with.
        rows: what it measured.
        **more: further entries.
    """
    document = {
        "benchmark": name,
        "command": f"python -m benchmarks {name}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "settings": dict(settings),
        "rows": [dict(row) for row in rows],
        **more,
    }
    write_text(path, as_json(document))


def as_json(document: Mapping[str, Any]) -> str:
    """JSON with a line for every row, and for every entry of another list of objects."""
    parts = []
    for name, value in document.items():
        if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
            lines = [json.dumps(one, ensure_ascii=False, allow_nan=False) for one in value]
            text = "[\n    " + ",\n    ".join(lines) + "\n  ]"
        else:
            text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
            text = text.replace("\n", "\n  ")
        parts.append(f"  {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def machine() -> dict[str, Any]:
    """The computer and the versions that a measurement depends on."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "devices": [device.device_kind for device in jax.devices()],
        "backend": jax.default_backend(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def commit() -> str | None:
    """The project's commit, with ``+`` when its files differ from it.

    In what ``git archive`` wrote it is the one archived; None where neither is known.
    """
    archived = ARCHIVED.read_text(encoding="utf-8").strip() if ARCHIVED.is_file() else ""
    if archived and "$" not in archived:
        return archived.partition("node: ")[2]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
