"""What the experiments on documents have in common: setting up, scoring, and rows of results."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.evidence.arguments import (
    check_length,
    describe_model,
    open_documents,
    open_model,
)
from benchmarks.evidence.documents import Documents
from benchmarks.evidence.loki_basis import cached_basis
from benchmarks.evidence.methods import Variant, make_variants, needs_basis
from benchmarks.evidence.resume import Store
from benchmarks.evidence.statistics import paired_difference, perplexity
from benchmarks.evidence.suffix import (
    Extra,
    Found,
    Plan,
    score_documents,
    step_milliseconds,
    summary,
)
from models import CausalLM

PROTOCOL = {
    "prefix": "dense prefill of N - suffix tokens, so that the whole is N",
    "lengths": "all lengths end at the same token and score the same labels",
    "scored": "labels that decode steps produce: the suffix but its first token",
    "perplexity": "exp(total NLL / total tokens), float32 log-softmax",
    "current_token": "counts inside K for every method",
    "ties": "the lower token index, for every method",
    "interval": "95 %, bootstrap over documents, of paired differences",
}


@dataclass(frozen=True)
class Scene:
    """A model, documents and what is compared on them.

    Attributes:
        model: the model.
        documents: that are scored.
        variants: methods.
        settings: of the result file.
    """

    model: CausalLM
    documents: Documents
    variants: list[Variant]
    settings: dict[str, Any]


def set_scene(
    args: argparse.Namespace,
    plan: Plan,
    make: Callable[[CausalLM], list[Variant]] | None = None,
    *,
    model_source: str | None = None,
) -> Scene:
    """Loads the model, cuts the documents and makes the methods.

    Args:
        args: of the command.
        plan: how documents are scored.
        make: the methods; None for those of ``--methods`` at ``--budgets``.
        model_source: None for that of ``--model``.
    """
    model = open_model(args, model_source)
    longest = max(plan.lengths)
    check_length(model, longest)
    loki = make is None and needs_basis(args.methods)
    documents, skipped = open_documents(args, model, longest, args.documents + int(loki))
    described = describe_model(args, model)
    basis = None
    calibration = None
    if loki:
        # As long as the cache allows: one basis serves every length.
        size = min(plan.slots, documents.length, model.decoder.max_positions) - 1
        window = documents.ending(size)[args.documents]
        basis = cached_basis(args.out, described["fingerprint"] + str(args.rope), model, window)
        calibration = {"document": documents.names[args.documents], "tokens": size}
        documents = documents.first(args.documents)
    variants = make_variants(args.methods, args.budgets, basis) if make is None else make(model)
    for variant in variants:
        variant.method.check(model.decoder.geometry)
    settings = {
        "model": described,
        "documents": documents.description(),
        "documents_skipped": skipped,
        "lengths": list(plan.lengths),
        "suffix": plan.suffix,
        "rows": plan.rows,
        "seed": args.seed,
        "capacity": plan.slots,
        "timed": plan.timed,
        "variants": [variant.description() for variant in variants],
        "loki_calibration": calibration,
        "protocol": PROTOCOL,
    }
    return Scene(model, documents, variants, settings)


def score_scene(
    args: argparse.Namespace, scene: Scene, plan: Plan, name: str, extra: Extra | None = None
) -> tuple[Found, Store]:
    """Scores the documents, resuming where a run with these settings stopped."""
    chosen = ("model", "documents", "suffix", "rows")
    key = {
        **{part: scene.settings[part] for part in chosen},
        "buckets": plan.buckets,
        "capacity": plan.slots,
        "timed": plan.timed,
    }
    labels = {variant.label: variant.description()["settings"] for variant in scene.variants}
    for settings in labels.values():
        if "basis" in settings:
            settings["calibration"] = scene.settings["loki_calibration"]
    store = Store(args.out, name, key, labels)
    return (
        score_documents(
            scene.model,
            scene.documents,
            scene.variants,
            plan,
            store,
            threads=args.compile_threads,
            extra=extra,
        ),
        store,
    )


def rows_of(
    scene: Scene,
    plan: Plan,
    found: Found,
    seed: int,
    references: Sequence[tuple[str, Callable[[Variant], str]]],
) -> list[dict[str, Any]]:
    """A row a length and variant.

    Args:
        scene: what was scored.
        plan: how.
        found: by `score_documents`.
        seed: of the bootstrap.
        references: name of a comparison, and the label that a variant is compared with.
    """
    rows = []
    for length in plan.lengths:
        for variant in scene.variants:
            entries = found.documents[length, variant.label]
            nll = [entry["nll"] for entry in entries]
            row: dict[str, Any] = {
                "length": length,
                "label": variant.label,
                "method": variant.name,
                "budget": variant.budget,
                "documents": len(nll),
                "scored_tokens": plan.scored * len(nll),
                "perplexity": perplexity(nll, plan.scored * len(nll)),
                "nll_per_document": nll,
                **summary(entries),
                "step_milliseconds": step_milliseconds(entries),
            }
            for name, label in references:
                other = found.documents.get((length, label(variant)))
                if other is not None and label(variant) != variant.label:
                    theirs = [entry["nll"] for entry in other]
                    row[name] = paired_difference(nll, theirs, plan.scored, seed)
            rows.append(row)
    for row in rows:
        exact = next(
            (
                r
                for r in rows
                if r["length"] == row["length"]
                and r["budget"] == row["budget"]
                and r["method"] == "exact"
            ),
            None,
        )
        if exact is not None:
            row["speed_over_exact"] = exact["step_milliseconds"] / row["step_milliseconds"]
    return rows


def against_exact(variant: Variant) -> str:
    """Label of Exact Top-K at a variant's budget."""
    return f"exact K={variant.budget}"


def against_full(variant: Variant) -> str:
    """Label of Full."""
    return "full"
