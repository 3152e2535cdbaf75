"""Chat templates, rendered in a sandbox: they come with checkpoints and are not trusted."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Undefined
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import ChatTemplateError

MAX_LOOP_STEPS = 100_000
MAX_CHARACTERS = 50_000_000


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Text of a conversation.

    Args:
        template: Jinja source as in ``tokenizer_config.json``.
        messages: each with the keys ``role`` and ``content``.
        special_tokens: variables such as ``bos_token``.
        add_generation_prompt: end with the header of the assistant's turn.

    Raises:
        ChatTemplateError: the template is malformed, rejects the messages (its
            ``raise_exception``), or does what a template has no business doing: reaching for
            Python internals, changing its arguments, or ranges and text beyond
            `MAX_LOOP_STEPS` and `MAX_CHARACTERS`.
    """
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    pieces: list[str] = []
    size = 0
    try:
        chunks = environment.from_string(template).generate(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        )
        for chunk in chunks:
            size += len(chunk)
            if size > MAX_CHARACTERS:
                raise SecurityError(f"output exceeds {MAX_CHARACTERS} characters")
            pieces.append(chunk)
    except SecurityError as error:
        raise ChatTemplateError(f"chat template refused: {error}") from error
    except TemplateError as error:
        raise ChatTemplateError(f"chat template failed: {error}") from error
    # A template is foreign code: whatever it trips over is its own failure.
    except Exception as error:
        raise ChatTemplateError(f"chat template failed: {type(error).__name__}: {error}") from error
    return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with what templates of Hugging Face checkpoints expect."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._steps_left = MAX_LOOP_STEPS
        self.globals["range"] = self._range
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        self.filters["tojson"] = _to_json

    def _range(self, *bounds: int) -> range:
        steps = range(*bounds)
        if len(steps) > self._steps_left:
            raise SecurityError(f"range{bounds}: more than {MAX_LOOP_STEPS} loop steps in all")
        self._steps_left -= len(steps)
        return steps

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"attribute {attribute} of a {type(obj).__name__}")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or not all(isinstance(side, int | float) for side in (left, right)):
            raise SecurityError(f"operator {operator} on {left!r:.40} and {right!r:.40}")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
