"""Timed rows of a kernel benchmark: the options that such benchmarks share, and their files."""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.results_file import prepare_directory, write_results
from retopk_jax.cli_files import write_text
from retopk_jax.errors import ConfigError

Row = dict[str, Any]
Measured = tuple[float, float, dict[str, Any]]
"""Microseconds, their floor (both of a step), and what else is to be said in the row."""


def options(
    name: str, description: str | None, *, has_parts: bool = True
) -> argparse.ArgumentParser:
    """A parser of the options that every benchmark of kernels has; ``--only`` if it has parts."""
    parser = argparse.ArgumentParser(prog=f"benchmarks {name}", description=description)
    parser.add_argument("--out", type=Path, required=True, help="directory for the results")
    if has_parts:
        parser.add_argument("--only", nargs="+", default=[], help="methods or parts (all)")
    parser.add_argument("--seconds", type=_seconds, default=1e9, help="no new row after that long")
    parser.add_argument("--commit", help="of these files, where they are not in git")
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")
    return value


def check_only(only: Sequence[str], known: Iterable[str]) -> None:
    """Refuses an ``--only`` that would measure nothing.

    Raises:
        ConfigError: there is no such method or part.
    """
    known = list(dict.fromkeys(known))
    for name in only:
        if name not in known:
            raise ConfigError(f"--only {name}: expected one of {'; '.join(known)}")


def exit_if_all_failed(rows: Sequence[Row], unit: str = "microseconds") -> None:
    """Ends the process with exit code 1 if there are rows, and a time in none of them."""
    if rows and all(row[unit] is None for row in rows):
        sys.exit(f"all {len(rows)} rows failed; the first: {rows[0]['error']}")


Measure = Callable[[], Measured | None]
"""Measures a row; None where it cannot be had here."""


class _Pending(NamedTuple):
    """A row that is being compiled."""

    method: str
    part: str
    case: tuple[int, int]
    measure: Future[Measure]


class Table:
    """Rows of the results, written as they come; one that fails is a row with its error.

    Rows are compiled beside each other in threads, and measured one after the other once nothing
    compiles any more, which would disturb.

    Attributes:
        rows: so far.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], args: argparse.Namespace):
        self.rows: list[Row] = []
        self._name = name
        self._settings = settings
        self._out = prepare_directory(args.out)
        self._only = args.only
        self._end = time.monotonic() + args.seconds
        self._more = {} if args.commit is None else {"commit": args.commit}
        self._pending: list[_Pending] = []
        self._pool = ThreadPoolExecutor()

    @property
    def closed(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() >= self._end

    @property
    def plot_path(self) -> Path:
        """The file of its plot."""
        return self._out / f"{self._name}.png"

    def wants(self, method: str, part: str) -> bool:
        """Whether a row is to be measured."""
        return not self.closed and (not self._only or bool({method, part} & {*self._only}))

    def add(
        self, method: str, part: str, case: tuple[int, int], prepare: Callable[[], Measure]
    ) -> None:
        """Begins to compile a row of a length and a batch, unless it is not wanted."""
        if self.wants(method, part):
            self._pending.append(_Pending(method, part, case, self._pool.submit(prepare)))

    def measure(self) -> None:
        """Measures the rows that were added, in their order."""
        pending, self._pending = self._pending, []
        wait([row.measure for row in pending])
        for row in pending:
            if not self.closed:
                self._measure(row)

    def _measure(self, pending: _Pending) -> None:
        method, part, (length, batch), measure = pending
        row = {"method": method, "part": part, "length": length, "batch": batch}
        start = time.monotonic()
        try:
            measured = measure.result()()
        except Exception as error:  # any: the other rows are worth having
            message = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            self.put({**row, "microseconds": None, "floor_microseconds": None, "error": message})
            print(f"{method:11} {part:10} {length:8} {batch:3} failed: {message}", flush=True)
            return
        if measured is None:
            return
        microseconds, floor, more = measured
        times = {"microseconds": round(microseconds, 2), "floor_microseconds": round(floor, 2)}
        self.put({**row, **times, **more})
        print(
            f"{method:11} {part:10} {length:8} {batch:3} {microseconds:10.2f} us, "
            f"floor {floor:8.2f} ({time.monotonic() - start:.1f} s) {more or ''}",
            flush=True,
        )

    def put(self, *rows: Row) -> None:
        """Takes rows that have been measured, and writes ``NAME.json`` and ``NAME.md``."""
        self.rows += rows
        ordered = sorted(self.rows, key=lambda row: (row["batch"], row["length"]))
        path = self._out / f"{self._name}.json"
        write_results(path, self._name, self._settings, ordered, **self._more)
        write_text(self._out / f"{self._name}.md", markdown(ordered))


def markdown(rows: Sequence[Row]) -> str:
    """A table of microseconds: a line per method and part, a column per batch and length."""
    columns = list(dict.fromkeys((row["batch"], row["length"]) for row in rows))
    cells: dict[tuple[str, str], dict[tuple[int, int], str]] = {}
    for row in rows:
        time, floor = row["microseconds"], row["floor_microseconds"]
        text = "failed" if time is None else f"{time}" if floor is None else f"{time} ({floor})"
        line = cells.setdefault((row["method"], row["part"]), {})
        line[row["batch"], row["length"]] = text
    heads = ["method", "part", *(f"{length:,}, batch {batch}" for batch, length in columns)]
    lines = [heads, ["---"] * len(heads)]
    lines += [[*name, *(line.get(at, "") for at in columns)] for name, line in cells.items()]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"Microseconds (floor):\n\n{body}\n"
