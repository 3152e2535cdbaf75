"""A real model reads a long text and answers a question with each attention method.

A fact is hidden in the middle of three chapters of a novel. The text is read once; every method
then answers from the same key-value cache.
"""

import argparse
import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.attended import Trace, choose_head, plot_attended, trace
from benchmarks.results_file import ROOT, prepare_directory, write_results
from models import CausalLM, load_model
from models.tokenizer import TextTokenizer
from retopk_jax import (
    AttentionMethod,
    ConfigError,
    Context,
    ExactTopK,
    Full,
    Generation,
    ReTopK,
    generate,
    prefill,
)
from retopk_jax.cli_files import write_text
from retopk_jax.cli_methods import METHODS, settings
from retopk_jax.memory import memory_need

TEXT = ROOT / "examples" / "northanger_abbey.txt"
ANSWER = "7314628"
FACT = f"One of the special magic numbers for wooden-lantern is: {ANSWER}."
TASK = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards."
)
QUESTION = (
    "What is the special magic number for wooden-lantern mentioned in the provided text? "
    "Also describe Catherine Morland."
)

METHODS_SHOWN: tuple[AttentionMethod, ...] = (
    Full(),
    ExactTopK(budget=512),
    ReTopK(budget=512),
    ExactTopK(budget=128),
    ReTopK(budget=128),
)
"""The first is the reference of the agreement."""

METHODS_TRACED: tuple[AttentionMethod, ...] = (ExactTopK(budget=128), ReTopK(budget=128))
"""Whose attended positions are drawn, beside those of Full."""


@dataclass(frozen=True)
class Prompt:
    """A question about a text that has a fact hidden in it.

    Attributes:
        tokens: the conversation up to the answer.
        fact: first and last + 1 token of the hidden fact.
    """

    tokens: list[int]
    fact: tuple[int, int]


def main(argv: Sequence[str]) -> None:
    """Runs the demo; see ``--help``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks demo", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for the results")
    parser.add_argument("--model", default="smollm2", help="what load_model takes (%(default)s)")
    parser.add_argument("--text", type=Path, default=TEXT, help="the long text (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of an answer (%(default)s)")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the demo's plot needs matplotlib: pip install matplotlib")
    if not args.text.is_file():
        raise ConfigError(f"--text {args.text}: no such file; expected a text")
    out = prepare_directory(args.out)
    began = time.perf_counter()
    console = Console(highlight=False)
    with console.status(f"loading {args.model}"):
        model = load_model(args.model)
    prompt = hide(model.require_tokenizer(), args.text.read_text(encoding="utf-8"))
    console.print(
        f"{args.model}: {model.parameter_count:,} parameters, {model.decoder.dtype}. "
        f"Reading {len(prompt.tokens):,} tokens, the fact at token {prompt.fact[0]:,} …",
        markup=False,
    )
    read = prefill(
        model,
        [prompt.tokens],
        new_tokens=args.max_new_tokens,
        tail_queries=max(method.tail_queries for method in METHODS_SHOWN),
    )
    console.print(f"  read in {read.seconds:.1f} s, compiled in {read.compile_seconds:.1f} s")
    rows, tokens, context = answer(model, read.context, args.max_new_tokens, console)
    traces, context = follow(model, context, tokens, console)
    layer, head = choose_head(traces[0], prompt.fact)
    plot_attended(
        out / "attended_positions.png", traces, layer, head, prompt.fact, len(prompt.tokens)
    )
    seconds = time.perf_counter() - began
    run = {
        "model": args.model,
        "text": args.text.name,
        "prompt_tokens": len(prompt.tokens),
        "fact_at": prompt.fact[0],
        "question": QUESTION,
        "max_new_tokens": args.max_new_tokens,
        "prefill_seconds": read.seconds,
        "prefill_compile_seconds": read.compile_seconds,
        "seconds_in_all": seconds,
        "plotted": {"layer": layer, "head": head},
    }
    write_results(out / "demo.json", "demo", run, rows)
    write_text(out / "demo.md", markdown(run, rows))
    console.print(rich_table(rows))
    console.print(f"\n{QUESTION}", style="bold")
    for row in rows:
        console.print(f"  {row['name']}: {row['text']!r}", markup=False)
    console.print(
        f"\n{seconds:.0f} s in all. Written to {out}: demo.md, demo.json, attended_positions.png",
        markup=False,
    )


def hide(tokenizer: TextTokenizer, text: str) -> Prompt:
    """The conversation that asks for a fact hidden between two paragraphs, nearest the middle."""
    text = text.strip()
    breaks = [at for at in range(len(text)) if text.startswith("\n\n", at)]
    middle = min(breaks, key=lambda at: abs(at - len(text) // 2), default=len(text))
    story = f"{text[:middle]}\n\n{FACT}{text[middle:]}"
    message = f"{TASK}\n\n{story}\n\n{QUESTION}"
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": message}])
    encoding = tokenizer.backend.encode(rendered, add_special_tokens=False)
    start = rendered.index(FACT)
    inside = [
        token
        for token, (first, last) in enumerate(encoding.offsets)
        if first < start + len(FACT) and last > start
    ]
    return Prompt(encoding.ids, (inside[0], inside[-1] + 1))


def answer(
    model: CausalLM, context: Context, new_tokens: int, console: Console
) -> tuple[list[dict[str, Any]], list[int], Context]:
    """Lets every method answer; returns a row each, the tokens of the first, and the context."""
    rows: list[dict[str, Any]] = []
    reference: list[int] = []
    for method in METHODS_SHOWN:
        with console.status(f"{title(method)} answers"):
            generation = generate(
                model,
                context=context,
                donate=True,
                attention=method,
                max_new_tokens=new_tokens,
            )
        context = generation.context
        reference = reference or generation.tokens[0]
        rows.append(_row(model, method, generation, reference))
        console.print(
            f"  {title(method)}: {generation.tokens_per_second:.1f} tokens/s, compiled in "
            f"{generation.compile_seconds:.1f} s"
        )
    return rows, reference, context


def follow(
    model: CausalLM, context: Context, tokens: list[int], console: Console
) -> tuple[list[Trace], Context]:
    """Traces what is attended while every method is fed the same answer."""
    traces = []
    for method in METHODS_TRACED:
        with console.status(f"tracing {title(method)}"):
            found, context = trace(model, method, context, tokens, title(method))
        traces.append(found)
    return traces, context


def title(method: AttentionMethod) -> str:
    """How the tables and the plot call a method."""
    names = {"full": "Full", "exact": "Exact Top-K", "retopk": "ReTopK"}
    budget = settings(method).get("budget") if method.name in METHODS else None
    return names[method.name] + (f", K={budget}" if budget is not None else "")


def agreement(tokens: Sequence[int], reference: Sequence[int]) -> float:
    """Share of positions with equal tokens, of the longer of two answers."""
    equal = sum(a == b for a, b in zip(tokens, reference, strict=False))
    return equal / max(len(tokens), len(reference))


def _row(
    model: CausalLM, method: AttentionMethod, generation: Generation, reference: list[int]
) -> dict[str, Any]:
    (completion,) = generation.completions
    cache = generation.context.cache
    need = memory_need(
        model.decoder.geometry,
        method,
        weights=model.parameter_bytes,
        batch=cache.batch,
        capacity=cache.capacity,
        dtype=model.decoder.dtype,
    )
    paths = completion.paths
    return {
        "name": title(method),
        "method": method.name,
        "settings": settings(method),
        "text": completion.text,
        "correct": ANSWER in (completion.text or ""),
        "tokens": completion.tokens,
        "tokens_per_second": generation.tokens_per_second,
        "decode_steps": generation.decode_steps,
        "compile_seconds": generation.compile_seconds,
        "path_shares": None if paths is None else paths.shares,
        "mean_candidates": None if paths is None else paths.mean_candidates,
        "agreement": agreement(completion.tokens, reference),
        "bytes": {"kv_cache": need.kv_cache, "recall_cache": need.recall_cache},
    }


_COLUMNS = (
    ("method", "method"),
    ("answer", "answer"),
    ("tokens/s", "tokens\n/s"),
    ("reuse / fallback / refresh, %", "reuse/fall/\nrefresh %"),
    ("candidates", "candi-\ndates"),
    ("agreement with Full", "agree-\nment"),
    ("KV cache, MiB", "KV\nMiB"),
    ("recall cache, MiB", "recall\nMiB"),
)
"""Titles on the page and in the terminal."""


def _cells(row: dict[str, Any]) -> list[str]:
    shares = row["path_shares"]
    return [
        row["name"],
        "right" if row["correct"] else "wrong",
        f"{row['tokens_per_second']:.1f}",
        "-" if shares is None else "/".join(f"{100 * share:.0f}" for share in shares.values()),
        "-" if shares is None else f"{row['mean_candidates']:.0f}",
        f"{row['agreement']:.0%}",
        f"{row['bytes']['kv_cache'] / 2**20:.0f}",
        f"{row['bytes']['recall_cache'] / 2**20:.1f}",
    ]


def rich_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The results for a terminal of 80 columns."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    for column, (_, short) in enumerate(_COLUMNS):
        table.add_column(short, justify="left" if column < 2 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    return table


def markdown(run: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The results as a page."""
    lines = [
        "# Demo",
        "",
        f"`{run['model']}` read {run['prompt_tokens']:,} tokens ({run['text']} with a fact hidden "
        f"at token {run['fact_at']:,}) in {run['prefill_seconds']:.1f} s, once for all methods.",
        "",
        "| " + " | ".join(title for title, _ in _COLUMNS) + " |",
        "|" + "---|" * len(_COLUMNS),
        *("| " + " | ".join(_cells(row)) + " |" for row in rows),
        "",
        "Tokens a second without compilation; agreement is the share of equal greedy tokens, "
        "position by position.",
        "",
        f"Question: {run['question']}",
        "",
        *(f"- {row['name']}: {row['text']!r}" for row in rows),
        "",
        "![attended positions](attended_positions.png)",
        "",
    ]
    return "\n".join(lines)
