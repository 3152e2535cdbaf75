"""`retopk prefill`: reads prompts once and stores them for `retopk generate --context`."""

import argparse
from pathlib import Path

from rich.console import Console

from models import CausalLM, load_model
from retopk_jax.attention import ReTopK
from retopk_jax.cli_progress import reading
from retopk_jax.cli_prompts import check_prompts, conversation
from retopk_jax.context_store import check_store, save_context
from retopk_jax.decode import remember
from retopk_jax.generate import encode_prompts
from retopk_jax.prefill import TAIL_QUERIES, prefill
from retopk_jax.sharding import parse_mesh


def run_prefill(args: argparse.Namespace) -> None:
    """Loads a model, reads the prompts, stores the context.

    Raises:
        RetopkError: a prompt cannot be used, or the store cannot be made there.
        ModelError: the model cannot be loaded.
    """
    check_prompts(args)
    check_store(args.save)
    method = ReTopK(budget=args.budget, capacity=args.capacity, recall=1)
    mesh = parse_mesh(args.mesh)
    console = Console(stderr=True, highlight=False)
    with console.status(f"loading {args.model}"):
        model = load_model(args.model, dtype=args.dtype, mesh=mesh)
        for note in model.notes:
            console.print(f"note: {note}", markup=False)
        tokens, rests = _encode(model, args)
    with reading(console) as progress:
        tail = max(TAIL_QUERIES, method.tail_queries)
        read = prefill(model, tokens, new_tokens=1, tail_queries=tail, progress=progress)
    context = remember(model, method, read.context)
    with console.status(f"storing {args.save}"):
        save_context(args.save, model, context, tokens, source=_findable(args.model), rests=rests)
    console.print(
        f"{args.save}: {sum(map(len, tokens)):,} tokens read in {read.seconds:.2f} s, "
        f"compilation {read.compile_seconds:.1f} s",
        style="dim",
        markup=False,
    )


def _encode(model: CausalLM, args: argparse.Namespace) -> tuple[list[list[int]], list[str]]:
    """Token ids of the prompts, and what is to follow the question on each."""
    if not args.chat:
        return encode_prompts(model, args.prompts), [""] * len(args.prompts)
    tokenizer = model.require_tokenizer()
    opened = [tokenizer.open_chat(conversation(args, prompt)) for prompt in args.prompts]
    return [ids for ids, _ in opened], [rest for _, rest in opened]


def _findable(model: str) -> str:
    """The model's name for another process, which may run elsewhere."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model
