"""`retopk generate`: prompts from the command line, continuations to standard output."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from models import CausalLM, load_model
from retopk_jax.attention import AttentionMethod, Loki
from retopk_jax.attention.checks import check_integer
from retopk_jax.cli_files import check_target, write_json
from retopk_jax.cli_methods import check_calibration, chosen_methods, provenance, settings
from retopk_jax.errors import ConfigError, PromptError
from retopk_jax.generate import Completion, Generation, encode_prompts, generate
from retopk_jax.memory import memory_need
from retopk_jax.sampling import make_sampling

LARGEST_SEED = 2**32 - 1


def run_generate(args: argparse.Namespace) -> None:
    """Loads a model, reads the prompts, writes their continuations.

    Raises:
        RetopkError: a setting is out of range or a prompt cannot be used.
        ModelError: the model cannot be loaded.
    """
    (method,) = chosen_methods(args).values()
    if isinstance(method, Loki):
        method.check_basis()
    _check(args)
    console = Console(stderr=True, highlight=False)
    with console.status(f"loading {args.model}"):
        model = load_model(args.model, dtype=args.dtype)
        for note in model.notes:
            console.print(f"note: {note}", markup=False)
        check_calibration(args, model)
        prompts = _encode(model, args)
    streams = len(prompts) == 1
    with _reading(console) as progress:
        generation = generate(
            model,
            prompts,
            attention=method,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_k=0 if args.top_k is None else args.top_k,
            top_p=1.0 if args.top_p is None else args.top_p,
            seed=args.seed,
            stop=args.stop,
            ignore_eos=args.ignore_eos,
            on_text=_write if streams else None,
            progress=progress,
        )
    if streams:
        print(flush=True)
    else:
        for row, text in enumerate(generation.texts):
            print(f"[{row}] {text}", flush=True)
    if args.json is not None:
        write_json(args.json, report(model, method, generation, provenance(args)))
    _summarise(console, generation)


def _check(args: argparse.Namespace) -> None:
    """Everything that can be known to be wrong before the model is loaded."""
    if not args.prompts:
        raise PromptError("no prompt: give --prompt TEXT or --prompt-file FILE")
    for row, prompt in enumerate(args.prompts):
        if not prompt:
            raise PromptError(f"prompt {row} is empty: expected some text")
    if args.system is not None and not args.chat:
        raise ConfigError("--system is part of a conversation: give --chat as well")
    check_integer("--max-new-tokens", args.max_new_tokens, minimum=1)
    check_integer("--seed", args.seed, minimum=0, maximum=LARGEST_SEED)
    make_sampling(args.temperature, args.top_k or 0, 1.0 if args.top_p is None else args.top_p)
    for option, value in (("--top-k", args.top_k), ("--top-p", args.top_p)):
        if value is not None and args.temperature == 0:
            raise ConfigError(
                f"{option} {value} has no effect on greedy decoding: give --temperature above 0"
            )
    if any(not text for text in args.stop):
        raise ConfigError("--stop '': expected some text")
    if args.json is not None:
        check_target(args.json, "--json")


def _encode(model: CausalLM, args: argparse.Namespace) -> list[list[int]]:
    """Token ids of the prompts, as a conversation's turns where asked."""
    if not args.chat:
        return encode_prompts(model, args.prompts)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    tokenizer = model.require_tokenizer()
    return [
        tokenizer.encode_chat([*system, {"role": "user", "content": prompt}])
        for prompt in args.prompts
    ]


def _write(row: int, text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def _reading(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A progress callback of the prefill: a bar on a terminal, a line every tenth elsewhere."""
    if not console.is_terminal:
        yield _tenths(console)
        return
    bar = Progress(
        TextColumn("reading the prompt"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task("", total=None)

    def progress(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if done == total:
            bar.stop()

    bar.start()
    try:
        yield progress
    finally:
        bar.stop()


def _tenths(console: Console) -> Callable[[int, int], None]:
    shown = 0

    def progress(done: int, total: int) -> None:
        nonlocal shown
        if 10 * done // total > shown:
            shown = 10 * done // total
            console.print(f"read {done:,} of {total:,} prompt tokens")

    return progress


def report(
    model: CausalLM,
    method: AttentionMethod,
    generation: Generation,
    calibration: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What ``--json`` writes; with several prompts, what belongs to one is a list over them."""
    cache = generation.context.cache
    need = memory_need(
        model.decoder.geometry,
        method,
        weights=model.parameter_bytes,
        batch=cache.batch,
        capacity=cache.capacity,
        dtype=model.decoder.dtype,
    )
    rows = [_row(completion) for completion in generation.completions]
    per_row = rows[0] if len(rows) == 1 else {key: [row[key] for row in rows] for key in rows[0]}
    return {
        **per_row,
        "prefill_seconds": generation.prefill_seconds,
        "decode_seconds": generation.decode_seconds,
        "compile_seconds": generation.compile_seconds,
        "tokens_per_second": generation.tokens_per_second,
        "bytes": {
            "weights": need.weights,
            "kv_cache": need.kv_cache,
            "recall_cache": need.recall_cache,
        },
        "model": model.source,
        "dtype": str(model.decoder.dtype),
        "attention": {"method": method.name, **settings(method)},
        **({} if calibration is None else {"calibration": calibration}),
    }


def _row(completion: Completion) -> dict[str, Any]:
    paths = completion.paths
    return {
        "text": completion.text,
        "tokens": completion.tokens,
        "prompt_tokens": completion.prompt_tokens,
        "finish_reason": completion.finish_reason,
        "path_shares": None if paths is None else paths.shares,
        "mean_candidates": None if paths is None else paths.mean_candidates,
        "tokens_attended": completion.tokens_attended,
        "key_bytes": completion.key_bytes,
        "value_bytes": completion.value_bytes,
    }


def _summarise(console: Console, generation: Generation) -> None:
    completions = generation.completions
    prompt_tokens = sum(completion.prompt_tokens for completion in completions)
    new_tokens = sum(len(completion.tokens) for completion in completions)
    console.print(
        f"{prompt_tokens:,} prompt tokens in {generation.prefill_seconds:.2f} s, "
        f"{new_tokens:,} new at {generation.tokens_per_second:.1f} a second, "
        f"compilation {generation.compile_seconds:.1f} s",
        style="dim",
    )
    for row, completion in enumerate(completions):
        if completion.paths is not None:
            shares = ", ".join(f"{name} {x:.1%}" for name, x in completion.paths.shares.items())
            where = f"[{row}] " if len(completions) > 1 else ""
            if completion.paths.candidates:
                shares += f", {completion.paths.mean_candidates:.0f} candidates a reuse"
            console.print(
                f"{where}{shares}",
                style="dim",
                markup=False,
            )
