"""LongBench question answering from local .jsonl files: 2WikiMQA, HotpotQA, MultiFieldQA-en.

Records have LongBench's fields; of them input, context, answers and dataset are used. Prompts too
long for --lengths lose their middle; the chat template is applied where the model has one.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.evidence.arguments import (
    console,
    describe_model,
    fill,
    make_parser,
    open_model,
    result_path,
)
from benchmarks.evidence.documents import tokenizer_hash
from benchmarks.evidence.generation import answer_batches, batches_of, path_shares
from benchmarks.evidence.loki_basis import cached_basis
from benchmarks.evidence.longbench_metric import NEW_TOKENS, PROMPTS, qa_f1, truncate_middle
from benchmarks.evidence.methods import ALL, make_variants, needs_basis, title
from benchmarks.evidence.resume import Store
from benchmarks.evidence.texts import BadItems, read_records
from benchmarks.results_file import ROOT, write_results
from models.tokenizer import TextTokenizer
from retopk_jax.errors import ConfigError
from retopk_jax.prefill import rounded_capacity

SAMPLE = ROOT / "examples" / "longbench_sample.jsonl"
MARGIN = 500
"""Tokens that LongBench leaves for the chat template and the answer."""

NORMAL = {
    "methods": list(ALL),
    "budgets": [512],
    "rows": 10,
    "data": [SAMPLE],
}
SMOKE = {
    "methods": ["full", "exact", "retopk"],
    "budgets": [64],
    "lengths": [1500],
    "documents": 4,
    "rows": 2,
}

FIELDS = (
    ("input", lambda value: isinstance(value, str), "a string"),
    ("context", lambda value: isinstance(value, str), "a string"),
    (
        "answers",
        lambda value: (
            isinstance(value, list) and bool(value) and all(isinstance(x, str) for x in value)
        ),
        "a list of strings",
    ),
    ("dataset", lambda value: value in PROMPTS, f"one of {', '.join(PROMPTS)}"),
)


def main(argv: Sequence[str]) -> None:
    """Runs the experiment; see ``--help``."""
    parser = make_parser("longbench", __doc__)
    parser.add_argument(
        "--data",
        nargs="+",
        type=Path,
        metavar="FILE",
        help=".jsonl files in LongBench's format (a small sample of the project's own)",
    )
    args = parser.parse_args(argv)
    fill(args, NORMAL, SMOKE)
    model = open_model(args)
    tokenizer = model.require_tokenizer()
    if args.lengths is not None and len(args.lengths) != 1:
        raise ConfigError("--lengths: longbench takes one, the tokens of a prompt before wrapping")
    limit = args.lengths[0] if args.lengths else model.decoder.max_positions - MARGIN
    if limit < 2 or limit + MARGIN > model.decoder.max_positions:
        raise ConfigError(
            f"--lengths {limit}: expected 2 to {model.decoder.max_positions - MARGIN}, the "
            f"model's positions less {MARGIN}; --rope extends them"
        )
    bad = BadItems(args.on_bad)
    records = [record for path in args.data for record in read_records(path, FIELDS, bad)]
    if args.documents is not None:
        records = records[: args.documents]
    if not records:
        raise ConfigError(f"--data {' '.join(map(str, args.data))}: no usable record")
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(record["dataset"], []).append(record)
    prompts = {
        name: [wrap(record, tokenizer, limit) for record in group] for name, group in groups.items()
    }
    described = describe_model(args, model)
    basis, calibration = None, None
    if needs_basis(args.methods):
        longest = max((ids for group in prompts.values() for ids in group), key=len)
        key = described["fingerprint"] + str(args.rope)
        basis = cached_basis(args.out, key, model, np.asarray(longest, np.int32))
        calibration = {"text": "the longest prompt, which is scored too", "tokens": len(longest)}
    variants = make_variants(args.methods, args.budgets, basis)
    settings = {
        "model": described,
        "tokenizer_sha256": tokenizer_hash(tokenizer),
        "data": [
            {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            for path in args.data
        ],
        "records": {name: len(group) for name, group in groups.items()},
        "records_skipped": bad.skipped,
        "max_length": limit,
        "rows": args.rows,
        "seed": args.seed,
        "token_ids_sha256": {name: _hash(ids) for name, ids in prompts.items()},
        "loki_calibration": calibration,
        "variants": [variant.description() for variant in variants],
        "protocol": {
            "truncation": "middle, of the unwrapped prompt",
            "chat_template": tokenizer.chat_template is not None,
            "decoding": "greedy",
            "metric": "qa_f1, best over answers",
            "mean": "of the data sets' scores, not of the records",
        },
    }
    kept = {name: settings[name] for name in ("model", "max_length", "rows", "loki_calibration")}
    labels = {variant.label: variant.description()["settings"] for variant in variants}
    longest = max(len(ids) + NEW_TOKENS[name] for name, group in prompts.items() for ids in group)
    capacity = args.capacity or rounded_capacity(longest)
    store = Store(args.out, "longbench", {**kept, "capacity": capacity}, labels)
    batches = {
        name: batches_of(f"{name}, {_hash(group)[:16]}", group, args.rows, NEW_TOKENS[name])
        for name, group in prompts.items()
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
    for variant in variants:
        scores = {}
        items = []
        for name, group in groups.items():
            here = [found[batch.name, variant.label] for batch in batches[name]]
            items += here
            answers = [answer for item in here for answer in item["answers"]]
            scores[name] = [
                qa_f1(answer, record["answers"])
                for answer, record in zip(answers, group, strict=True)
            ]
        row: dict[str, Any] = {
            "label": variant.label,
            "method": variant.name,
            "budget": variant.budget,
            "scores": {name: round(100 * float(np.mean(s)), 2) for name, s in scores.items()},
            "f1_per_record": scores,
        }
        row["mean"] = round(float(np.mean(list(row["scores"].values()))), 2)
        shares = path_shares(items)
        if shares is not None:
            row["path_shares"] = shares
        rows.append(row)
    path = result_path(args, "longbench")
    write_results(path, "longbench", settings, rows, item_commits=store.commits())
    table = Table("K", "method", *groups, "mean")
    for row in rows:
        table.add_row(
            "" if row["budget"] is None else str(row["budget"]),
            title(row["method"]),
            *(f"{row['scores'][name]:.2f}" for name in groups),
            f"{row['mean']:.2f}",
        )
    console().print(table)
    console().print(f"Written to {path}")


def wrap(record: dict[str, Any], tokenizer: TextTokenizer, limit: int) -> list[int]:
    """Token ids of a record's prompt: shortened in the middle, then wrapped."""
    # Not str.format: contexts hold braces.
    text = PROMPTS[record["dataset"]].replace("{input}", record["input"])
    text = truncate_middle(text.replace("{context}", record["context"]), tokenizer, limit)
    if tokenizer.chat_template is None:
        return tokenizer.encode(text)
    return tokenizer.encode_chat([{"role": "user", "content": text}])


def _hash(prompts: Sequence[list[int]]) -> str:
    digest = hashlib.sha256()
    for ids in prompts:
        digest.update(np.asarray(ids, "<i4").tobytes())
        digest.update(b"|")
    return digest.hexdigest()
