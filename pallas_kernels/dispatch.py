"""Choosing an implementation of an op: the named one, or the best that the platform has."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from pallas_kernels.packed import unpacked


def platform() -> str:
    """Platform that a function traced now is for: the abstract device's, else the default's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device is not None else jax.default_backend()


def _taking_arrays(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """An implementation that is given arrays for packed rows, unless it is the TPU's."""
    if name == "mosaic_tpu":
        return run
    return lambda *args, **kwargs: run(*map(unpacked, args), **kwargs)


def dispatch(
    op: str,
    implementations: Mapping[str, Callable[..., Any]],
    implementation: str | None,
    preference: Mapping[str, Sequence[str]],
) -> Callable[..., Any]:
    """Returns the function that runs ``op``.

    Args:
        op: name of the op, for error messages.
        implementations: every implementation by name; ``"reference"`` is always among them.
        implementation: the one wanted, or None for the best of `platform`.
        preference: implementations to try in order, by platform; a platform that is not a key uses
            the reference. A later one is tried only when an earlier raises NotImplementedError.

    Raises:
        ValueError: ``implementation`` is not the name of one.
    """
    implementations = {name: _taking_arrays(name, run) for name, run in implementations.items()}
    if implementation is not None:
        if implementation not in implementations:
            raise ValueError(
                f"implementation={implementation!r} of {op}: expected None or one of "
                f"{sorted(implementations)}"
            )
        return implementations[implementation]
    order = [*preference.get(platform(), ()), "reference"]

    def run(*args: Any, **kwargs: Any) -> Any:
        for name in order[:-1]:
            try:
                return implementations[name](*args, **kwargs)
            except NotImplementedError:
                continue
        return implementations["reference"](*args, **kwargs)

    return run
