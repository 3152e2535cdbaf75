"""ReTopK with one setting changed at a time: K, C, R, tau, the refresh interval, W / C.

Changes of tau and of the refresh interval run the program that the default was compiled to.
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
from benchmarks.evidence.methods import Variant, make_variants
from benchmarks.evidence.plots import pyplot, require_matplotlib, save
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

SETTINGS: dict[str, dict[str, list[Any]]] = {
    "K": {"budget": [0.5, 2]},
    "C": {"capacity": [16, 64]},
    "R": {"recall": [2, 8]},
    "tau": {"tau": [0.75, 0.8, 0.9, 0.95]},
    "T_r": {"refresh": [0, 32, 64]},
    "W/C": {"window": [64, 512]},
}
"""What is tried besides the default; K as a multiple of the budget."""


def main(argv: Sequence[str]) -> None:
    """Runs the experiment; see ``--help``."""
    parser = make_parser("sensitivity", __doc__)
    parser.add_argument("--suffix", type=int, metavar="N", help="tokens fed at the end (512)")
    parser.add_argument(
        "--settings", nargs="+", choices=list(SETTINGS), help="those to change (all)"
    )
    args = parser.parse_args(argv)
    fill(args, {**NORMAL, "settings": list(SETTINGS)}, {**SMOKE, "settings": ["K", "tau", "T_r"]})
    require_matplotlib()

    def make(model: CausalLM) -> list[Variant]:
        return setting_variants(args.methods, args.budgets, args.settings)

    plan = Plan.of(args, args.lengths, args.suffix)
    scene = set_scene(args, plan, make)
    found, store = score_scene(args, scene, plan, "perplexity")
    references = (("against_exact", against_exact), ("against_full", against_full))
    rows = rows_of(scene, plan, found, args.seed, references)
    for row in rows:
        change = row["label"].partition(" | ")[2].rpartition(" K=")[0]
        row["setting"], _, value = change.partition("=")
        row["value"] = float(value) if value else None
    path = result_path(args, "sensitivity")
    for row in rows:
        if row["setting"] and row["budget"] in args.budgets:
            row["plots"] = [picture(path, row["length"], row["budget"]).name]
    draw_all(path, rows)
    write_results(path, "sensitivity", scene.settings, rows, item_commits=store.commits())
    table = Table(
        "length",
        "K",
        "variant",
        "PPL",
        "over Exact",
        "reuse",
        "fallback",
        "refresh",
        "candidates",
        "speed",
    )
    for row in rows:
        shares, speed = row.get("path_shares"), row.get("speed_over_exact")
        table.add_row(
            f"{row['length']:,}",
            "" if row["budget"] is None else str(row["budget"]),
            row["label"],
            f"{row['perplexity']:.3f}",
            interval(row.get("against_exact")),
            *(
                "" if shares is None else f"{shares[name]:.1%}"
                for name in ("reuse", "fallback", "refresh")
            ),
            f"{row['mean_candidates']:.0f}" if "mean_candidates" in row else "",
            "" if speed is None else f"{speed:.2f}x",
        )
    console().print(table)
    console().print(f"Written to {path}")


def setting_variants(
    methods: Sequence[str], budgets: Sequence[int], settings: Sequence[str]
) -> list[Variant]:
    """Full, Exact Top-K, the default and every change of one setting, at every budget."""
    found = {v.label: v for v in make_variants(["full", "exact"], budgets, None)}
    for method in methods:
        for budget in budgets:
            (base,) = make_variants([method], [budget], None)
            default = base.changed(f"{method} | default", {})
            found[default.label] = default
            for setting in settings:
                for field, values in SETTINGS[setting].items():
                    for value in values:
                        if setting == "K":
                            size = int(value * budget)
                            (other,) = make_variants([method], [size], None)
                            changed = other.changed(f"{method} | K={size}", {})
                            exact = make_variants(["exact"], [size], None)[0]
                            found[exact.label] = exact
                        elif setting == "W/C":
                            changed = base.changed(f"{method} | W/C={value // 32}", {field: value})
                        else:
                            changed = base.changed(f"{method} | {setting}={value}", {field: value})
                        found[changed.label] = changed
    return list(found.values())


def picture(path: Path, length: int, budget: int) -> Path:
    """Where the picture of a length and a budget lies, beside its result file."""
    return path.with_name(f"{path.stem}_{length}_K{budget}.png")


def draw_all(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """A picture for every length and budget whose default was scored."""
    for row in rows:
        if row["setting"] == "default":
            length, budget = row["length"], row["budget"]
            draw(picture(path, length, budget), rows, length, budget)


def draw(path: Path, rows: Sequence[dict[str, Any]], length: int, budget: int) -> None:
    """Speed against change of perplexity, a panel a setting, and the path shares below."""
    plt = pyplot()
    here = [row for row in rows if row["length"] == length and "path_shares" in row]
    default = next(r for r in here if r["label"].endswith(f"default K={budget}"))
    named = [name for name in SETTINGS if any(r["setting"] == name for r in here)]
    figure, axes = plt.subplots(2, len(named), figsize=(3.3 * len(named), 6.2), squeeze=False)
    start = {"K": budget, "C": 32, "R": 4, "tau": 0.85, "T_r": 128, "W/C": 1}
    for column, name in enumerate(named):
        tried = [(start[name], default)] + [
            (r["value"], r)
            for r in here
            if r["setting"] == name and (name == "K" or r["budget"] == budget)
        ]
        tried.sort(key=lambda pair: pair[0])
        top, bottom = axes[0][column], axes[1][column]
        for value, row in tried:
            over, speed = row.get("against_exact"), row.get("speed_over_exact")
            if over is None or speed is None:
                continue
            top.errorbar(
                speed,
                over["percent"],
                yerr=[[over["percent"] - over["low"]], [over["high"] - over["percent"]]],
                fmt="D" if row is default else "o",
                color="#d55e00" if row is default else "#0072b2",
                capsize=2,
            )
            top.annotate(
                f"{value:g}", (speed, over["percent"]), xytext=(4, 4), textcoords="offset points"
            )
        top.set_title(name)
        top.set_xlabel("speed over Exact Top-K, decode step")
        top.axhline(0, color="#999999", linewidth=0.8)
        labels = [f"{value:g}" for value, _ in tried]
        floor = [0.0] * len(tried)
        for share, color in (("reuse", "#0072b2"), ("fallback", "#d55e00"), ("refresh", "#009e73")):
            heights = [100 * row["path_shares"][share] for _, row in tried]
            bottom.bar(labels, heights, bottom=floor, color=color, label=share)
            floor = [a + b for a, b in zip(floor, heights, strict=True)]
        bottom.set_xlabel(name)
    axes[0][0].set_ylabel("perplexity over Exact Top-K, %")
    axes[1][0].set_ylabel("head-steps, %")
    axes[1][-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(f"K={budget}, {length:,} tokens; the default is the diamond")
    figure.tight_layout()
    save(figure, path)
