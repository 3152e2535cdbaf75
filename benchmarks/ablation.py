"""ReTopK without one of its components at a time.

Variants: the default, recent-R instead of similar-R, one entry recalled, a quarter of the
remembered entries, no similarity fallback (tau = -1), no recent window, no scheduled refresh.
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
from benchmarks.evidence.methods import Variant, make_variants
from benchmarks.evidence.suffix import Plan
from benchmarks.perplexity import interval
from benchmarks.results_file import write_results
from models import CausalLM

NORMAL = {
    "methods": ["retopk"],
    "budgets": [128],
    "lengths": [8192],
    "documents": 32,
    "rows": 8,
    "suffix": 512,
}
SMOKE = {"budgets": [32], "lengths": [256], "documents": 2, "rows": 2, "suffix": 9}

COMPONENTS = {
    "default": {},
    "recent R": {"recall_by": "recency"},
    "R = 1": {"recall": 1},
    "C = 8": {"capacity": 8},
    "no fallback": {"tau": -1.0},
    "no window": {"window": 0},
    "no refresh": {"refresh": 0},
}
"""What each variant sets of ReTopK."""


def main(argv: Sequence[str]) -> None:
    """Runs the experiment; see ``--help``."""
    parser = make_parser("ablation", __doc__)
    parser.add_argument("--suffix", type=int, metavar="N", help="tokens fed at the end (512)")
    args = parser.parse_args(argv)
    fill(args, NORMAL, SMOKE)

    def make(model: CausalLM) -> list[Variant]:
        return component_variants(args.methods, args.budgets)

    plan = Plan.of(args, args.lengths, args.suffix)
    scene = set_scene(args, plan, make)
    found, store = score_scene(args, scene, plan, "perplexity")
    references = (("against_exact", against_exact), ("against_full", against_full))
    rows = rows_of(scene, plan, found, args.seed, references)
    for row in rows:
        row["component"] = row["label"].partition(" | ")[2].rpartition(" K=")[0] or row["method"]
    path = result_path(args, "ablation")
    write_results(path, "ablation", scene.settings, rows, item_commits=store.commits())
    print_table(rows, path)


def component_variants(methods: Sequence[str], budgets: Sequence[int]) -> list[Variant]:
    """Full, Exact Top-K, and every variant of the methods named, at every budget."""
    found = make_variants(["full", "exact"], budgets, None)
    for method in methods:
        for budget in budgets:
            for component, changes in COMPONENTS.items():
                (base,) = make_variants([method], [budget], None)
                found.append(base.changed(f"{method} | {component}", changes))
    return found


def print_table(rows: Sequence[dict], path: object) -> None:
    """Shows perplexity, paths, candidates and speed of every row."""
    table = Table(
        "length", "K", "variant", "PPL", "over Exact", "exact path", "candidates", "speed"
    )
    for row in rows:
        rate, unique = row.get("exact_path_rate"), row.get("mean_candidates")
        speed = row.get("speed_over_exact")
        table.add_row(
            f"{row['length']:,}",
            "" if row["budget"] is None else str(row["budget"]),
            row["component"],
            f"{row['perplexity']:.3f}",
            interval(row.get("against_exact")),
            "" if rate is None else f"{rate:.1%}",
            "" if not unique else f"{unique:.0f}",
            "" if speed is None else f"{speed:.2f}x",
        )
    console().print(table)
    console().print(f"Written to {path}")
