"""Which heads scan all keys in a step: by their own similarity, or by what a KV group risks."""

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from retopk_jax.errors import ConfigError
from retopk_jax.language_model import Geometry


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Risk:
    """Expected error of a reuse by its largest similarity, and how much of it a KV group may bear.

    A map is linear between its knots and constant beyond them. Neither new maps of the same number
    of knots nor another theta recompile a step.

    Attributes:
        similarity: float32 ``[layers, H, N]``, knots, ascending.
        error: float32 ``[layers, H, N]``, expected relative error at the knots, descending.
        theta: a group whose heads' expected errors add up to more scans all keys: −inf always,
            inf never but on schedule and for heads that remember nothing.
    """

    similarity: jax.Array
    error: jax.Array
    theta: float | jax.Array = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.theta, (bool, int, float, str, np.generic)):  # traced inside jit
            check_theta("theta", self.theta)

    def check(self, geometry: Geometry) -> None:
        """Refuses maps of other shapes, and ones that are not finite and monotone."""
        similarity, error = np.asarray(self.similarity), np.asarray(self.error)
        heads = (geometry.num_layers, geometry.num_heads)
        for name, knots in (("similarity", similarity), ("error", error)):
            if knots.ndim != 3 or knots.shape[:2] != heads or not knots.shape[2]:
                raise ConfigError(
                    f"risk.{name} of shape {knots.shape}: this model needs "
                    f"({heads[0]}, {heads[1]}, N)"
                )
            if knots.dtype != np.float32:
                raise ConfigError(f"risk.{name} of dtype {knots.dtype}: expected float32")
            if not np.isfinite(knots).all():
                raise ConfigError(f"risk.{name}: expected finite knots")
        if similarity.shape != error.shape:
            raise ConfigError(
                f"risk.error of shape {error.shape}: expected that of similarity, "
                f"{similarity.shape}"
            )
        if (np.diff(similarity) < 0).any() or (np.diff(error) > 0).any():
            raise ConfigError("risk: expected similarities that ascend and errors that descend")

    def described(self) -> dict[str, Any]:
        """Theta, and a hash of the maps; as JSON, infinite numbers by name."""
        maps = hashlib.sha256()
        for knots in (self.similarity, self.error):
            maps.update(np.asarray(knots).tobytes())
        theta = float(self.theta)
        return {
            "theta": theta if math.isfinite(theta) else str(theta),
            "maps": "sha256:" + maps.hexdigest(),
        }

    def expected(self, layer: int | jax.Array, rho_max: jax.Array) -> jax.Array:
        """Expected error of every head's reuse, float32 ``[B, H]``.

        Args:
            layer: index of the layer.
            rho_max: float32 ``[B, H]``; −inf is taken for a similarity below all knots.
        """
        x, y = self.similarity[layer][None], self.error[layer][None]  # [1, H, N]
        width = jnp.diff(x)
        # A knot that is repeated adds nothing: its drop is none or counted at once.
        reached = rho_max[..., None] - x[..., :-1]
        part = jnp.clip(reached / jnp.where(width > 0, width, 1.0), 0.0, 1.0)
        part = jnp.where(width > 0, part, (reached >= 0).astype(part.dtype))
        return y[..., 0] + jnp.sum(part * jnp.diff(y), axis=-1)


def check_theta(name: str, value: float | str | np.generic) -> None:
    """Raises ConfigError unless ``value`` is a number; infinite ones are."""
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise ConfigError(f"{name}={value!r}: expected a number, -inf or inf")


def scanning(
    rho_max: jax.Array,
    groups: int,
    tau: float | jax.Array,
    expected: jax.Array | None = None,
    theta: float | jax.Array = 0.0,
) -> jax.Array:
    """Heads that scan all keys because their KV group does, bool ``[B, H]``.

    Args:
        rho_max: float32 ``[B, H]``, largest similarities; −inf where nothing is remembered or the
            query is unusable, which makes the group scan under any policy.
        groups: G, KV heads.
        tau: similarity below which a head makes its group scan; without ``expected``.
        expected: float32 ``[B, H]``, expected errors, to be held against theta instead.
        theta: what a group's expected errors may add up to.
    """
    batch, heads = rho_max.shape
    lost = (rho_max == -jnp.inf).reshape(batch, groups, -1)  # [B, G, H/G]
    if expected is None:
        group = jnp.any(rho_max.reshape(lost.shape) < tau, axis=2)
    else:
        group = jnp.sum(expected.reshape(lost.shape), axis=2) > theta
    group = group | jnp.any(lost, axis=2)
    return jnp.broadcast_to(group[..., None], lost.shape).reshape(batch, heads)
