"""Results of single items, saved as they come, so that a killed run goes on where it stopped."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.results_file import commit
from retopk_jax.cli_files import write_json
from retopk_jax.errors import ConfigError

ITEMS = "items"


class Store:
    """Items of one run, a file each, under a directory named by a hash of the run's settings.

    Several processes may work on different items of one run.
    """

    def __init__(
        self,
        out: Path,
        name: str,
        settings: Mapping[str, Any],
        labels: Mapping[str, Any] | None = None,
    ):
        """Opens a run.

        Args:
            out: directory of the results.
            name: of the experiment.
            settings: all that an item of the run depends on.
            labels: the settings that a label stands for, for `key`.
        """
        text = json.dumps(settings, sort_keys=True, ensure_ascii=False)
        self._directory = out / ITEMS / f"{name}-{_short_hash(text)}"
        self._labels = dict(labels or {})
        self._directory.mkdir(parents=True, exist_ok=True)
        self._commit = commit()

    def key(self, what: str, label: str) -> str:
        """Key of an item computed with what a label stands for; labels of one thing share it."""
        return f"{what}, {json.dumps(self._labels.get(label, label), sort_keys=True)}"

    def load(self, key: str) -> dict[str, Any] | None:
        """The item saved under ``key``, or None.

        Raises:
            ConfigError: its file is damaged.
        """
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))["item"]
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{path} is damaged ({error}): delete it and run again") from error

    def save(self, key: str, item: Mapping[str, Any]) -> None:
        """Saves an item; whole or not at all."""
        write_json(self._path(key), {"key": key, "commit": self._commit, "item": dict(item)})

    def commits(self) -> list[str]:
        """Commits under which the saved items were computed."""
        found = {
            str(json.loads(path.read_text(encoding="utf-8")).get("commit"))
            for path in self._directory.glob("*.json")
        }
        return sorted(found)

    def _path(self, key: str) -> Path:
        return self._directory / f"{_short_hash(key)}.json"


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:20]
