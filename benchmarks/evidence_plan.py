"""Runs the experiments of a plan one after the other, for machines that are had for minutes.

The plan `h200` is what the project commits of SmolLM2-135M-Instruct; `policies` sets ways to choose
the path against each other on it, under the project's maps of expected errors, and `policies-qwen`
does so on Qwen2.5-Coder-0.5B-Instruct. Steps run in one process, so that programs of one size are
compiled once; what is done is kept under --out and skipped when the command is run again, and
--minutes ends it in good time. With --archive all results and saved items are packed into one file,
and unpacked from it first where it exists.
"""

import argparse
import importlib
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.evidence.arguments import OutOfTimeError
from benchmarks.evidence.resume import ITEMS
from benchmarks.results_file import ROOT, prepare_directory
from models import ModelError
from retopk_jax.errors import ConfigError, RetopkError


@dataclass(frozen=True)
class Item:
    """One step of a plan.

    Attributes:
        name: of the step, and the tag of its result.
        command: an experiment.
        arguments: its own; ``{maps}`` stands for `MAPS`.
        texts: what it reads: ``documents`` or ``essay``.
    """

    name: str
    command: str
    arguments: str
    texts: str = "documents"


MAPS = ROOT / "benchmarks" / "results"
"""Where maps of expected errors lie."""

METHODS = "--methods full exact retopk streaming quest sparq loki tokenselect "
BUDGETS = "--budgets 128 64 512 256 "
TASK_BUDGETS = "--budgets 128 64 512 "
DOCUMENT_ROWS = "--documents 32 --rows 32 --capacity 8192"
SAMPLE_ROWS = METHODS + TASK_BUDGETS + "--documents 50 --rows 50 --capacity 8192"
VARIANTS = "--timed --lengths 8192 --budgets 128 64 " + DOCUMENT_ROWS
FORCED = "--lengths 4096 --continuation 4096 --budgets 128 --documents 8 --rows 8 --capacity 8192"

H200 = (
    Item("8k", "perplexity", f"--lengths 8192 {METHODS}{BUDGETS}{DOCUMENT_ROWS}"),
    Item("4k", "perplexity", f"--lengths 4096 {METHODS}{BUDGETS}{DOCUMENT_ROWS}"),
    Item("2k", "perplexity", f"--lengths 2048 {METHODS}{BUDGETS}{DOCUMENT_ROWS}"),
    Item("4k", "niah", f"--lengths 4096 {SAMPLE_ROWS}", "essay"),
    Item("8k", "niah", f"--lengths 8192 {SAMPLE_ROWS}", "essay"),
    Item("2k", "niah", f"--lengths 2048 {SAMPLE_ROWS}", "essay"),
    Item(
        "8k",
        "fidelity",
        "--lengths 8192 --budgets 128 64 --documents 8 --rows 8 --capacity 8192",
    ),
    Item("8k", "ablation", VARIANTS),
    Item("8k", "sensitivity", VARIANTS),
    Item("4k_4k_forced", "long_horizon", f"--part forced {FORCED}"),
    Item("4k_4k", "long_horizon", FORCED),
    Item(
        "16k",
        "perplexity",
        f"--lengths 16384 {METHODS}{BUDGETS}--documents 32 --rows 32 --rope yarn:2",
    ),
)

TAUS = "--taus 0.7 0.8 0.85 0.9 0.98 "
QWEN = f"--budgets 128 256 --documents 32 --rows 32 --capacity 16384 {TAUS}"
QWEN += "--shares 0.01 0.02 0.04 0.1 0.2 --risk {maps}/maps-qwen-8k-{K}.npz"
SMOLLM2_RISK = "retopk:risk={maps}/maps-smollm2-4k-{K}.npz,share="
OPERATING = f"retopk retopk:share_scan=true {SMOLLM2_RISK}0.05 {SMOLLM2_RISK}0.1"
SAMPLES = (
    f"--methods full exact {OPERATING} {SMOLLM2_RISK}0.2 --budgets 64 128 --rows 50 --capacity 8192"
)
LONG = "--lengths 4096 --continuation 4096 --budgets 128 --documents 16 --rows 16 --refresh 128 "
LONG += "--capacity 8192"

POLICIES = (
    Item(
        "smollm2-8k",
        "policy",
        f"--lengths 8192 --budgets 64 128 --documents 64 --rows 64 --capacity 8192 {TAUS}"
        "--shares 0.01 0.02 0.04 0.07 0.1 0.2 0.3 --risk {maps}/maps-smollm2-4k-{K}.npz",
    ),
    Item("policies-4k", "niah", f"--lengths 4096 --documents 100 {SAMPLES}", "essay"),
    Item("policies-8k", "niah", f"--lengths 8192 --documents 50 {SAMPLES}", "essay"),
    Item("policies", "long_horizon", f"--part forced {LONG} --methods {OPERATING}"),
    Item(
        "policies_shadow",
        "long_horizon",
        f"--part shadow {LONG} --methods retopk {SMOLLM2_RISK}0.1",
    ),
)

QWEN_POLICIES = (
    Item("qwen-8k", "policy", f"--lengths 8192 {QWEN}"),
    Item("qwen-16k", "policy", f"--lengths 16384 {QWEN}"),
)

SMOKE = (
    Item("a", "perplexity", "--smoke --methods full exact retopk"),
    Item("b", "niah", "--smoke --methods full retopk --lengths 1024", "essay"),
    Item("c", "fidelity", "--smoke --methods retopk"),
)

PLANS = {
    "h200": H200,
    "policies": POLICIES,
    "policies-qwen": QWEN_POLICIES,
    "smoke": SMOKE,
}


def main(argv: Sequence[str]) -> None:
    """Runs a plan; see ``--help``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks evidence-plan", description=__doc__)
    add = parser.add_argument
    add("--plan", choices=list(PLANS), default="h200", help="(%(default)s)")
    add("--out", type=Path, required=True, help="directory for the results")
    add("--model", help="what load_model takes")
    add("--texts", type=Path, help="documents from `documents`; h200: 33 of 16,384 tokens")
    add("--essay", type=Path, help="UTF-8 text of the haystacks")
    add("--minutes", type=float, help="stop after so long")
    add("--archive", type=Path, help=".tar.gz to resume from and to pack the results into")
    add("--steps", nargs="+", metavar="STEP", help="only these, as COMMAND-NAME; see --list")
    add("--list", action="store_true", help="print the steps and end")
    add("--compile-threads", type=int, default=8, help="programs compiled at once (%(default)s)")
    args = parser.parse_args(argv)
    steps = chosen_steps(args.plan, args.steps)
    if args.list:
        for step in steps:
            print(f"{step.command}-{step.name}: {step.arguments}")
        return
    out = prepare_directory(args.out)
    if args.archive is not None and args.archive.is_file():
        with tarfile.open(args.archive) as tar:
            tar.extractall(out, filter="data")
    began = time.monotonic()
    try:
        for step in steps:
            left = None
            if args.minutes is not None:
                left = args.minutes - (time.monotonic() - began) / 60
                if left <= 0:
                    print("time is over; the same command goes on from here", file=sys.stderr)
                    break
            if not run_step(step, args, out, left):
                break
            if args.archive is not None:
                pack(args.archive, out)
    finally:
        if args.archive is not None:
            pack(args.archive, out)


def chosen_steps(plan: str, names: Sequence[str] | None) -> list[Item]:
    """Steps of a plan.

    Raises:
        ConfigError: a name that is none of them.
    """
    known = {f"{step.command}-{step.name}": step for step in PLANS[plan]}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ConfigError(f"--steps {' '.join(unknown)}: expected some of {', '.join(known)}")
    return [known[name] for name in names] if names else list(known.values())


def run_step(step: Item, args: argparse.Namespace, out: Path, minutes: float | None) -> bool:
    """Runs a step; False when the time is over. Another failure is reported, and the next tried."""
    given = ["--out", str(out), "--tag", step.name]
    given += [part.replace("{maps}", str(MAPS)) for part in step.arguments.split()]
    given += ["--compile-threads", str(args.compile_threads)]
    if args.model is not None:
        given += ["--model", args.model]
    source = args.texts if step.texts == "documents" else args.essay
    if source is not None:
        given += ["--texts" if step.texts == "documents" else "--essay", str(source)]
    if minutes is not None:
        given += ["--minutes", f"{minutes:.3f}"]
    began = time.monotonic()
    name = f"{step.command}-{step.name}"
    print(f"== {name}", file=sys.stderr, flush=True)
    try:
        importlib.import_module(f"benchmarks.{step.command}").main(given)
    except OutOfTimeError as error:
        print(f"== {name}: {error}", file=sys.stderr, flush=True)
        return False
    except (RetopkError, ModelError) as error:
        print(f"== {name} failed: {error}", file=sys.stderr, flush=True)
    print(f"== {name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return True


def pack(archive: Path, out: Path) -> None:
    """Packs results, pictures and saved items into one file, written aside."""
    aside = archive.with_name(f".{archive.name}.aside")
    with tarfile.open(aside, "w:gz") as tar:
        for path in sorted(out.iterdir()):
            if path.suffix in (".json", ".png") or path.name == ITEMS:
                tar.add(path, path.name)
    aside.replace(archive)
