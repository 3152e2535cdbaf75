"""The methods that are compared, their budgets split as the source splits 512 tokens."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from retopk_jax import (
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
from retopk_jax.attention.path_policy import Risk
from retopk_jax.calibration import load_policy
from retopk_jax.errors import ConfigError
from retopk_jax.language_model import LanguageModel


@dataclass(frozen=True)
class Variant:
    """A method as it is compared.

    Attributes:
        label: unique in a run.
        name: as it was asked for, without the budget.
        budget: K, or None.
        method: what is run.
    """

    label: str
    name: str
    budget: int | None
    method: AttentionMethod

    def changed(self, name: str, changes: Mapping[str, Any]) -> "Variant":
        """Another name and other settings."""
        method = replace(self.method, **changes)  # pyright: ignore
        return Variant(f"{name} K={self.budget}", name, self.budget, method)

    def description(self) -> dict[str, Any]:
        """What a result says of it."""
        return {
            "label": self.label,
            "method": self.name,
            "budget": self.budget,
            "settings": method_settings(self.method),
        }


def _streaming(budget: int, basis: jax.Array | None) -> AttentionMethod:
    return StreamingLLM(sinks=budget // 8, recent=budget - budget // 8)


def _sparq(budget: int, basis: jax.Array | None) -> AttentionMethod:
    return SparQ(budget=budget, local=max(budget // 4, 1))


def _tokenselect(budget: int, basis: jax.Array | None) -> AttentionMethod:
    initial, local = budget // 8, max(budget // 16, 1)
    return TokenSelect(initial=initial, selected=budget - initial - local, local=local)


MAKERS: dict[str, Callable[[int, jax.Array | None], AttentionMethod]] = {
    "full": lambda budget, basis: Full(),
    "exact": lambda budget, basis: ExactTopK(budget=budget),
    "retopk": lambda budget, basis: ReTopK(budget=budget),
    "streaming": _streaming,
    "quest": lambda budget, basis: Quest(budget=budget),
    "sparq": _sparq,
    "loki": lambda budget, basis: Loki(budget=budget, basis=basis),
    "tokenselect": _tokenselect,
}
"""By name: the method at a budget, given the principal components of the model's keys."""

ALL = tuple(MAKERS)

TITLES = {
    "full": "Full",
    "exact": "Exact Top-K",
    "retopk": "ReTopK",
    "streaming": "StreamingLLM",
    "quest": "Quest",
    "sparq": "SparQ",
    "loki": "Loki",
    "tokenselect": "TokenSelect",
}


def make_variants(
    names: Sequence[str], budgets: Sequence[int], basis: jax.Array | None
) -> list[Variant]:
    """Every method at every budget; Full once.

    Args:
        names: each ``METHOD`` or ``METHOD:field=value,field=value``. ReTopK also takes
            ``risk=FILE``, from `retopk calibrate`, where ``{K}`` stands for the budget, with the
            sizes of the file as defaults, and then ``theta=THETA`` or ``share=SHARE`` of KV groups
            scanned, and ``unchecked=true`` for a file of another model or other sizes.
        budgets: K.
        basis: for Loki.

    Raises:
        ConfigError: an unknown method or field, a value out of range, or a file that cannot be
            used.
    """
    variants = []
    for name in names:
        base, _, options = name.partition(":")
        if base not in MAKERS:
            raise ConfigError(f"--methods {name}: expected one of {', '.join(MAKERS)}")
        given = _options(options, name)
        for budget in [None] if base == "full" else budgets:
            method = MAKERS[base](budget or 0, basis)
            if isinstance(method, ReTopK) and "risk" in given:
                variants.append(_by_risk(name, budget or 0, given))
                continue
            unknown = set(given) - {field.name for field in fields(method)}  # pyright: ignore
            if unknown:
                raise ConfigError(f"--methods {name}: {base} has no {', '.join(sorted(unknown))}")
            method = replace(method, **given)  # pyright: ignore
            label = name if budget is None else f"{name} K={budget}"
            variants.append(Variant(label, name, budget, method))
    return variants


def _by_risk(name: str, budget: int, given: Mapping[str, Any]) -> Variant:
    """ReTopK under a policy from a file; its name has the file's without a directory."""
    settings = dict(given)
    path = Path(str(settings.pop("risk")).replace("{K}", str(budget)))
    policy = load_policy(path)
    theta, share = settings.pop("theta", None), settings.pop("share", None)
    unchecked = settings.pop("unchecked", False)
    if theta is not None and share is not None:
        raise ConfigError(f"--methods {name}: expected theta or share, not both")
    unknown = set(settings) - {field.name for field in fields(ReTopK)}
    if unknown or "tau" in settings:
        wrong = ", ".join(sorted(unknown | ({"tau"} & set(settings))))
        raise ConfigError(f"--methods {name}: retopk under risk has no {wrong}")
    chosen = policy.theta_at(share) if share is not None else theta
    method = policy.method(budget=budget, risk=policy.risk(chosen), **settings)
    if not unchecked:
        policy.check_sizes(method)
    named = {**given, "risk": Path(str(given["risk"])).name}
    shown = ",".join(f"{key}={value}" for key, value in named.items())
    return Variant(f"retopk:{shown} K={budget}", f"retopk:{shown}", budget, method)


def check_policies(names: Sequence[str], budgets: Sequence[int], model: LanguageModel) -> None:
    """Refuses policies of ``--methods`` that were fitted on another model, unless unchecked.

    Raises:
        ConfigError: one was, with the reason.
    """
    for name in names:
        given = _options(name.partition(":")[2], name)
        if "risk" in given and not given.get("unchecked", False):
            for path in {str(given["risk"]).replace("{K}", str(budget)) for budget in budgets}:
                load_policy(path).check_model(model)


def needs_basis(names: Sequence[str]) -> bool:
    """Whether one of the methods ranks in principal components."""
    return any(name.partition(":")[0] == "loki" for name in names)


def title(name: str) -> str:
    """How tables call a method that was asked for as ``METHOD:options``."""
    base, _, options = name.partition(":")
    return TITLES.get(base, base) + (f" ({options})" if options else "")


def short_labels(labels: Iterable[str]) -> dict[str, str]:
    """Variants' labels as pictures have room for them, by label.

    ReTopK's settings stand for it, and a file of maps is named only where there are several.
    """
    parts = {label: re.fullmatch(r"retopk:(.+?)((?: \| .+)? K=\d+)", label) for label in labels}
    options = {
        label: [option.partition("=") for option in found[1].split(",")]
        for label, found in parts.items()
        if found is not None
    }
    files = {value for group in options.values() for name, _, value in group if name == "risk"}

    def shown(name: str, value: str) -> str:
        alone = value == "true" or (name == "risk" and len(files) == 1)
        return name if alone else f"{name} {value}"

    return {
        label: label
        if found is None
        else ", ".join(shown(name, value) for name, _, value in options[label]) + found[2]
        for label, found in parts.items()
    }


def method_settings(method: AttentionMethod) -> dict[str, Any]:
    """Every setting of a method; arrays by their shape."""
    found: dict[str, Any] = {"class": type(method).__name__}
    for field in fields(method):  # pyright: ignore
        value = getattr(method, field.name)
        if isinstance(value, (jax.Array, np.ndarray)):
            value = f"array {tuple(value.shape)}"
        if isinstance(value, AttentionMethod):
            value = method_settings(value)
        if isinstance(value, Risk):
            value = value.described()
        found[field.name] = value
    return found


def _options(text: str, name: str) -> Mapping[str, Any]:
    given: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        field, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"--methods {name}: expected field=value, not {part!r}")
        given[field] = _value(value)
    return given


def _value(text: str) -> Any:
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)
