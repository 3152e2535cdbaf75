"""Range checks of method settings."""

import math
import operator
from typing import Any

from retopk_jax.errors import ConfigError


def check_integer(name: str, value: Any, *, minimum: int, maximum: int | None = None) -> None:
    """Raises ConfigError unless ``value`` is an integer in range."""
    bound = f">= {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < minimum or (maximum is not None and number > maximum):
        raise ConfigError(f"{name}={value!r}: expected an integer {bound}")


def check_number(name: str, value: Any, *, minimum: float) -> None:
    """Raises ConfigError unless ``value`` is a finite number of at least ``minimum``."""
    try:
        number = None if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError):
        number = None
    if number is None or not math.isfinite(number) or number < minimum:
        raise ConfigError(f"{name}={value!r}: expected a finite number >= {minimum}")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises ConfigError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigError(f"{name}={value!r}: expected one of {', '.join(choices)}")
