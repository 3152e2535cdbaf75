"""What scanning fewer KV groups costs: by a threshold a head, by one a group, and by risk.

Every policy continues from one prefill of each batch of documents. Perplexity over Exact Top-K is
set against the share of KV groups scanned, refreshes included: tau, tau where groups scan whole,
and theta of files of `retopk calibrate --method retopk`, at the shares that a file tells of.
`python -m benchmarks report` draws the results, a picture a model.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
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
from benchmarks.evidence.plots import pyplot, save
from benchmarks.evidence.statistics import paired_difference
from benchmarks.evidence.suffix import Plan
from benchmarks.perplexity import interval
from benchmarks.results_file import write_results
from models import CausalLM
from retopk_jax.calibration import load_policy
from retopk_jax.errors import ConfigError

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
"""Policies; those of a file with a name are ``risk NAME``."""


def main(argv: Sequence[str]) -> None:
    """Runs the experiment; see ``--help``."""
    parser = make_parser("policy", __doc__)
    parser.add_argument("--suffix", type=int, metavar="N", help="tokens fed at the end (512)")
    parser.add_argument(
        "--risk",
        nargs="+",
        default=[],
        metavar="[NAME=]FILE",
        help="maps of expected errors, with a name where there are several; {K} stands for the "
        "budget",
    )
    parser.add_argument(
        "--taus", type=float, nargs="+", metavar="TAU", help="with each head, and each group, alone"
    )
    parser.add_argument(
        "--shares", type=float, nargs="+", metavar="SHARE", help="of KV groups scanned under risk"
    )
    args = parser.parse_args(argv)
    fill(args, NORMAL, SMOKE)
    (method,) = args.methods
    risks = named_files(args.risk)

    def make(model: CausalLM) -> list[Variant]:
        check_policies([f"retopk:risk={file}" for file in risks.values()], args.budgets, model)
        return policy_variants(method, args.budgets, args.taus, risks, args.shares)

    plan = Plan.of(args, args.lengths, args.suffix)
    scene = set_scene(args, plan, make)
    found, store = score_scene(args, scene, plan, "perplexity")
    references = (("against_exact", against_exact), ("against_full", against_full))
    rows = rows_of(scene, plan, found, args.seed, references)
    path = result_path(args, "policy")
    for row in rows:
        kind, _, value = row["label"].rpartition(" K=")[0].rpartition(" ")
        known = kind.partition(" ")[0] in KINDS
        row["policy"], row["value"] = (kind, float(value)) if known else (None, None)
    for row in rows:
        other = _row(rows, row, "tau", REFERENCE)
        if row["policy"] is not None and other is not None and other is not row:
            row["against_tau"] = paired_difference(
                row["nll_per_document"], other["nll_per_document"], plan.scored, args.seed
            )
    calibrations = [
        {"policy": kind, **load_policy(file.replace("{K}", str(budget))).provenance}
        for kind, file in risks.items()
        for budget in args.budgets
    ]
    settings = {**scene.settings, "calibrations": calibrations}
    equal = equal_perplexity(rows)
    write_results(path, "policy", settings, rows, equal=equal, item_commits=store.commits())
    print_table(rows, path)
    print_equal(equal)


def named_files(given: Sequence[str]) -> dict[str, str]:
    """Files of maps by their policy: ``risk``, or ``risk NAME`` where a name was given.

    Raises:
        ConfigError: two have the same name.
    """
    found: dict[str, str] = {}
    for text in given:
        match = re.fullmatch(r"([\w.-]+)=(.+)", text)
        kind, file = ("risk", text) if match is None else (f"risk {match[1]}", match[2])
        if kind in found:
            raise ConfigError(f"--risk {text}: expected another name than that of {found[kind]}")
        found[kind] = file
    return found


def policy_variants(
    method: str,
    budgets: Sequence[int],
    taus: Sequence[float],
    risks: Mapping[str, str],
    shares: Sequence[float],
) -> list[Variant]:
    """Full, Exact Top-K, and every policy at every budget.

    Args:
        method: ReTopK with its settings.
        budgets: K.
        taus: thresholds; that of the source is added.
        risks: files of maps by policy.
        shares: of KV groups that a file's thetas scanned.
    """
    found = make_variants(["full", "exact"], budgets, None)
    for budget in budgets:
        (base,) = make_variants([method], [budget], None)
        for tau in sorted({*taus, REFERENCE}):
            found.append(base.changed(f"tau {tau:g}", {"tau": tau}))
            found.append(base.changed(f"shared {tau:g}", {"tau": tau, "share_scan": True}))
        for kind, file in risks.items():
            for share in shares:
                options = [method.partition(":")[2], f"risk={file},share={share}"]
                name = "retopk:" + ",".join(filter(None, options))
                (other,) = make_variants([name], [budget], None)
                found.append(other.changed(f"{kind} {share:g}", {}))
    return found


def equal_perplexity(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How few KV groups a policy can scan, by its own settings here, for the source's perplexity.

    ``groups`` is the least share from which on no setting of the policy is worse than tau=.85 as
    far as the paired interval tells; ``groups_no_worse`` the least from which on none is worse on
    average. None where there is no such share.
    """
    found = []
    for row in rows:
        if (row["policy"], row["value"]) != ("tau", REFERENCE):
            continue
        same = [r for r in rows if (r["length"], r["budget"]) == (row["length"], row["budget"])]
        for kind in dict.fromkeys(r["policy"] for r in same if r["policy"] not in (None, "tau")):
            mine = sorted(
                (r for r in same if r["policy"] == kind), key=lambda r: -r["groups_scanned"]
            )
            entry: dict[str, Any] = {
                "length": row["length"],
                "budget": row["budget"],
                "policy": kind,
                "groups_by_tau": row["groups_scanned"],
            }
            entry["groups"] = _least_held(mine, "low")
            entry["groups_no_worse"] = _least_held(mine, "percent")
            found.append(entry)
    return found


def _least_held(rows: Sequence[dict[str, Any]], bound: str) -> float | None:
    """Least share of rows by descending share, up to the first that is worse than tau=.85."""
    held = itertools.takewhile(lambda row: row["against_tau"][bound] <= 0, rows)
    return min((row["groups_scanned"] for row in held), default=None)


def _row(
    rows: Sequence[dict[str, Any]], like: dict[str, Any], policy: str, value: float
) -> dict[str, Any] | None:
    """The row of a policy at a row's length and budget."""
    wanted = (like["length"], like["budget"], policy, value)
    keys = ("length", "budget", "policy", "value")
    return next((row for row in rows if tuple(row[key] for key in keys) == wanted), None)


def draw(path: Path, title: str, results: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Perplexity over Exact Top-K against the share of KV groups scanned, with paired intervals.

    Args:
        path: the picture.
        title: above all.
        results: rows of every result; each has a panel for each of its lengths and budgets.
    """
    panels: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for place, rows in enumerate(results):
        for row in rows:
            if row["policy"]:
                panels.setdefault((row["length"], row["budget"], place), []).append(row)
    kinds = list(dict.fromkeys(row["policy"] for rows in panels.values() for row in rows))
    across = min(2, len(panels))
    down = -(-len(panels) // across)
    figure, axes = pyplot().subplots(
        down,
        across,
        figsize=(0.8 + 4.4 * across, 1.2 + 3.0 * down),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    drawn = {}
    for axis, key in zip(axes.flat, sorted(panels), strict=False):
        rows = panels[key]
        for place, kind in enumerate(kinds):
            mine = sorted(
                (row for row in rows if row["policy"] == kind), key=lambda r: r["groups_scanned"]
            )
            if mine:
                drawn[kind] = _line(axis, mine, f"C{place}")
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.set_title(f"{key[0]:,} tokens, K={key[1]}, {rows[0]['documents']} documents", size=10)
        axis.grid(alpha=0.3)
        axis.set_xlabel("KV groups scanned, %")
        axis.tick_params(labelbottom=True)
    figure.suptitle(title)
    figure.supylabel("perplexity over Exact Top-K, %", size=10)
    figure.legend(
        [drawn[kind] for kind in kinds],
        [", ".join(filter(None, (KINDS[b], n))) for b, _, n in (k.partition(" ") for k in kinds)],
        loc="outside lower center",
        ncols=4,
        fontsize=9,
    )
    save(figure, path)


def _line(axis: Any, rows: Sequence[dict[str, Any]], color: str) -> Any:
    """One policy's rows with their intervals."""
    over = [row["against_exact"] for row in rows]
    return axis.errorbar(
        [100 * row["groups_scanned"] for row in rows],
        [one["percent"] for one in over],
        yerr=[
            [max(one["percent"] - one["low"], 0) for one in over],
            [max(one["high"] - one["percent"], 0) for one in over],
        ],
        marker="o",
        markersize=4,
        capsize=2,
        color=color,
    )


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


def print_equal(equal: Sequence[dict[str, Any]]) -> None:
    """Shows how few KV groups a policy can scan for the source's perplexity."""
    table = Table("length", "K", "policy", "tau=.85", "equal within interval", "on average")
    for entry in equal:
        shares = (entry["groups_by_tau"], entry["groups"], entry["groups_no_worse"])
        table.add_row(
            f"{entry['length']:,}",
            str(entry["budget"]),
            entry["policy"],
            *("" if share is None else f"{share:.1%}" for share in shares),
        )
    console().print(table)
