"""`retopk calibrate`: fits what a method learns from a text, and keeps it in a file."""

import argparse
from collections.abc import Callable
from typing import Any

from rich.console import Console

from models import CausalLM, load_model
from retopk_jax.attention import ReTopK
from retopk_jax.attention.checks import check_integer
from retopk_jax.calibration import (
    Target,
    calibrate_loki,
    calibrate_retopk,
    save_basis,
    save_policy,
)
from retopk_jax.cli_files import check_target
from retopk_jax.errors import ConfigError, PromptError

SIZES = ("budget", "capacity", "recall", "window", "refresh", "tau")
"""Options that set `ReTopK`."""

PLAN = ("context", "steps", "windows", "rows", "rounds")
"""Options that say how much is decoded for `ReTopK`."""


def run_calibrate(args: argparse.Namespace) -> None:
    """Loads a model, reads the text, writes what was fitted.

    Raises:
        RetopkError: a setting is out of range or a text cannot be used.
        ModelError: the model cannot be loaded.
    """
    check_target(args.out, "--out")
    fit = {"loki": _loki, "retopk": _retopk}[args.method](args)
    for path in args.text:
        if not path.is_file():
            raise PromptError(f"--text {path}: no such file")
    console = Console(stderr=True, highlight=False)
    with console.status(f"loading {args.model}"):
        model = load_model(args.model, dtype=args.dtype)
    for note in model.notes:
        console.print(f"note: {note}", markup=False)
    fit(model, console)


Fit = Callable[[CausalLM, Console], None]


def _loki(args: argparse.Namespace) -> Fit:
    """Checks the options of Loki; returns what fits and writes the basis."""
    for name in (*SIZES, *PLAN, "target", "error"):
        if name != "window" and getattr(args, name) is not None:
            raise ConfigError(f"--{name} does not apply to --method loki")
    if args.window is not None:
        check_integer("--window", args.window, minimum=1)

    def fit(model: CausalLM, console: Console) -> None:
        def progress(done: int, total: int) -> None:
            console.print(f"read {done:,} of {total:,} tokens")

        basis = calibrate_loki(model, args.text, window=args.window, progress=progress)
        save_basis(args.out, basis)
        dim = basis.basis.shape[-1]
        ranks = ", ".join(f"{share:.0%} by {basis.rank_of(share)}" for share in (0.9, 0.95, 0.99))
        console.print(
            f"{args.out}: of {dim} components, variance explained in every layer and head: {ranks}",
            markup=False,
        )

    return fit


def _retopk(args: argparse.Namespace) -> Fit:
    """Checks the options of ReTopK; returns what fits and writes the policy."""
    method = ReTopK(**_given(args, SIZES))
    plan, fitted = _given(args, PLAN), _given(args, ("error",))
    target = Target.parse("tau=0.85" if args.target is None else args.target)
    for name, value in plan.items():
        check_integer(f"--{name}", value, minimum=int(name != "rounds"))

    def fit(model: CausalLM, console: Console) -> None:
        def progress(done: int, total: int) -> None:
            console.print(f"decoded {done:,} of {total:,} batches of windows")

        policy = calibrate_retopk(
            model, args.text, method, target=target, **fitted, **plan, progress=progress
        )
        save_policy(args.out, policy)
        for turn, seen in enumerate(policy.provenance["rounds"]):
            by = f"tau={method.tau:g} of groups" if turn == 0 else "the policy fitted before"
            console.print(
                f"decode {turn + 1}, by {by}: {seen['groups_scanned']:.1%} of KV groups scanned, "
                f"error {seen['error']:.4f}; theta for the target {seen['theta']:.4g}",
                markup=False,
            )
        console.print(f"{args.out}: theta {policy.theta:.4g}", markup=False)

    return fit


def _given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(args, name)) is not None}
