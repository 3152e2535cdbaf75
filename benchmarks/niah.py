"""RULER's needle-in-a-haystack tasks, answered greedily with every method.

Facts are hidden in an essay text, which --essay names and which is read at run time only. Prompts
are fitted to the length by the model's own tokenizer; all methods answer from one prefill.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.evidence.arguments import (
    SAMPLE_TEXT,
    check_length,
    console,
    describe_model,
    fill,
    make_parser,
    open_model,
    result_path,
)
from benchmarks.evidence.documents import tokenizer_hash
from benchmarks.evidence.generation import (
    answer_batches,
    batches_of,
    group_share,
    path_shares,
)
from benchmarks.evidence.loki_basis import cached_basis
from benchmarks.evidence.methods import (
    ALL,
    Variant,
    make_variants,
    needs_basis,
    short_labels,
    title,
)
from benchmarks.evidence.plots import heat_grid, require_matplotlib
from benchmarks.evidence.resume import Store
from benchmarks.evidence.ruler import HEADLINE, TASKS, Builder, Sample, hits, string_match_all
from benchmarks.evidence.statistics import paired_points
from benchmarks.results_file import write_results
from retopk_jax.errors import ConfigError
from retopk_jax.prefill import rounded_capacity

NORMAL = {
    "methods": list(ALL),
    "budgets": [512],
    "lengths": [8192],
    "documents": 50,
    "rows": 10,
    "tasks": list(HEADLINE),
    "max_new_tokens": 128,
}
SMOKE = {
    "methods": ["full", "exact", "retopk", "streaming"],
    "budgets": [64],
    "lengths": [1024, 1280],
    "documents": 3,
    "rows": 2,
    "tasks": ["niah_single_2", "niah_multivalue"],
    "max_new_tokens": 12,
}
DEPTH_BINS = 5


def main(argv: Sequence[str]) -> None:
    """Runs the experiment; see ``--help``."""
    parser = make_parser("niah", __doc__)
    add = parser.add_argument
    add("--tasks", nargs="+", choices=list(TASKS), metavar="TASK", help="(the headline's three)")
    add("--essay", type=Path, help="UTF-8 text of the haystack (a file of --texts, or a sample)")
    add("--max-new-tokens", type=int, metavar="N", help="of an answer (128)")
    args = parser.parse_args(argv)
    fill(args, NORMAL, SMOKE)
    require_matplotlib()
    model = open_model(args)
    tokenizer = model.require_tokenizer()
    for length in args.lengths:
        check_length(model, length)
    essay, words = read_essay(args.essay, args.texts)
    prompts = {
        (task, length): Builder(task, words, tokenizer, args.seed).build(
            length, args.documents, args.max_new_tokens
        )
        for length in sorted(args.lengths)
        for task in args.tasks
    }
    described = describe_model(args, model)
    variants, calibration = _variants(args, model, described, words)
    settings = {
        "model": described,
        "tokenizer_sha256": tokenizer_hash(tokenizer),
        "haystack": essay,
        "tasks": args.tasks,
        "lengths": sorted(args.lengths),
        "samples": args.documents,
        "rows": args.rows,
        "seed": args.seed,
        "max_new_tokens": args.max_new_tokens,
        "prompts": {
            f"{task} {length}": {
                "token_ids_sha256": _hash(samples),
                "tokens": [min(sizes), max(sizes)],
            }
            for (task, length), samples in prompts.items()
            for sizes in [[len(sample.tokens) for sample in samples]]
        },
        "loki_calibration": calibration,
        "variants": [variant.description() for variant in variants],
        "protocol": {
            "length": "chat-wrapped prompt, answer prefix and answer at most, in tokens",
            "words": "the project's own adjectives and nouns",
            "sentences": "split by a rule, not by NLTK",
            "decoding": "greedy, no stop strings; the first answer token is the prefill's",
            "metric": "string_match_all",
            "headline": f"mean of {', '.join(HEADLINE)}",
        },
    }
    capacity = args.capacity or rounded_capacity(max(args.lengths))
    key = {name: settings[name] for name in ("model", "rows", "max_new_tokens", "loki_calibration")}
    labels = {variant.label: variant.description()["settings"] for variant in variants}
    store = Store(args.out, "niah", {**key, "capacity": capacity}, labels)
    batches = {
        (task, length): batches_of(
            f"{task}, {length} tokens, {_hash(samples)[:16]}",
            [sample.tokens for sample in samples],
            args.rows,
            args.max_new_tokens,
        )
        for (task, length), samples in prompts.items()
    }
    found = answer_batches(
        model,
        [batch for group in batches.values() for batch in group],
        variants,
        store,
        rows=args.rows,
        capacity=capacity,
        threads=args.compile_threads,
        minutes=args.minutes,
    )
    rows = []
    for (task, length), samples in prompts.items():
        for variant in variants:
            items = [found[batch.name, variant.label] for batch in batches[task, length]]
            rows.append(_row(task, length, variant, samples, items))
    headline = headline_rows(rows, args.seed)
    path = result_path(args, "niah")
    plot = draw(path, rows)
    write_results(
        path,
        "niah",
        settings,
        rows,
        headline=headline,
        plots=[plot],
        item_commits=store.commits(),
    )
    _print(headline, rows, path)


def read_essay(path: Path | None, texts: Path | None) -> tuple[dict[str, Any], list[str]]:
    """What the haystack is made of, and its words.

    Raises:
        ConfigError: it is no UTF-8 text.
    """
    chosen = path
    if chosen is None and texts is not None:
        chosen = texts if texts.suffix == ".txt" else min(texts.glob("*.txt"), default=None)
    if chosen is None:
        chosen = SAMPLE_TEXT
    try:
        text = chosen.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--essay {chosen}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--essay {chosen}: not UTF-8 at byte {error.start}") from error
    words = text.split()
    if not words:
        raise ConfigError(f"--essay {chosen}: expected words")
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    return {"file": chosen.name, "words": len(words), "sha256": digest}, words


def _variants(
    args: Any, model: Any, described: dict[str, Any], words: list[str]
) -> tuple[list[Variant], dict[str, Any] | None]:
    """The methods; Loki's basis is fitted on the plain essay text, which holds no needle."""
    if not needs_basis(args.methods):
        return make_variants(args.methods, args.budgets, None), None
    longest = min(args.capacity or max(args.lengths), model.decoder.max_positions) - 1
    text = " ".join((words * (1 + 2 * longest // len(words)))[: 2 * longest])
    ids = model.require_tokenizer().backend.encode(text, add_special_tokens=False).ids[:longest]
    tokens = np.asarray(ids, np.int32)
    basis = cached_basis(args.out, described["fingerprint"] + str(args.rope), model, tokens)
    note = {"text": "the haystack without needles", "tokens": len(ids)}
    return make_variants(args.methods, args.budgets, basis), note


def _hash(samples: Sequence[Sample]) -> str:
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(np.asarray(sample.tokens, "<i4").tobytes())
        digest.update(b"|")
    return digest.hexdigest()


def _row(
    task: str,
    length: int,
    variant: Variant,
    samples: Sequence[Sample],
    items: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    answers = [answer for item in items for answer in item["answers"]]
    tokens = [count for item in items for count in item["tokens"]]
    by_depth = [[0, 0] for _ in range(DEPTH_BINS)]
    for sample, answer in zip(samples, answers, strict=True):
        for depth, hit in zip(sample.depths, hits(answer, sample.answers), strict=True):
            cell = by_depth[min(int(depth * DEPTH_BINS / 100), DEPTH_BINS - 1)]
            cell[0] += hit
            cell[1] += 1
    row: dict[str, Any] = {
        "task": task,
        "length": length,
        "label": variant.label,
        "method": variant.name,
        "budget": variant.budget,
        "samples": len(samples),
        "score": string_match_all(answers, [sample.answers for sample in samples]),
        "found_by_depth": by_depth,
        "score_per_sample": [
            round(100 * float(np.mean(hits(answer, sample.answers))), 2)
            for sample, answer in zip(samples, answers, strict=True)
        ],
        "answer_tokens": float(np.mean(tokens)),
        "sparse_steps": float(np.mean([max(count - 1, 0) for count in tokens])),
        "step_milliseconds": min(item["step_milliseconds"] for item in items),
    }
    shares = path_shares(items)
    if shares is not None:
        row["path_shares"] = shares
    groups = group_share(items)
    if groups is not None:
        row["groups_scanned"] = groups
    return row


def headline_rows(rows: Sequence[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Mean over the tasks, by length and method, against Exact Top-K and ReTopK's defaults."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["length"], row["label"]), []).append(row)
    found = []
    for (length, label), group in groups.items():
        budget = group[0]["budget"]
        entry: dict[str, Any] = {
            "length": length,
            "label": label,
            "method": group[0]["method"],
            "budget": budget,
            "tasks": [row["task"] for row in group],
            "score": round(float(np.mean([row["score"] for row in group])), 2),
        }
        if "groups_scanned" in group[0]:
            entry["groups_scanned"] = float(np.mean([row["groups_scanned"] for row in group]))
        for name in ("exact", "retopk"):
            other = groups.get((length, f"{name} K={budget}"))
            if other is not None and other is not group:
                mine, theirs = ([row["score_per_sample"] for row in one] for one in (group, other))
                entry[f"against_{name}"] = paired_points(mine, theirs, seed)
        found.append(entry)
    return found


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    """Heat map of depth and length, a panel a method, over all tasks; returns its name."""
    lengths = sorted({row["length"] for row in rows})
    panels = {}
    for label, shown in short_labels(row["label"] for row in rows).items():
        cells = np.zeros((DEPTH_BINS, len(lengths), 2))
        for row in rows:
            if row["label"] == label:
                cells[:, lengths.index(row["length"])] += np.asarray(row["found_by_depth"])
        hit, total = cells[..., 0], cells[..., 1]
        panels[shown] = np.where(total > 0, 100 * hit / np.maximum(total, 1), np.nan)
    step = 100 // DEPTH_BINS
    name = f"{path.stem}_depth.png"
    heat_grid(
        path.with_name(name),
        panels,
        rows=[f"{i * step}-{(i + 1) * step}" for i in range(DEPTH_BINS)],
        columns=[f"{length:,}" for length in lengths],
        x="context, tokens",
        y="depth, %",
        title="Values found, % of those asked for, over all tasks",
    )
    return name


def _print(headline: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], path: Path) -> None:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    table = Table("length", "K", "method", "groups", *tasks, "mean", "over Exact")
    for mean in headline:
        scores = {
            row["task"]: row["score"]
            for row in rows
            if (row["length"], row["label"]) == (mean["length"], mean["label"])
        }
        groups, over = mean.get("groups_scanned"), mean.get("against_exact")
        table.add_row(
            f"{mean['length']:,}",
            "" if mean["budget"] is None else str(mean["budget"]),
            title(mean["method"]),
            "" if groups is None else f"{groups:.1%}",
            *(f"{scores[task]:.1f}" for task in tasks),
            f"{mean['score']:.1f}",
            "" if over is None else "{points:+.1f} [{low:+.1f}, {high:+.1f}]".format(**over),
        )
    console().print(table)
    console().print(f"Written to {path}")
