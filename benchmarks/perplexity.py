"""Perplexity of a teacher-forced suffix after dense prefill, with every method.

All methods of a run continue from one prefill of each batch of documents. Items are kept under
--out; a run that was stopped goes on where it was.
"""

from collections.abc import Sequence

from rich.table import Table

from benchmarks.evidence.arguments import console, fill, make_parser, result_path
from benchmarks.evidence.experiment import (
    against_exact,
    against_full,
    rows_of,
    score_scene,
    set_scene,
)
from benchmarks.evidence.methods import ALL, title
from benchmarks.evidence.suffix import Plan
from benchmarks.results_file import write_results

NORMAL = {
    "methods": list(ALL),
    "budgets": [512],
    "lengths": [8192],
    "documents": 32,
    "rows": 8,
    "suffix": 512,
}
SMOKE = {"budgets": [64], "lengths": [256, 384], "documents": 3, "rows": 2, "suffix": 9}


def main(argv: Sequence[str]) -> None:
    """Runs the experiment; see ``--help``."""
    parser = make_parser("perplexity", __doc__)
    parser.add_argument("--suffix", type=int, metavar="N", help="tokens fed at the end (512)")
    args = parser.parse_args(argv)
    fill(args, NORMAL, SMOKE)
    plan = Plan.of(args, args.lengths, args.suffix)
    scene = set_scene(args, plan)
    found, store = score_scene(args, scene, plan, "perplexity")
    references = (("against_exact", against_exact), ("against_full", against_full))
    rows = rows_of(scene, plan, found, args.seed, references)
    path = result_path(args, "perplexity")
    write_results(path, "perplexity", scene.settings, rows, item_commits=store.commits())
    table = Table("length", "K", "method", "PPL", "over Exact", "over Full", "reuse", "ms a step")
    for row in rows:
        shares = row.get("path_shares")
        table.add_row(
            f"{row['length']:,}",
            "" if row["budget"] is None else str(row["budget"]),
            title(row["method"]),
            f"{row['perplexity']:.3f}",
            *(interval(row.get(name)) for name, _ in references),
            "" if shares is None else f"{shares['reuse']:.1%}",
            f"{row['step_milliseconds']:.2f}",
        )
    console().print(table)
    console().print(f"Written to {path}")


def interval(difference: dict[str, float] | None) -> str:
    """A difference of perplexity in percent with its interval."""
    if difference is None:
        return ""
    return f"{difference['percent']:+.2f} % [{difference['low']:+.2f}, {difference['high']:+.2f}]"
