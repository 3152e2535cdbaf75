"""`retopk generate`: prompts from the command line, continuations to standard output."""

import argparse
import sys
from typing import Any

from rich.console import Console

from models import CausalLM, load_model
from retopk_jax.attention import AttentionMethod, Loki
from retopk_jax.attention.checks import check_integer
from retopk_jax.cli_files import check_target, write_json
from retopk_jax.cli_methods import check_calibration, chosen_methods, provenance, settings
from retopk_jax.cli_progress import reading
from retopk_jax.cli_prompts import check_prompts, conversation, refuse_empty
from retopk_jax.context_store import load_context, read_manifest
from retopk_jax.errors import ConfigError, ContextError, PromptError
from retopk_jax.generate import Completion, Generation, encode_prompts, generate
from retopk_jax.memory import memory_need
from retopk_jax.prefill import Context
from retopk_jax.sampling import make_sampling
from retopk_jax.sharding import parse_mesh

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
    notes = _notes(args)
    console = Console(stderr=True, highlight=False)
    with console.status(f"loading {notes['source']}"):
        model = load_model(notes["source"], dtype=notes["dtype"], mesh=parse_mesh(args.mesh))
        for note in model.notes:
            console.print(f"note: {note}", markup=False)
        check_calibration(args, model)
        prompts, context = _encode(model, args, notes)
    streams = len(notes["rests"] if prompts is None else prompts) == 1
    with reading(console) as progress:
        generation = generate(
            model,
            prompts,
            context=context,
            donate=True,
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
    if args.context is None:
        if args.model is None:
            raise ConfigError("no model: give --model MODEL, or --context DIR")
        check_prompts(args)
    else:
        refuse_empty(args.prompts)
        for option, value in (("--chat", args.chat), ("--system", args.system)):
            if value:
                raise ConfigError(f"{option} is settled by --context: leave it out")
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


def _notes(args: argparse.Namespace) -> dict[str, Any]:
    """Model, dtype and, of a stored context, what is to follow the question on each row."""
    if args.context is None:
        return {"source": args.model, "dtype": args.dtype, "rests": [""]}
    manifest = read_manifest(args.context)
    stored, notes = manifest["settings"]["dtype"], manifest["notes"]
    if args.dtype not in (None, stored):
        raise ContextError(f"--dtype {args.dtype}: {args.context} was read in {stored}")
    if not notes.keys() >= {"source", "rests"}:
        raise ContextError(f"{args.context}: not written by retopk prefill")
    return {
        "source": args.model or notes["source"],
        "dtype": stored,
        "rests": notes["rests"],
        "longest": manifest["sizes"]["longest"],
    }


def _encode(
    model: CausalLM, args: argparse.Namespace, notes: dict[str, Any]
) -> tuple[list[list[int]] | None, Context | None]:
    """Token ids of the prompts, None where a context is continued as it is, and the context."""
    if args.context is not None:
        prompts = _questions(model, args.prompts, notes["rests"])
        new_tokens = max(map(len, prompts or [[]])) + args.max_new_tokens
        if len(notes["rests"]) > 1:  # the longest row may have a short question: generate knows
            new_tokens = min(new_tokens, model.decoder.max_positions - notes["longest"])
        return prompts, load_context(args.context, model, new_tokens=new_tokens).context
    if not args.chat:
        return encode_prompts(model, args.prompts), None
    tokenizer = model.require_tokenizer()
    return [tokenizer.encode_chat(conversation(args, prompt)) for prompt in args.prompts], None


def _questions(model: CausalLM, prompts: list[str], rests: list[str]) -> list[list[int]] | None:
    """Token ids of what follows a stored context; None if nothing does."""
    asked = prompts or [""] * len(rests)
    ends = rests * len(asked) if len(rests) == 1 else rests
    if len(asked) != len(ends):
        raise PromptError(
            f"{len(asked)} prompts after a context of {len(rests)} rows: expected {len(rests)}"
        )
    texts = [question + end for question, end in zip(asked, ends, strict=True)]
    return encode_prompts(model, texts, begins=False) if any(texts) else None


def _write(row: int, text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def report(
    model: CausalLM,
    method: AttentionMethod,
    generation: Generation,
    calibration: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What ``--json`` writes; with several prompts, what belongs to one is a list over them."""
    need = memory_need(
        model.decoder.geometry,
        method,
        weights=model.parameter_bytes,
        batch=len(generation.completions),
        capacity=generation.capacity,
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
        "group_share": None if paths is None else paths.group_share,
        "predicted_error": None if paths is None else paths.mean_predicted_error,
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
            if completion.paths.group_share is not None:
                shares += f", {completion.paths.group_share:.1%} of KV groups scanned"
            if completion.paths.mean_predicted_error is not None:
                shares += f", expected error {completion.paths.mean_predicted_error:.4f}"
            console.print(
                f"{where}{shares}",
                style="dim",
                markup=False,
            )
