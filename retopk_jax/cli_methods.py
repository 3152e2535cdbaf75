"""The attention methods of the command line and the options that each takes."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from retopk_jax.attention import AttentionMethod, ExactTopK, Full, ReTopK
from retopk_jax.errors import ConfigError


@dataclass(frozen=True)
class Option:
    """A setting of a method as a command-line option.

    Attributes:
        convert: from the command line's text.
        metavar: how the help calls its value.
        help: what it is.
    """

    convert: Callable[[str], Any]
    metavar: str
    help: str


@dataclass(frozen=True)
class Method:
    """A method that can be named on the command line.

    Attributes:
        make: the method, built from keyword arguments.
        options: its settings by field name; ``recall_entries`` becomes ``--recall-entries``.
    """

    make: Callable[..., AttentionMethod]
    options: Mapping[str, Option]


_BUDGET = Option(int, "K", "tokens attended")

METHODS: dict[str, Method] = {
    Full.name: Method(Full, {}),
    ExactTopK.name: Method(ExactTopK, {"budget": _BUDGET}),
    ReTopK.name: Method(
        ReTopK,
        {
            "budget": _BUDGET,
            "capacity": Option(int, "C", "remembered (query, support) pairs a head"),
            "recall": Option(int, "R", "most similar entries whose supports are merged"),
            "window": Option(int, "W", "most recent tokens that are always candidates"),
            "tau": Option(float, "TAU", "similarity below which a head scans all keys"),
            "refresh": Option(int, "T", "scan all keys every T steps, 0 for never"),
        },
    ),
}
"""One entry a method, by the name that ``--attention`` takes."""


def add_method_options(parser: argparse.ArgumentParser, *, default: str | None) -> None:
    """Adds ``--attention`` and every method's options.

    Args:
        parser: where to.
        default: of ``--attention``; None means all methods.
    """
    parser.add_argument(
        "--attention",
        choices=list(METHODS),
        default=default,
        help=f"attention of the decode steps (default: {default or 'all of them'})",
    )
    group = parser.add_argument_group("options of the attention method")
    for name, (option, takers) in _options().items():
        group.add_argument(
            flag(name),
            dest=f"method_{name}",
            type=option.convert,
            metavar=option.metavar,
            help=f"{option.help} ({', '.join(takers)}; default {_default(takers[0], name)})",
        )


def chosen_methods(args: argparse.Namespace) -> dict[str, AttentionMethod]:
    """The method that ``--attention`` names, or all of them, with the options given.

    Raises:
        ConfigError: an option that the chosen method does not take, or a value out of range.
    """
    given = {
        name: value for name in _options() if (value := getattr(args, f"method_{name}")) is not None
    }
    names = list(METHODS) if args.attention is None else [args.attention]
    for name, value in given.items():
        if not any(name in METHODS[method].options for method in names):
            method = names[0]
            taken = ", ".join(flag(option) for option in METHODS[method].options)
            raise ConfigError(
                f"{flag(name)} {value} does not apply to --attention {method}, "
                f"which takes {taken or 'no options'}"
            )
    return {
        method: METHODS[method].make(
            **{name: value for name, value in given.items() if name in METHODS[method].options}
        )
        for method in names
    }


def flag(name: str) -> str:
    """The command-line option of a field."""
    return "--" + name.replace("_", "-")


def settings(method: AttentionMethod) -> dict[str, Any]:
    """The command line's settings of a method, by field name."""
    return {name: getattr(method, name) for name in METHODS[method.name].options}


def _options() -> dict[str, tuple[Option, list[str]]]:
    """Every option of any method, with the names of the methods that take it."""
    found: dict[str, tuple[Option, list[str]]] = {}
    for method, entry in METHODS.items():
        for name, option in entry.options.items():
            found.setdefault(name, (option, []))[1].append(method)
    return found


def _default(method: str, name: str) -> Any:
    for item in fields(METHODS[method].make):  # pyright: ignore[reportArgumentType]
        if item.name == name and item.default is not MISSING:
            return item.default
    raise KeyError(f"{method} has no default for {name}")
