"""Prompts of the command line."""

import argparse

from retopk_jax.errors import ConfigError, PromptError


def check_prompts(args: argparse.Namespace) -> None:
    """Refuses no prompt, an empty one, and a system message outside a conversation."""
    if not args.prompts:
        raise PromptError("no prompt: give --prompt TEXT or --prompt-file FILE")
    refuse_empty(args.prompts)
    if args.system is not None and not args.chat:
        raise ConfigError("--system is part of a conversation: give --chat as well")


def refuse_empty(prompts: list[str]) -> None:
    """Raises PromptError where a prompt is empty."""
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise PromptError(f"prompt {row} is empty: expected some text")


def conversation(args: argparse.Namespace, prompt: str) -> list[dict[str, str]]:
    """The messages of a conversation in which a user says the prompt."""
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": prompt}]
