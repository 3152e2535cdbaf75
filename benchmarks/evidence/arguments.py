"""Command-line arguments that the experiments share, and what they name."""

import argparse
import functools
import hashlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from benchmarks.evidence.documents import Documents, cut_documents, load_documents
from benchmarks.evidence.methods import check_policies
from benchmarks.evidence.programs import forget_programs
from benchmarks.evidence.smoke_model import NAME as SMOKE_MODEL
from benchmarks.evidence.smoke_model import smoke_model
from benchmarks.evidence.texts import ON_BAD, BadItems, read_texts
from benchmarks.results_file import ROOT, prepare_directory
from models import CausalLM, load_model
from models.weights import parameter_paths
from retopk_jax.errors import ConfigError, RetopkError

SAMPLE_TEXT = ROOT / "examples" / "northanger_abbey.txt"
"""What ``--smoke`` reads without texts."""


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments of every experiment; sizes left out get theirs by `fill`."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=description)
    add = parser.add_argument
    add("--model", help="what load_model takes (smollm2)")
    add("--out", type=Path, required=True, help="directory for the results; resumes what is there")
    add(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help="full, exact, retopk, streaming, quest, sparq, loki, tokenselect; settings after a "
        "colon, as in retopk:tau=0.9,capacity=64",
    )
    add("--budgets", nargs="+", type=int, metavar="K", help="tokens attended")
    add("--lengths", nargs="+", type=int, metavar="N", help="tokens of context")
    add("--documents", type=int, metavar="N", help="documents, or samples of a task")
    add("--rows", type=int, metavar="B", help="of them read and decoded at once")
    add(
        "--texts",
        type=Path,
        help="a directory of .txt files, one such file, or documents cut by `documents`",
    )
    add("--on-bad", choices=ON_BAD, default="skip", help="texts that cannot be used (%(default)s)")
    add(
        "--rope",
        metavar="TYPE:FACTOR",
        help="another RoPE scaling, for lengths past the trained one; for example yarn:2",
    )
    add("--dtype", help="of weights and cache (float32 on a CPU, bfloat16 elsewhere)")
    add("--seed", type=int, default=0, help="of every random choice (%(default)s)")
    add("--capacity", type=int, metavar="S", help="slots a row of the cache (the least that fits)")
    add(
        "--timed",
        action="store_true",
        help="decode twice from every prefill and time the second, when nothing is loaded anew",
    )
    add("--minutes", type=float, help="stop after so long; the same command goes on from there")
    add("--tag", default="", help="ending of the result file's name")
    add(
        "--compile-threads",
        type=int,
        default=max(1, (os.cpu_count() or 2) // 2),
        help="programs compiled at once (%(default)s)",
    )
    add("--smoke", action="store_true", help="tiny sizes, and without --model random weights")
    return parser


def fill(args: argparse.Namespace, normal: Mapping[str, Any], smoke: Mapping[str, Any]) -> None:
    """Gives the arguments that were left out their values."""
    for name, value in {**normal, **(smoke if args.smoke else {})}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in ("documents", "rows", "compile_threads"):
        if getattr(args, name, 1) is not None and getattr(args, name, 1) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: expected 1 or more")
    args.out = prepare_directory(args.out)


def open_model(args: argparse.Namespace, source: str | None = None) -> CausalLM:
    """The model that the arguments name, under the RoPE scaling that they ask for."""
    name = source if source is not None else args.model
    if name is None:
        name = SMOKE_MODEL if args.smoke else "smollm2"
    model = _extended(name, args.dtype, args.rope)
    check_policies(args.methods, args.budgets, model)
    return model


@functools.lru_cache(maxsize=1)
def _loaded(source: str, dtype: str | None) -> CausalLM:
    """The model, once for the experiments of one process."""
    return smoke_model() if source == SMOKE_MODEL else load_model(source, dtype=dtype)


@functools.lru_cache(maxsize=2)
def _extended(source: str, dtype: str | None, rope: str | None) -> CausalLM:
    """The model under another RoPE scaling."""
    model = _loaded(source, dtype)
    if rope is None:
        return model
    kind, _, factor = rope.partition(":")
    try:
        return model.with_rope(kind, float(factor))
    except ValueError as error:
        raise ConfigError(f"--rope {rope}: expected TYPE:FACTOR ({error})") from error


def check_length(model: CausalLM, length: int) -> None:
    """Refuses a length past the model's positions.

    Raises:
        ConfigError: it is past them; an explicit ``--rope`` extends them.
    """
    positions = model.decoder.max_positions
    if length > positions:
        raise ConfigError(
            f"--lengths {length}: the model has {positions} positions; a RoPE scaling for more "
            "must be asked for, for example --rope yarn:2"
        )


def open_documents(
    args: argparse.Namespace, model: CausalLM, length: int, count: int
) -> tuple[Documents, list[dict[str, str]]]:
    """The documents that the arguments name, and what had to be left out.

    Raises:
        ConfigError: no texts are named, or they do not hold enough documents.
    """
    path = args.texts
    if path is None and args.smoke:
        path = SAMPLE_TEXT
    if path is None:
        raise ConfigError("--texts: expected texts; python -m benchmarks fetch-texts gets some")
    tokenizer = model.require_tokenizer()
    if path.suffix == ".npz":
        documents = load_documents(path, tokenizer)
        documents.ending(length)
        return documents.first(count), []
    bad = BadItems(args.on_bad)
    documents = cut_documents(
        read_texts(path, bad),
        tokenizer,
        length=length,
        count=count,
        seed=args.seed,
        source=path.name,
        bad=bad,
    )
    return documents, bad.skipped


def describe_model(args: argparse.Namespace, model: CausalLM) -> dict[str, Any]:
    """What a result says of its model."""
    return {
        "source": Path(model.source).name if Path(model.source).exists() else model.source,
        "fingerprint": fingerprint(model),
        "parameters": model.parameter_count,
        "layers": model.decoder.geometry.num_layers,
        "query_heads": model.decoder.geometry.num_heads,
        "kv_heads": model.decoder.geometry.num_kv_heads,
        "head_dim": model.decoder.geometry.head_dim,
        "dtype": jnp.dtype(model.decoder.dtype).name,
        "rope": args.rope or "as trained",
        "positions": model.decoder.max_positions,
        "backend": jax.default_backend(),
    }


def fingerprint(model: CausalLM) -> str:
    """sha256 over the names, shapes and first 256 numbers of all weights."""
    digest = hashlib.sha256()
    for name, leaf in sorted(parameter_paths(model.params).items()):
        digest.update(f"{name}{tuple(leaf.shape)}".encode())
        digest.update(np.asarray(jnp.ravel(leaf)[:256], np.float32).tobytes())
    return digest.hexdigest()


class OutOfTimeError(RetopkError):
    """The time given is over, and items are left to do."""


class Progress:
    """Says what has been done, and how long the rest may take; ends a run whose time is over."""

    def __init__(self, total: int, minutes: float | None):
        self._total, self._done, self._fresh = total, 0, 0
        self._minutes = minutes
        self._began = time.perf_counter()

    def step(self, what: str, *, resumed: bool = False) -> None:
        """One item more is done.

        Raises:
            OutOfTimeError: more are to be done, and the time is over.
        """
        self._done += 1
        if resumed:
            note = "had been done"
        else:
            self._fresh += 1
            taken = (time.perf_counter() - self._began) / self._fresh
            note = f"about {taken * (self._total - self._done):.0f} s to go"
        print(f"[{self._done}/{self._total}] {what} ({note})", file=sys.stderr, flush=True)
        late = self._minutes is not None and (
            time.perf_counter() - self._began > 60 * self._minutes
        )
        if late and self._done < self._total:
            forget_programs()
            raise OutOfTimeError(
                f"--minutes {self._minutes:g} are over with {self._done} of {self._total} items "
                "done and saved; the same command goes on from there"
            )


def console() -> Console:
    """Where results are shown: as wide as the terminal, and wide enough where there is none."""
    shown = Console(highlight=False)
    return shown if shown.is_terminal else Console(width=160, highlight=False)


def result_path(args: argparse.Namespace, name: str) -> Path:
    """File of a result."""
    return args.out / (f"{name}-{args.tag}.json" if args.tag else f"{name}.json")
