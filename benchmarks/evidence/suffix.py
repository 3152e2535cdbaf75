"""Teacher-forced scoring of documents' suffixes: one prefill, then every method from it."""

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.evidence.arguments import Progress
from benchmarks.evidence.documents import Documents
from benchmarks.evidence.methods import Variant
from benchmarks.evidence.programs import TAIL_QUERIES, Programs, begin, shared_programs
from benchmarks.evidence.resume import Store
from models import CausalLM
from retopk_jax.decode import DecodeState
from retopk_jax.errors import ConfigError
from retopk_jax.prefill import Context, prefill, rounded_capacity

Extra = Callable[[DecodeState, int], dict[str, Any]]
"""What else to keep of a variant and a batch: from its last state and the rows that count."""


@dataclass(frozen=True)
class Found:
    """Scores by length and variant's label.

    Attributes:
        documents: an entry a document.
        batches: what `Extra` kept, an entry a batch; empty without it.
    """

    documents: dict[tuple[int, str], list[dict[str, Any]]]
    batches: dict[tuple[int, str], list[dict[str, Any]]]


@dataclass(frozen=True)
class Plan:
    """What is scored.

    Attributes:
        lengths: tokens of a document in all, each with its suffix.
        suffix: tokens fed at the end, or the labels of them plus one.
        rows: documents read and decoded at once.
        buckets: parts of the suffix whose losses are kept apart.
        capacity: slots a row of the cache; None for the least that fits.
        timed: decode twice and time the second.
        minutes: after which to stop; None for never.
    """

    lengths: Sequence[int]
    suffix: int
    rows: int
    buckets: int = 1
    capacity: int | None = None
    timed: bool = False
    minutes: float | None = None

    @classmethod
    def of(
        cls, args: argparse.Namespace, lengths: Sequence[int], suffix: int, buckets: int = 1
    ) -> "Plan":
        """A plan with the rest from the command line."""
        given = (args.capacity, args.timed, args.minutes)
        return cls(sorted(lengths), suffix, args.rows, buckets, *given)

    @property
    def slots(self) -> int:
        """Slots a row of the cache."""
        return self.capacity or rounded_capacity(max(self.lengths))

    @property
    def scored(self) -> int:
        """Labels of a document that decode steps produce: the suffix but its first token."""
        return self.suffix - 1


def score_documents(
    model: CausalLM,
    documents: Documents,
    variants: Sequence[Variant],
    plan: Plan,
    store: Store,
    *,
    threads: int,
    extra: Extra | None = None,
) -> Found:
    """Scores every document with every variant at every length.

    All lengths end at the same token: they score the same labels after more or less context. The
    prefix of N − suffix tokens is read densely; the suffix is fed token by token, and every label
    but the first, which the prefill predicts, is scored.

    Args:
        model: the model.
        documents: at least as long as the longest length.
        variants: what to score them with.
        plan: how.
        store: where items are kept; one a length, batch of documents and variant.
        threads: programs compiled at once.
        extra: what else to keep of a batch.
    """
    if plan.suffix < 2 or min(plan.lengths) <= plan.suffix:
        raise ConfigError(
            f"suffix of {plan.suffix} tokens, documents of {min(plan.lengths)}: expected a suffix "
            "of 2 or more, and shorter than the documents"
        )
    count = len(documents.names)
    tail = max(TAIL_QUERIES, *(variant.method.tail_queries for variant in variants))
    programs = shared_programs(model, plan.rows, plan.slots, tail, threads)
    batches = range(0, count, plan.rows)
    progress = Progress(len(plan.lengths) * len(batches) * len(variants), plan.minutes)
    keys = [(length, variant.label) for length in plan.lengths for variant in variants]
    found = Found({key: [] for key in keys}, {key: [] for key in keys})
    for length in plan.lengths:
        for first in batches:
            last = min(first + plan.rows, count)
            for label, item in _score_batch(
                model,
                documents.ending(length)[first:last],
                variants,
                plan,
                store,
                programs,
                tail,
                f"{length} tokens, documents {first + 1} to {last}",
                progress,
                extra,
            ).items():
                found.documents[length, label] += item["documents"]
                if "batch" in item:
                    found.batches[length, label].append(item["batch"])
    return found


def _score_batch(
    model: CausalLM,
    tokens: np.ndarray,
    variants: Sequence[Variant],
    plan: Plan,
    store: Store,
    programs: Programs,
    tail: int,
    what: str,
    progress: Progress,
    extra: Extra | None,
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    missing = []
    for variant in variants:
        saved = store.load(store.key(what, variant.label))
        if saved is None:
            missing.append(variant)
        else:
            found[variant.label] = saved
            progress.step(f"{what}, {variant.label}", resumed=True)
    if not missing:
        return found
    for variant in missing:
        programs.prepare_score(variant.method, plan.suffix)
    if plan.timed:  # compiling takes the cores that launch kernels
        for variant in missing:
            programs.prime(variant.method)
            programs.score(variant.method, plan.suffix)
    count = len(tokens)
    padded = np.concatenate([tokens, np.repeat(tokens[-1:], plan.rows - count, axis=0)])
    split = padded.shape[1] - plan.suffix
    read = prefill(
        model,
        [row[:split].tolist() for row in padded],
        new_tokens=plan.suffix,
        capacity=plan.slots,
        tail_queries=tail,
    )
    context = read.context
    given = jnp.asarray(padded[:, split:], jnp.int32)
    for variant in missing:
        key = store.key(what, variant.label)
        item: dict[str, Any] | None = store.load(key)  # another label of the method may have it
        if item is None:
            run = functools.partial(_run, model, variant, programs, given)
            nll, state, seconds, context = run(context)
            if plan.timed:
                nll, state, seconds, context = run(context)
            entries = _entries(nll, variant, state, plan, count)
            for entry in entries:
                entry["step_milliseconds"] = 1e3 * seconds / plan.scored
            item = {"documents": entries}
            if extra is not None:
                item["batch"] = extra(state, count)
            store.save(key, item)
        found[variant.label] = item
        progress.step(f"{what}, {variant.label}")
    return found


def _run(
    model: CausalLM, variant: Variant, programs: Programs, tokens: jax.Array, context: Context
) -> tuple[np.ndarray, DecodeState, float, Context]:
    """Scores tokens after a context; returns losses, state, seconds, and the context again."""
    prime = programs.prime(variant.method)
    score = programs.score(variant.method, tokens.shape[1])
    lengths = np.asarray(context.cache.lengths)
    state = begin(context, prime(variant.method, context))
    jax.block_until_ready(state)
    began = time.perf_counter()
    nll, state = score(variant.method, model.params, state, tokens)
    jax.block_until_ready(nll)
    seconds = time.perf_counter() - began
    rewound = replace(state.cache, lengths=jnp.asarray(lengths))
    return np.asarray(nll, np.float64), state, seconds, replace(context, cache=rewound)


def _entries(
    nll: np.ndarray, variant: Variant, state: DecodeState, plan: Plan, count: int
) -> list[dict[str, Any]]:
    paths = variant.method.path_statistics(state.layers)
    usage = {
        "tokens_attended": np.asarray(state.usage.tokens),
        "key_bytes": np.asarray(state.usage.key_bytes),
        "value_bytes": np.asarray(state.usage.value_bytes),
    }
    edges = np.linspace(0, plan.scored, plan.buckets + 1).astype(int)
    entries = []
    for row in range(count):
        sums = [float(nll[row, a:b].sum()) for a, b in itertools.pairwise(edges)]
        entry: dict[str, Any] = {"nll": sum(sums)}
        if plan.buckets > 1:
            entry["nll_by_bucket"] = sums
            entry["tokens_by_bucket"] = np.diff(edges).tolist()
        if paths is not None:
            counted = paths[row]
            entry["paths"] = [counted.reuse, counted.fallback, counted.refresh]
            entry["candidates"] = counted.candidates
            if counted.groups_scanned is not None:
                entry["groups"] = [counted.groups_scanned, counted.group_steps]
            if counted.predicted_error is not None:
                entry["predicted_error"] = counted.predicted_error
        entry.update({name: float(values[row]) for name, values in usage.items()})
        entries.append(entry)
    return entries


def summary(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Path shares, groups scanned, expected error, candidates and reads over documents."""
    found: dict[str, Any] = {
        name: float(np.mean([entry[name] for entry in entries]))
        for name in ("tokens_attended", "key_bytes", "value_bytes")
    }
    if "paths" in entries[0]:
        paths = np.sum([entry["paths"] for entry in entries], axis=0)
        total = max(int(paths.sum()), 1)
        found["path_shares"] = {
            name: int(n) / total
            for name, n in zip(("reuse", "fallback", "refresh"), paths, strict=True)
        }
        found["exact_path_rate"] = 1 - int(paths[0]) / total
        if "groups" in entries[0]:
            scanned, steps = np.sum([entry["groups"] for entry in entries], axis=0)
            found["groups_scanned"] = int(scanned) / max(int(steps), 1)
        if "predicted_error" in entries[0]:
            found["predicted_error"] = sum(e["predicted_error"] for e in entries) / total
        found["mean_candidates"] = sum(e["candidates"] for e in entries) / max(int(paths[0]), 1)
    return found


def step_milliseconds(entries: Sequence[dict[str, Any]]) -> float:
    """Time of a decode step of all rows, of the fastest batch: a program's first run is slower."""
    return float(min(entry["step_milliseconds"] for entry in entries))
