"""How near a method's supports and outputs are to exact ones, per layer and head.

In every step of a teacher-forced suffix the exact support of the same query over the same keys is
computed beside the method's own; the method's output is what the model goes on with.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.evidence.arguments import console, fill, make_parser, result_path
from benchmarks.evidence.experiment import rows_of, score_scene, set_scene
from benchmarks.evidence.measured import (
    EDGES,
    METRICS,
    PATHS,
    Measured,
    correlation,
    means,
    sums_of,
)
from benchmarks.evidence.methods import Variant, make_variants, title
from benchmarks.evidence.plots import curves, head_maps, require_matplotlib
from benchmarks.evidence.suffix import Plan
from benchmarks.results_file import write_results
from models import CausalLM
from retopk_jax.decode import DecodeState
from retopk_jax.errors import ConfigError

NORMAL = {
    "methods": ["retopk", "retopk:tau=-1"],
    "budgets": [128],
    "lengths": [8192],
    "documents": 8,
    "rows": 8,
    "suffix": 512,
}
SMOKE = {"budgets": [32], "lengths": [256], "documents": 2, "rows": 2, "suffix": 17}

MAPS = ("support_recall", "retained_mass", "relative_mass", "output_cosine", "relative_error")


def main(argv: Sequence[str]) -> None:
    """Runs the experiment; see ``--help``."""
    parser = make_parser("fidelity", __doc__)
    parser.add_argument("--suffix", type=int, metavar="N", help="tokens fed at the end (512)")
    args = parser.parse_args(argv)
    fill(args, NORMAL, SMOKE)
    require_matplotlib()
    if any(name.partition(":")[0] in ("full", "loki") for name in args.methods):
        raise ConfigError("--methods: fidelity takes methods with a budget and no basis")

    def make(model: CausalLM) -> list[Variant]:
        found = []
        for variant in make_variants(args.methods, args.budgets, None):
            measured = Measured(variant.method, variant.budget or 0)
            found.append(Variant(variant.label, variant.name, variant.budget, measured))
        return found

    plan = Plan.of(args, args.lengths, args.suffix)
    scene = set_scene(args, plan, make)

    def extra(state: DecodeState, count: int) -> dict[str, Any]:
        return sums_of(state.layers, count)

    found, store = score_scene(args, scene, plan, "measured", extra)
    rows = rows_of(scene, plan, found, args.seed, ())
    path = result_path(args, "fidelity")
    for row in rows:
        del row["step_milliseconds"]  # the exact support beside it is part of the step
        batches = found.batches[row["length"], row["label"]]
        sums = sum(np.asarray(batch["sums"]) for batch in batches)
        groups = sum(np.asarray(batch["groups"]) for batch in batches)
        row.update(fidelity_of(np.asarray(sums), np.asarray(groups)))
        row["true_error_per_document"] = [one for batch in batches for one in batch["errors"]]
        if "predicted_error" in row:
            row["predicted_error_per_document"] = [
                entry["predicted_error"] / sum(entry["paths"])
                for entry in found.documents[row["length"], row["label"]]
            ]
        row["plots"] = draw(path, row)
    settings = {**scene.settings, "bins": list(EDGES), "paths": list(PATHS)}
    write_results(path, "fidelity", settings, rows, item_commits=store.commits())
    table = Table(
        "length",
        "K",
        "method",
        "path",
        "share",
        "recall",
        "mass",
        "of Exact's",
        "distribution",
        "output",
        "error",
    )
    for row in rows:
        for name in ("all", *PATHS):
            one = row["by_path"][name]
            if one["count"] == 0:
                continue
            table.add_row(
                f"{row['length']:,}",
                str(row["budget"]),
                title(row["method"]),
                name,
                f"{one['count'] / row['by_path']['all']['count']:.1%}",
                *(
                    f"{one[metric]:.4f}"
                    for metric in (
                        "support_recall",
                        "retained_mass",
                        "relative_mass",
                        "distribution_cosine",
                        "output_cosine",
                        "relative_error",
                    )
                ),
            )
    console().print(table)
    for row in rows:
        console().print(
            f"{row['label']}: at least one head of a KV group falls back in "
            f"{row['groups_with_fallback']:.1%} of group-steps"
        )
    console().print(f"Written to {path}")


def fidelity_of(sums: np.ndarray, groups: np.ndarray) -> dict[str, Any]:
    """Means by path, by similarity and by head.

    Args:
        sums: ``[layers, H, paths, bins, metrics]``.
        groups: ``[layers, G, 2]``.
    """
    reuse = sums[:, :, 0]  # [layers, H, bins, metrics]
    by_head = sums.sum(axis=3)  # [layers, H, paths, metrics]
    everything = by_head.sum(axis=2)  # [layers, H, metrics]
    return {
        "by_path": {
            "all": means(sums.sum(axis=(0, 1, 2, 3))),
            **{path: means(sums[:, :, i].sum(axis=(0, 1, 2))) for i, path in enumerate(PATHS)},
        },
        "reuse_by_similarity": [
            {
                "from": None if place == 0 else EDGES[place - 1],
                **means(reuse[:, :, place].sum(axis=(0, 1))),
            }
            for place in range(len(EDGES) + 1)
        ],
        "maps": {
            "all": {name: _map(everything, name) for name in MAPS},
            "reuse": {name: _map(by_head[:, :, 0], name) for name in MAPS},
            "fallback_share": _listed(by_head[:, :, 1, 0] / np.maximum(everything[:, :, 0], 1)),
            "similarity": _map(everything, "similarity"),
            "error_by_similarity_on_reuse": [
                [correlation(reuse[i, h].sum(axis=0)) for h in range(sums.shape[1])]
                for i in range(sums.shape[0])
            ],
        },
        "groups_with_fallback": float(groups[..., 0].sum() / max(groups[..., 1].sum(), 1)),
        "groups_with_fallback_by_layer": _listed(
            groups[..., 0].sum(axis=1) / np.maximum(groups[..., 1].sum(axis=1), 1)
        ),
    }


def draw_all(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Pictures of all rows, beside their result file."""
    for row in rows:
        draw(path, row)


def draw(path: Path, row: dict[str, Any]) -> list[str]:
    """Pictures of a row, beside its result file; returns their names."""
    stem = f"{path.stem}_{row['label'].replace(' ', '_').replace(':', '_')}_{row['length']}"
    reuse, maps = row["maps"]["reuse"], row["maps"]
    head_maps(
        path.with_name(f"{stem}_maps.png"),
        {
            "fallback share": _array(maps["fallback_share"]),
            "support recall (reuse)": _array(reuse["support_recall"]),
            "mass of Exact's (reuse)": _array(reuse["relative_mass"]),
            "output cosine (reuse)": _array(reuse["output_cosine"]),
            "relative error (reuse)": _array(reuse["relative_error"]),
        },
        f"{title(row['method'])}, K={row['budget']}, {row['length']:,} tokens",
    )
    bins = [one for one in row["reuse_by_similarity"] if one["count"] > 0]
    middle = [one["similarity"] for one in bins]
    curves(
        path.with_name(f"{stem}_similarity.png"),
        {
            name.replace("_", " "): (middle, [one[name] for one in bins])
            for name in ("support_recall", "relative_mass", "output_cosine", "relative_error")
        },
        x="largest similarity to a remembered query",
        y="mean over reuse head-steps",
        title=f"{title(row['method'])}, K={row['budget']}, {row['length']:,} tokens",
    )
    return [f"{stem}_maps.png", f"{stem}_similarity.png"]


def _map(sums: np.ndarray, name: str) -> list[Any]:
    """Mean of a metric, ``[layers][H]``, None where nothing was counted."""
    count = sums[..., 0]
    mean = sums[..., METRICS.index(name)] / np.where(count > 0, count, 1)
    return _listed(np.where(count > 0, mean, np.nan))


def _listed(values: np.ndarray) -> list[Any]:
    """Nested lists of five decimals; None for NaN."""
    return [
        _listed(value)
        if isinstance(value, np.ndarray)
        else (None if np.isnan(value) else round(float(value), 5))
        for value in values
    ]


def _array(values: list[Any]) -> np.ndarray:
    return np.asarray(values, np.float64)  # None becomes NaN
