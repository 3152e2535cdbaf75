"""What scanning fewer KV groups costs: by a threshold a head, by one a group, and by risk.

Every policy continues from one prefill of each batch of documents. Perplexity over Exact Top-K is
set against the share of KV groups scanned, refreshes included: tau, tau where groups scan whole,
and theta of a file of `retopk calibrate --method retopk`, at the shares that the file tells of.
"""

from collections.abc import Sequence
from pathlib import Path
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
from benchmarks.evidence.methods import Variant, check_policies, make_variants
from benchmarks.evidence.plots import pyplot, require_matplotlib, save
from benchmarks.evidence.statistics import paired_difference
from benchmarks.evidence.suffix import Plan
from benchmarks.perplexity import interval
from benchmarks.results_file import write_results
from models import CausalLM
from retopk_jax.calibration import load_policy

NORMAL = {
    "methods": ["retopk"],
    "budgets": [128],
    "lengths": [8192],
    "documents": 32,
    "rows": 8,
    "suffix": 512,
    "taus": [0.7, 0.75, 0.8, 0.85, 0.9, 0.94, 0.98],
    "shares": [0.0, 0.01, 0.02, 0.04, 0.07, 0.1, 0.2, 0.3, 0.5],
}
SMOKE = {
    "budgets": [32],
    "lengths": [256],
    "documents": 2,
    "rows": 2,
    "suffix": 9,
    "taus": [0.6, 0.85],
    "shares": [0.02, 0.2],
}

REFERENCE = 0.85
"""The source's tau, with whose errors those of every policy are paired."""

KINDS = {"tau": "tau, a head", "shared": "tau, a group", "risk": "risk, a group"}


def main(argv: Sequence[str]) -> None:
    """Runs the experiment; see ``--help``."""
    parser = make_parser("policy", __doc__)
    parser.add_argument("--suffix", type=int, metavar="N", help="tokens fed at the end (512)")
    parser.add_argument(
        "--risk", metavar="FILE", help="maps of expected errors; {K} stands for the budget"
    )
    parser.add_argument(
        "--taus", type=float, nargs="+", metavar="TAU", help="with each head, and each group, alone"
    )
    parser.add_argument(
        "--shares", type=float, nargs="+", metavar="SHARE", help="of KV groups scanned under risk"
    )
    args = parser.parse_args(argv)
    fill(args, NORMAL, SMOKE)
    require_matplotlib()
    (method,) = args.methods

    def make(model: CausalLM) -> list[Variant]:
        if args.risk is not None:
            check_policies([f"retopk:risk={args.risk}"], args.budgets, model)
        return policy_variants(method, args.budgets, args.taus, args.risk, args.shares)

    plan = Plan.of(args, args.lengths, args.suffix)
    scene = set_scene(args, plan, make)
    found, store = score_scene(args, scene, plan, "perplexity")
    references = (("against_exact", against_exact), ("against_full", against_full))
    rows = rows_of(scene, plan, found, args.seed, references)
    path = result_path(args, "policy")
    for row in rows:
        kind, _, value = row["label"].rpartition(" K=")[0].partition(" ")
        row["policy"], row["value"] = (kind, float(value)) if kind in KINDS else (None, None)
    for row in rows:
        other = _row(rows, row, "tau", REFERENCE)
        if row["policy"] is not None and other is not None and other is not row:
            row["against_tau"] = paired_difference(
                row["nll_per_document"], other["nll_per_document"], plan.scored, args.seed
            )
        if row["policy"] is not None:
            row["plots"] = [picture(path, row["length"], row["budget"]).name]
    draw_all(path, rows)
    files = [args.risk.replace("{K}", str(budget)) for budget in args.budgets if args.risk]
    calibrations = [load_policy(file).provenance for file in files]
    settings = {**scene.settings, "calibrations": calibrations}
    write_results(path, "policy", settings, rows, item_commits=store.commits())
    print_table(rows, path)


def policy_variants(
    method: str,
    budgets: Sequence[int],
    taus: Sequence[float],
    risk: str | None,
    shares: Sequence[float],
) -> list[Variant]:
    """Full, Exact Top-K, and every policy at every budget.

    Args:
        method: ReTopK with its settings.
        budgets: K.
        taus: thresholds; that of the source is added.
        risk: file of maps; None for none.
        shares: of KV groups that the file's thetas scanned.
    """
    found = make_variants(["full", "exact"], budgets, None)
    for budget in budgets:
        (base,) = make_variants([method], [budget], None)
        for tau in sorted({*taus, REFERENCE}):
            found.append(base.changed(f"tau {tau:g}", {"tau": tau}))
            found.append(base.changed(f"shared {tau:g}", {"tau": tau, "share_scan": True}))
        for share in shares if risk is not None else ():
            name = ",".join(filter(None, [method.partition(":")[2], f"risk={risk},share={share}"]))
            (other,) = make_variants([f"retopk:{name}"], [budget], None)
            found.append(other.changed(f"risk {share:g}", {}))
    return found


def _row(
    rows: Sequence[dict[str, Any]], like: dict[str, Any], policy: str, value: float
) -> dict[str, Any] | None:
    """The row of a policy at a row's length and budget."""
    wanted = (like["length"], like["budget"], policy, value)
    keys = ("length", "budget", "policy", "value")
    return next((row for row in rows if tuple(row[key] for key in keys) == wanted), None)


def picture(path: Path, length: int, budget: int) -> Path:
    """Where the picture of a length and a budget lies, beside its result file."""
    return path.with_name(f"{path.stem}_{length}_K{budget}.png")


def draw_all(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """A picture for every length and budget."""
    for length, budget in sorted({(r["length"], r["budget"]) for r in rows if r["policy"]}):
        draw(picture(path, length, budget), rows, length, budget)


def draw(path: Path, rows: Sequence[dict[str, Any]], length: int, budget: int) -> None:
    """Perplexity over Exact Top-K against the share of KV groups scanned, with intervals."""
    figure, axis = pyplot().subplots(figsize=(6.4, 4.4))
    for kind, label in KINDS.items():
        mine = [
            row
            for row in rows
            if (row["length"], row["budget"], row["policy"]) == (length, budget, kind)
        ]
        mine.sort(key=lambda row: row["groups_scanned"])
        if not mine:
            continue
        over = [row["against_exact"] for row in mine]
        middle = [one["percent"] for one in over]
        low = [max(one["percent"] - one["low"], 0) for one in over]
        high = [max(one["high"] - one["percent"], 0) for one in over]
        scanned = [100 * row["groups_scanned"] for row in mine]
        axis.errorbar(scanned, middle, yerr=[low, high], marker="o", capsize=2, label=label)
    axis.axhline(0, color="grey", linewidth=0.8)
    axis.set_xlabel("KV groups scanned, %")
    axis.set_ylabel("perplexity over Exact Top-K, %")
    axis.set_title(f"K={budget}, {length:,} tokens")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    save(figure, path)


def print_table(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Shows scans, perplexity and expected error of every row."""
    table = Table("length", "K", "policy", "groups", "heads", "PPL", "over Exact", "over tau=.85")
    for row in rows:
        groups, heads = row.get("groups_scanned"), row.get("exact_path_rate")
        table.add_row(
            f"{row['length']:,}",
            "" if row["budget"] is None else str(row["budget"]),
            row["label"].rpartition(" K=")[0] or row["method"],
            "" if groups is None else f"{groups:.1%}",
            "" if heads is None else f"{heads:.1%}",
            f"{row['perplexity']:.3f}",
            interval(row.get("against_exact")),
            interval(row.get("against_tau")),
        )
    console().print(table)
    console().print(f"Written to {path}")
