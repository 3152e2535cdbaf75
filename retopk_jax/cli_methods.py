"""The attention methods of the command line and the options that each takes."""

import argparse
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import CausalLM
from retopk_jax.attention import (
    AttentionMethod,
    ExactTopK,
    Full,
    Loki,
    Quest,
    ReTopK,
    SparQ,
    StreamingLLM,
    TokenSelect,
)
from retopk_jax.attention.path_policy import Risk, check_theta
from retopk_jax.calibration import LokiBasis, RiskPolicy, load_basis, load_policy
from retopk_jax.calibration.retopk import SIZES
from retopk_jax.errors import ConfigError


@dataclass(frozen=True)
class Option:
    """A setting of a method as a command-line option.

    Attributes:
        convert: from the command line's text.
        metavar: how the help calls its value.
        help: what it is.
        default: what the help calls a default that depends on the model; None for the field's own.
    """

    convert: Callable[[str], Any]
    metavar: str
    help: str
    default: str | None = None


@dataclass(frozen=True)
class Method:
    """A method that can be named on the command line.

    Attributes:
        make: the method, built from keyword arguments.
        options: its settings by field name; ``recall_entries`` becomes ``--recall-entries``.
        prepare: keyword arguments of ``make`` from the options given.
    """

    make: Callable[..., AttentionMethod]
    options: Mapping[str, Option]
    prepare: Callable[[dict[str, Any]], dict[str, Any]] = dict


def _yes_or_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected yes or no")
    return text == "yes"


def _rank(text: str) -> int | float:
    return int(text) if text.lstrip("-").isdecimal() else float(text)


def _basis(name: str) -> LokiBasis:
    try:
        return load_basis(name)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _loki_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The basis as an array, and a rank given as a share of the variance as a number."""
    basis, rank = given.get("basis"), given.get("rank")
    if isinstance(rank, float):
        if not 0 < rank < 1:
            raise ConfigError(
                f"--rank {rank}: expected a number of components, or a share of the variance "
                "above 0 and below 1"
            )
        if basis is None:
            raise ConfigError(f"--rank {rank} is a share of a basis's variance: give --basis FILE")
        given = {**given, "rank": basis.rank_of(rank)}
    return given if basis is None else {**given, "basis": jnp.asarray(basis.basis)}


def _policy(name: str) -> RiskPolicy:
    try:
        return load_policy(name)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _retopk_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The maps of a policy, and the sizes that it was fitted with where none are given."""
    policy, theta = given.get("risk"), given.pop("risk_theta", None)
    unchecked = given.pop("risk_unchecked", False)
    if policy is None:
        for option, value in (("--risk-theta", theta), ("--risk-unchecked", unchecked or None)):
            if value is not None:
                raise ConfigError(f"{option} tells how a policy is used: give --risk FILE")
        return given
    if "tau" in given:
        raise ConfigError(f"--tau {given['tau']} has no effect under --risk: leave one of them out")
    if theta is not None:
        check_theta("--risk-theta", theta)
    sizes = {name: policy.provenance["sizes"][name] for name in (*SIZES, "refresh")}
    method = {**sizes, **given, "risk": policy.risk(theta)}
    if not unchecked:
        policy.check_sizes(ReTopK(**method))
    return method


_BUDGET = Option(int, "K", "tokens attended")

METHODS: dict[str, Method] = {
    Full.name: Method(Full, {}),
    ExactTopK.name: Method(ExactTopK, {"budget": _BUDGET}),
    ReTopK.name: Method(
        ReTopK,
        {
            "budget": _BUDGET,
            "capacity": Option(int, "C", "remembered (query, support) pairs a head"),
            "recall": Option(int, "R", "entries whose supports are merged"),
            "window": Option(int, "W", "most recent tokens that are always candidates"),
            "tau": Option(float, "TAU", "similarity below which a head scans all keys"),
            "refresh": Option(int, "T", "scan all keys every T steps, 0 for never"),
            "recall_by": Option(
                str, "ORDER", "merge the entries most alike in similarity, or the last by recency"
            ),
            "share_scan": Option(
                _yes_or_no, "yes|no", "all heads of a KV group scan where one does", "no"
            ),
            "risk": Option(
                _policy,
                "FILE",
                "scan the KV groups whose expected error is above theta instead of heads below "
                "tau; from retopk calibrate --method retopk, whose sizes become the defaults",
                "none",
            ),
            "risk_theta": Option(
                float, "THETA", "expected error that a KV group may bear", "the policy's"
            ),
            "risk_unchecked": Option(
                _yes_or_no, "yes|no", "take a policy of another model, K, C, R or W", "no"
            ),
        },
        _retopk_arguments,
    ),
    StreamingLLM.name: Method(
        StreamingLLM,
        {
            "sinks": Option(int, "N", "first tokens, always attended"),
            "recent": Option(int, "N", "last tokens, always attended"),
            "position_mode": Option(
                str, "MODE", "number the kept tokens cache_relative, or absolute"
            ),
        },
    ),
    Quest.name: Method(
        Quest,
        {
            "budget": _BUDGET,
            "page_size": Option(int, "N", "tokens a page"),
            "last_page": Option(str, "RULE", "the last page is attended always, or competes"),
            "select_per": Option(
                str, "UNIT", "choose pages per query_head, per kv_group or per layer"
            ),
            "dense_layers": Option(int, "N", "first layers with full attention"),
        },
    ),
    SparQ.name: Method(
        SparQ,
        {
            "budget": _BUDGET,
            "components": Option(int, "r", "components of a query that rank", "a quarter of them"),
            "local": Option(int, "N", "last tokens, always attended", "K / 4"),
            "reallocate": Option(_yes_or_no, "yes|no", "mix in the mean value", "yes"),
        },
    ),
    Loki.name: Method(
        Loki,
        {
            "budget": _BUDGET,
            "rank": Option(
                _rank,
                "r",
                "principal components that rank, or the share of the variance they explain",
                "half of them",
            ),
            "basis": Option(
                _basis, "FILE", "from retopk calibrate --method loki", "none, and needed"
            ),
        },
        _loki_arguments,
    ),
    TokenSelect.name: Method(
        TokenSelect,
        {
            "initial": Option(int, "N", "first tokens, always attended"),
            "selected": Option(int, "k", "tokens chosen by vote"),
            "local": Option(int, "N", "last tokens, always attended"),
            "theta": Option(
                float, "THETA", "similarity to the last selecting query that keeps its selection"
            ),
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
        defaults = [_default(method, name) for method in takers]
        if len(set(defaults)) == 1:
            note = f"{', '.join(takers)}; default {defaults[0]}"
        else:
            each = zip(takers, defaults, strict=True)
            note = ", ".join(f"{method}: default {value}" for method, value in each)
        group.add_argument(
            flag(name),
            dest=f"method_{name}",
            type=option.convert,
            metavar=option.metavar,
            help=f"{option.help} ({note})".replace("%", "%%"),
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
            shown = f" {value}" if isinstance(value, int | float | str) else ""
            raise ConfigError(
                f"{flag(name)}{shown} does not apply to --attention {method}, "
                f"which takes {taken or 'no options'}"
            )
    chosen = {}
    for name in names:
        method = METHODS[name]
        taken = {option: value for option, value in given.items() if option in method.options}
        chosen[name] = method.make(**method.prepare(taken))
    return chosen


def check_calibration(args: argparse.Namespace, model: CausalLM) -> None:
    """Refuses a basis or a policy that was fitted on another model."""
    if args.method_basis is not None:
        args.method_basis.check_model(model)
    if args.method_risk is not None and not args.method_risk_unchecked:
        args.method_risk.check_model(model)


def provenance(args: argparse.Namespace) -> dict[str, Any] | None:
    """Where the basis or the policy of the command line comes from; None without one."""
    fitted = args.method_basis if args.method_risk is None else args.method_risk
    return None if fitted is None else fitted.provenance


def flag(name: str) -> str:
    """The command-line option of a field."""
    return "--" + name.replace("_", "-")


def settings(method: AttentionMethod) -> dict[str, Any]:
    """The command line's settings of a method, by field name; of an array, its hash."""
    names = (name for name in METHODS[method.name].options if hasattr(method, name))
    return {name: _plain(getattr(method, name)) for name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, Risk):
        return value.described()
    if isinstance(value, jax.Array) and value.ndim > 0:
        return "sha256:" + hashlib.sha256(np.asarray(value).tobytes()).hexdigest()
    return value


def _options() -> dict[str, tuple[Option, list[str]]]:
    """Every option of any method, with the names of the methods that take it."""
    found: dict[str, tuple[Option, list[str]]] = {}
    for method, entry in METHODS.items():
        for name, option in entry.options.items():
            found.setdefault(name, (option, []))[1].append(method)
    return found


def _default(method: str, name: str) -> Any:
    described = METHODS[method].options[name].default
    if described is not None:
        return described
    for item in fields(METHODS[method].make):  # pyright: ignore[reportArgumentType]
        if item.name == name and item.default is not MISSING:
            return item.default
    raise KeyError(f"{method} has no default for {name}")
