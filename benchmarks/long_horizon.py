"""Long continuations after prefill, with several refresh intervals.

(a) Teacher-forced: how the perplexity over Exact Top-K's develops along the continuation.
(b) Autoregressive: ReTopK's own tokens, with Exact Top-K run beside it on the same tokens; the
divergence KL(Exact || ReTopK) and the agreement of their likeliest tokens.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from benchmarks.evidence.arguments import Progress, console, fill, make_parser, result_path
from benchmarks.evidence.experiment import (
    Scene,
    against_exact,
    rows_of,
    score_scene,
    set_scene,
)
from benchmarks.evidence.methods import Variant, make_variants, short_labels
from benchmarks.evidence.plots import curves, require_matplotlib
from benchmarks.evidence.programs import begin
from benchmarks.evidence.resume import Store
from benchmarks.evidence.shadow import Pair, by_bucket, run_pair
from benchmarks.evidence.suffix import Plan
from benchmarks.results_file import write_results
from models import CausalLM
from retopk_jax.decode import prime
from retopk_jax.errors import ConfigError
from retopk_jax.prefill import prefill, rounded_capacity

NORMAL = {
    "methods": ["retopk"],
    "budgets": [128],
    "lengths": [4096],
    "documents": 8,
    "rows": 8,
    "continuation": 4096,
    "refresh": [0, 32, 128, 512],
    "buckets": 8,
}
SMOKE = {
    "budgets": [32],
    "lengths": [256],
    "documents": 2,
    "rows": 2,
    "continuation": 33,
    "refresh": [0, 8],
    "buckets": 2,
}


def main(argv: Sequence[str]) -> None:
    """Runs the experiment; see ``--help``."""
    parser = make_parser("long_horizon", __doc__)
    add = parser.add_argument
    add("--continuation", type=int, metavar="N", help="tokens after the prefill (4096)")
    add("--refresh", type=int, nargs="+", metavar="T", help="refresh intervals (0 32 128 512)")
    add("--buckets", type=int, metavar="N", help="parts of the continuation (8)")
    add("--temperature", type=float, default=1.0, help="of (b), 0 for greedy (%(default)s)")
    add("--part", choices=("both", "forced", "shadow"), default="both", help="(%(default)s)")
    args = parser.parse_args(argv)
    fill(args, NORMAL, SMOKE)
    require_matplotlib()
    if not all(method.partition(":")[0] == "retopk" for method in args.methods):
        raise ConfigError("--methods: long_horizon takes retopk, with its settings")
    if len(args.lengths) != 1:
        raise ConfigError("--lengths: long_horizon takes one length, that of the prefill")

    def make(model: CausalLM) -> list[Variant]:
        return interval_variants(args.methods, args.budgets, args.refresh)

    whole = args.lengths[0] + args.continuation
    plan = Plan.of(args, [whole], args.continuation, args.buckets)
    scene = set_scene(args, plan, make)
    path = result_path(args, "long_horizon")
    rows: list[dict[str, Any]] = []
    commits: list[str] = []
    if args.part != "shadow":
        found, store = score_scene(args, scene, plan, "long_horizon")
        rows = rows_of(scene, plan, found, args.seed, (("against_exact", against_exact),))
        for row in rows:
            entries = found.documents[row["length"], row["label"]]
            exact = found.documents[row["length"], f"exact K={row['budget']}"]
            row["part"] = "teacher-forced"
            row["by_position"] = positions(entries, exact)
            row["refresh"] = _refresh(row["label"])
        commits += store.commits()
    if args.part != "forced":
        more, shadow_commits = shadow_rows(args, scene)
        rows += more
        commits += shadow_commits
    plots = draw(path, rows)
    settings = {
        **scene.settings,
        "prefill": args.lengths[0],
        "continuation": args.continuation,
        "temperature": args.temperature,
        "divergence": "KL(Exact || ReTopK), nats, both on ReTopK's own tokens",
    }
    write_results(
        path, "long_horizon", settings, rows, item_commits=sorted(set(commits)), plots=plots
    )
    table = Table("part", "variant", "PPL", "over Exact, by position (%)", "KL", "top-1")
    for row in rows:
        parts = row["by_position"]
        forced = row["part"] == "teacher-forced"
        table.add_row(
            row["part"],
            row["label"],
            f"{row['perplexity']:.3f}" if forced else "",
            " ".join(f"{p['percent_over_exact']:+.2f}" for p in parts) if forced else "",
            "" if forced else f"{parts[-1]['kl_up_to']:.4f}",
            "" if forced else f"{parts[-1]['top1_agreement_up_to']:.2%}",
        )
    console().print(table)
    console().print(f"Written to {path}")


def interval_variants(
    methods: Sequence[str], budgets: Sequence[int], intervals: Sequence[int]
) -> list[Variant]:
    """Exact Top-K and every method with every refresh interval, at every budget."""
    found = []
    for budget in budgets:
        found += make_variants(["exact"], [budget], None)
        for base in make_variants(methods, [budget], None):
            found += [base.changed(f"{base.name} | T_r={t}", {"refresh": t}) for t in intervals]
    return found


def positions(
    entries: Sequence[dict[str, Any]], exact: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Perplexity over Exact Top-K's up to the end of every part of the continuation."""
    mine = np.sum([_buckets(entry) for entry in entries], axis=0)
    other = np.sum([_buckets(entry) for entry in exact], axis=0)
    tokens = np.sum([_tokens(entry) for entry in entries], axis=0)
    found = []
    for last in range(1, len(tokens) + 1):
        count = int(tokens[:last].sum())
        here = float((mine - other)[:last].sum()) / count
        part = float((mine - other)[last - 1]) / int(tokens[last - 1])
        found.append(
            {
                "to": count // len(entries),
                "percent_over_exact": 100 * math.expm1(here),
                "percent_over_exact_in_part": 100 * math.expm1(part),
            }
        )
    return found


def shadow_rows(args: argparse.Namespace, scene: Scene) -> tuple[list[dict[str, Any]], list[str]]:
    """Runs part (b); an item a batch of documents and variant."""
    model, documents, prefix = scene.model, scene.documents, args.lengths[0]
    capacity = args.capacity or rounded_capacity(prefix + args.continuation)
    key = {
        **{part: scene.settings[part] for part in ("model", "documents", "rows", "seed")},
        "prefill": prefix,
        "continuation": args.continuation,
        "temperature": args.temperature,
        "buckets": args.buckets,
    }
    variants = [v for v in scene.variants if v.name != "exact"]
    labels = {v.label: v.description()["settings"] for v in variants}
    store = Store(args.out, "shadow", key, labels)
    batches = range(0, len(documents.names), args.rows)
    progress = Progress(len(batches) * len(variants), args.minutes)
    window = documents.ending(prefix + args.continuation)
    found: dict[str, list[dict[str, Any]]] = {v.label: [] for v in variants}
    for first in batches:
        tokens = window[first : first + args.rows]
        for variant in variants:
            what = f"documents {first + 1} to {first + len(tokens)}"
            name = store.key(what, variant.label)
            item = store.load(name)
            resumed = item is not None
            if item is None:
                item = _shadow_item(args, model, tokens[:, :prefix], variant, capacity, first)
                store.save(name, item)
            found[variant.label].append(item)
            progress.step(f"{what}, {variant.label} beside Exact", resumed=resumed)
    rows = []
    for variant in variants:
        items = found[variant.label]
        weights = [item["documents"] for item in items]
        parts = []
        for at in range(args.buckets):
            here = [item["by_position"][at] for item in items]
            mean = {
                name: float(np.average([part[name] for part in here], weights=weights))
                for name in ("kl", "top1_agreement", "kl_up_to", "top1_agreement_up_to")
            }
            parts.append({"from": here[0]["from"], "to": here[0]["to"], **mean})
        rows.append(
            {
                "part": "autoregressive",
                "label": variant.label,
                "method": variant.name,
                "budget": variant.budget,
                "refresh": _refresh(variant.label),
                "documents": sum(weights),
                "by_position": parts,
                "distinct_tokens": float(
                    np.average([item["distinct_tokens"] for item in items], weights=weights)
                ),
            }
        )
    return rows, store.commits()


def _shadow_item(
    args: argparse.Namespace,
    model: CausalLM,
    prompts: np.ndarray,
    variant: Variant,
    capacity: int,
    first: int,
) -> dict[str, Any]:
    (exact,) = make_variants(["exact"], [variant.budget or 0], None)
    context = prefill(
        model,
        [prompt.tolist() for prompt in prompts],
        new_tokens=args.continuation,
        capacity=capacity,
        tail_queries=max(variant.method.tail_queries, 1),
    ).context
    copied = jax.tree.map(jnp.copy, context)
    pair = Pair(
        begin(context, prime(variant.method, context)),
        begin(copied, prime(exact.method, copied)),
        jnp.argmax(context.logits, axis=-1).astype(jnp.int32),
        jax.random.fold_in(jax.random.key(args.seed), first),
    )
    pair, divergence, agree, tokens = run_pair(
        variant.method,
        exact.method,
        model.params,
        pair,
        jnp.float32(args.temperature),
        decoder=model.decoder,
        steps=args.continuation,
    )
    decoded = np.asarray(tokens)
    return {
        "documents": len(prompts),
        "by_position": by_bucket(np.asarray(divergence), np.asarray(agree), args.buckets),
        "distinct_tokens": float(np.mean([len(set(row.tolist())) for row in decoded])),
    }


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Pictures of both parts, beside the result file; returns their names."""
    names = []
    panels = (
        ("teacher-forced", "percent_over_exact", "perplexity over Exact Top-K so far, %"),
        ("autoregressive", "kl_up_to", "mean KL(Exact || ReTopK) so far, nats"),
        ("autoregressive", "top1_agreement_up_to", "top-1 agreement with Exact Top-K so far"),
    )
    shown = short_labels(row["label"] for row in rows)
    for part, metric, label in panels:
        lines = {
            shown[row["label"]]: (
                [p["to"] for p in row["by_position"]],
                [p[metric] for p in row["by_position"]],
            )
            for row in rows
            if row["part"] == part and row["refresh"] is not None
        }
        if lines:
            name = f"{path.stem}_{metric}.png"
            curves(path.with_name(name), lines, x="tokens decoded", y=label, title=part)
            names.append(name)
    return names


def _refresh(label: str) -> int | None:
    _, found, rest = label.partition("T_r=")
    return int(rest.split()[0]) if found else None


def _buckets(entry: dict[str, Any]) -> np.ndarray:
    return np.asarray(entry.get("nll_by_bucket", [entry["nll"]]))


def _tokens(entry: dict[str, Any]) -> np.ndarray:
    return np.asarray(entry["tokens_by_bucket"])
