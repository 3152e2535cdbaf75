"""The default configuration on several models, side by side, without retuning.

Token ids differ from model to model, so documents are cut anew with each model's tokenizer; every
model is compared with its own Exact Top-K and Full.
"""

import copy
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks.evidence.arguments import console, fill, make_parser, result_path
from benchmarks.evidence.experiment import (
    against_exact,
    against_full,
    rows_of,
    score_scene,
    set_scene,
)
from benchmarks.evidence.methods import title
from benchmarks.evidence.suffix import Plan
from benchmarks.perplexity import interval
from benchmarks.results_file import write_results

NORMAL = {
    "methods": ["full", "exact", "retopk"],
    "budgets": [512],
    "lengths": [8192],
    "documents": 16,
    "rows": 8,
    "suffix": 512,
}
SMOKE = {"budgets": [32], "lengths": [256], "documents": 2, "rows": 2, "suffix": 9}


def main(argv: Sequence[str]) -> None:
    """Runs the experiment; see ``--help``."""
    parser = make_parser("transfer", __doc__)
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="instead of --model")
    parser.add_argument("--suffix", type=int, metavar="N", help="tokens fed at the end (512)")
    args = parser.parse_args(argv)
    fill(args, NORMAL, SMOKE)
    plan = Plan.of(args, args.lengths, args.suffix)
    rows: list[dict[str, Any]] = []
    settings: dict[str, Any] = {"models": {}}
    commits: set[str] = set()
    for source in args.models or [args.model]:
        scene = set_scene(copy.copy(args), plan, model_source=source)
        found, store = score_scene(args, scene, plan, "perplexity")
        references = (("against_exact", against_exact), ("against_full", against_full))
        name = scene.settings["model"]["source"]
        for row in rows_of(scene, plan, found, args.seed, references):
            rows.append({"model": name, **row})
        settings["models"][name] = scene.settings
        commits.update(store.commits())
    path = result_path(args, "transfer")
    write_results(path, "transfer", settings, rows, item_commits=sorted(commits))
    table = Table("model", "length", "K", "method", "PPL", "over Exact", "reuse", "speed")
    for row in rows:
        shares, speed = row.get("path_shares"), row.get("speed_over_exact")
        table.add_row(
            row["model"],
            f"{row['length']:,}",
            "" if row["budget"] is None else str(row["budget"]),
            title(row["method"]),
            f"{row['perplexity']:.3f}",
            interval(row.get("against_exact")),
            "" if shares is None else f"{shares['reuse']:.1%}",
            "" if speed is None else f"{speed:.2f}x",
        )
    console().print(table)
    console().print(f"Written to {path}")
