"""Greedy answers to prompts: read a batch once, then answer with every method."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.evidence.arguments import Progress
from benchmarks.evidence.methods import Variant
from benchmarks.evidence.programs import TAIL_QUERIES, Programs, begin, greedy, shared_programs
from benchmarks.evidence.resume import Store
from models import CausalLM
from retopk_jax.decode import Produced, first_token
from retopk_jax.prefill import prefill


@dataclass(frozen=True)
class Batch:
    """Prompts that are answered together.

    Attributes:
        name: identifies them, with what they were made from.
        prompts: token ids.
        new_tokens: of an answer at most.
    """

    name: str
    prompts: list[list[int]]
    new_tokens: int


def answer_batches(
    model: CausalLM,
    batches: Sequence[Batch],
    variants: Sequence[Variant],
    store: Store,
    *,
    rows: int,
    capacity: int,
    threads: int,
    minutes: float | None,
) -> dict[tuple[str, str], dict[str, Any]]:
    """Answers every batch with every variant.

    Args:
        model: the model.
        batches: of at most ``rows`` prompts.
        variants: methods.
        store: where items are kept; one a batch and variant.
        rows: prompts read and decoded at once.
        capacity: slots a row of the cache.
        threads: programs compiled at once.
        minutes: after which to stop; None for never.

    Returns:
        By batch and label: ``answers``, a text a prompt, ``tokens``, how many each has,
        ``paths`` and ``groups`` over all prompts, and ``step_milliseconds``.
    """
    tail = max(TAIL_QUERIES, *(variant.method.tail_queries for variant in variants))
    programs = shared_programs(model, rows, capacity, tail, threads)
    progress = Progress(len(batches) * len(variants), minutes)
    found = {}
    for batch in batches:
        for label, item in _answer_batch(
            model, batch, variants, store, programs, rows, capacity, tail, progress.step
        ).items():
            found[batch.name, label] = item
    return found


def _answer_batch(
    model: CausalLM,
    batch: Batch,
    variants: Sequence[Variant],
    store: Store,
    programs: Programs,
    rows: int,
    capacity: int,
    tail: int,
    step: Callable[..., None],
) -> dict[str, dict[str, Any]]:
    tokenizer = model.require_tokenizer()
    found, missing = {}, []
    for variant in variants:
        saved = store.load(store.key(batch.name, variant.label))
        if saved is None:
            missing.append(variant)
        else:
            found[variant.label] = saved
            step(f"{batch.name}, {variant.label}", resumed=True)
    if not missing:
        return found
    ends = sorted(model.eos_token_ids) or [-1]
    columns = max(64, 1 << (batch.new_tokens - 1).bit_length())
    for variant in missing:
        programs.prepare_decode(variant.method, columns, len(ends))
    count = len(batch.prompts)
    context = prefill(
        model,
        [*batch.prompts, *[batch.prompts[-1]] * (rows - count)],
        new_tokens=batch.new_tokens,
        capacity=capacity,
        tail_queries=tail,
    ).context
    lengths = np.asarray(context.cache.lengths)
    controls = (greedy(), jnp.asarray(ends, jnp.int32), jnp.int32(batch.new_tokens))
    for variant in missing:
        method = variant.method
        state = begin(context, programs.prime(method)(method, context))
        produced = Produced(
            jnp.zeros((rows, columns), jnp.int32), jnp.zeros(rows, jnp.int32), jax.random.key(0)
        )
        produced, state = first_token(produced, state, context.logits, *controls)
        decode = programs.decode(method, columns, len(ends))
        jax.block_until_ready(state)
        began = time.perf_counter()
        produced, state = decode(method, model.params, state, produced, *controls)
        jax.block_until_ready(state)
        seconds = time.perf_counter() - began
        tokens, counts = np.asarray(produced.tokens), np.asarray(produced.count)
        answers = []
        for row in range(count):
            ids = tokens[row, : counts[row]].tolist()
            answers.append(tokenizer.decode(ids[:-1] if ids and ids[-1] in ends else ids))
        paths = method.path_statistics(state.layers)
        item: dict[str, Any] = {
            "answers": answers,
            "tokens": counts[:count].tolist(),
            "step_milliseconds": 1e3 * seconds / max(int(jnp.max(state.index)), 1),
        }
        if paths is not None:
            kept = paths[:count]
            item["paths"] = [
                sum(p.reuse for p in kept),
                sum(p.fallback for p in kept),
                sum(p.refresh for p in kept),
            ]
            item["groups"] = [
                sum(p.groups_scanned or 0 for p in kept),
                sum(p.group_steps or 0 for p in kept),
            ]
        store.save(store.key(batch.name, variant.label), item)
        found[variant.label] = item
        context = replace(context, cache=replace(state.cache, lengths=jnp.asarray(lengths)))
        step(f"{batch.name}, {variant.label}")
    return found


def batches_of(name: str, prompts: Sequence[list[int]], rows: int, new_tokens: int) -> list[Batch]:
    """Prompts in batches of at most ``rows``."""
    return [
        Batch(
            f"{name}, {first + 1} to {min(first + rows, len(prompts))}",
            list(prompts[first : first + rows]),
            new_tokens,
        )
        for first in range(0, len(prompts), rows)
    ]


def path_shares(items: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    """Fractions of head-steps by path; None for a method with one path."""
    if not items or "paths" not in items[0]:
        return None
    counts = np.sum([item["paths"] for item in items], axis=0)
    total = max(int(counts.sum()), 1)
    names = ("reuse", "fallback", "refresh")
    return {name: int(n) / total for name, n in zip(names, counts, strict=True)}


def group_share(items: Sequence[dict[str, Any]]) -> float | None:
    """Share of KV groups scanned; None for a method that scans none or all."""
    if not items or "groups" not in items[0]:
        return None
    scanned, steps = np.sum([item["groups"] for item in items], axis=0)
    return int(scanned) / max(int(steps), 1)
