"""`retopk calibrate`: fits what a method learns from a text, and keeps it in a file."""

import argparse

from rich.console import Console

from models import load_model
from retopk_jax.attention.checks import check_integer
from retopk_jax.calibration import calibrate_loki, save_basis
from retopk_jax.cli_files import check_target
from retopk_jax.errors import PromptError


def run_calibrate(args: argparse.Namespace) -> None:
    """Loads a model, reads the text, writes the basis.

    Raises:
        RetopkError: a setting is out of range or a text cannot be used.
        ModelError: the model cannot be loaded.
    """
    check_target(args.out, "--out")
    if args.window is not None:
        check_integer("--window", args.window, minimum=1)
    for path in args.text:
        if not path.is_file():
            raise PromptError(f"--text {path}: no such file")
    console = Console(stderr=True, highlight=False)
    with console.status(f"loading {args.model}"):
        model = load_model(args.model, dtype=args.dtype)
    for note in model.notes:
        console.print(f"note: {note}", markup=False)

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
