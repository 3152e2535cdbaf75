"""Rotary position embedding and its context extensions, in the half-split convention.

Frequencies are those of Hugging Face transformers, bit for bit where the host computes them: a
key rotated here equals a key rotated there at any position.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .errors import ConfigError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")

_NUMBERS = (
    "factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "low_freq_factor",
    "high_freq_factor",
)
_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one model.

    Attributes:
        rope_type: one of `ROPE_TYPES`.
        theta: base of the frequencies.
        head_dim: D, even.
        max_position_embeddings: the config's entry of that name.
        original_max_positions: positions before any extension; `yarn` and `llama3` depend on it.
        factor: how far the context is extended; 1 is not at all.
        attention_factor: scale of cos and sin under `yarn`; None derives it from the factor.
        beta_fast: rotations above which `yarn` leaves a frequency as it is.
        beta_slow: rotations below which `yarn` divides a frequency by the factor.
        mscale: with `mscale_all_dim`, replaces the derived attention factor of `yarn`.
        mscale_all_dim: see `mscale`.
        truncate: whether `yarn` rounds the two bounds to whole dimensions.
        low_freq_factor: `llama3`: wavelengths over original / low_freq_factor are divided.
        high_freq_factor: `llama3`: wavelengths under original / high_freq_factor are kept.
    """

    rope_type: str
    theta: float
    head_dim: int
    max_position_embeddings: int
    original_max_positions: int
    factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self):
        if self.rope_type not in ROPE_TYPES:
            raise ConfigError(
                f"rope_type is {self.rope_type!r}; supported are {', '.join(ROPE_TYPES)}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; rotary embedding needs an even one")
        if not self.theta > 0:
            raise ConfigError(f"rope_theta is {self.theta}; it must be positive")
        if not self.factor >= 1:
            raise ConfigError(f"RoPE factor is {self.factor}; it must be at least 1")
        if not self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"low_freq_factor is {self.low_freq_factor}; it must be less than "
                f"high_freq_factor, {self.high_freq_factor}"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], head_dim: int) -> "Rope":
        """Reads the RoPE entries of a Hugging Face ``config.json``.

        Both layouts are understood: ``rope_theta`` beside ``rope_scaling`` (transformers 4, with
        ``rope_type`` or the older ``type``) and ``rope_parameters`` (transformers 5).

        Raises:
            ConfigError: an unsupported type, or a key that is missing or out of range.
        """
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(scaling, Mapping):
            raise ConfigError(f"RoPE parameters are {scaling!r}; a JSON object is expected")
        rope_type = scaling.get("rope_type", scaling.get("type", "default"))
        partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if partial not in (None, 1):
            raise ConfigError(f"partial_rotary_factor is {partial}; only 1 is supported")
        theta = scaling.get("rope_theta", config.get("rope_theta"))
        max_positions = config["max_position_embeddings"]
        original = config.get(
            "original_max_position_embeddings",
            scaling.get("original_max_position_embeddings"),
        )
        original = max_positions if original is None else int(original)
        numbers = {name: scaling[name] for name in _NUMBERS if scaling.get(name) is not None}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"RoPE parameter {name!r} is {value!r}; a number is expected")
        for name in _REQUIRED.get(rope_type, ()):
            if name not in numbers:
                raise ConfigError(f"rope_type {rope_type!r} needs the key {name!r}")
        if rope_type == "yarn":
            numbers.setdefault("factor", max_positions / original)
        return cls(
            rope_type=rope_type,
            theta=10_000.0 if theta is None else float(theta),
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            original_max_positions=original,
            truncate=bool(scaling.get("truncate", True)),
            **{name: float(value) for name, value in numbers.items()},
        )

    @property
    def max_positions(self) -> int:
        """Positions that the extended frequencies are meant for.

        Under ``linear``, ``dynamic`` and ``yarn`` a config may state the length before or after the
        extension, so this is ``max_position_embeddings`` or the unextended length times the factor,
        whichever is more.
        """
        if self.rope_type in ("default", "llama3"):
            return self.max_position_embeddings
        return max(self.max_position_embeddings, int(self.original_max_positions * self.factor))

    @property
    def scale(self) -> float:
        """What cos and sin are multiplied by, which scales logits by its square (YaRN, eq. 22)."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    def inverse_frequencies(self) -> np.ndarray:
        """Radians per position of each pair of dimensions: float32 ``[D/2]``, largest first.

        Under ``dynamic`` these hold up to ``max_position_embeddings``; see
        `row_inverse_frequencies`.
        """
        plain = _plain_inverse_frequencies(self.theta, self.head_dim)
        match self.rope_type:
            case "linear":
                return plain / np.float32(self.factor)
            case "llama3":
                return self._llama3(plain)
            case "yarn":
                return self._yarn(plain)
            case _:
                return plain

    def row_inverse_frequencies(self, sequence_lengths: jax.Array) -> jax.Array:
        """Radians per position for rows of these lengths: int32 ``[B]`` to float32 ``[B, D/2]``.

        Only ``dynamic`` depends on the length: past ``max_position_embeddings`` the base grows so
        that the lowest frequency is interpolated to the row's length ("NTK-aware" scaling).
        """
        rows = sequence_lengths.shape[0]
        if self.rope_type != "dynamic":
            fixed = jnp.asarray(self.inverse_frequencies())
            return jnp.broadcast_to(fixed[None], (rows, self.head_dim // 2))
        # An error of one unit in the last place turns into radians at large positions, and XLA's
        # float32 power has several; so the powers are float64, rounded where transformers rounds.
        with jax.enable_x64(True):
            limit, dim = self.max_position_embeddings, self.head_dim
            lengths = jnp.maximum(sequence_lengths, limit).astype(jnp.float32)
            growth = self.factor * lengths / limit - (self.factor - 1)
            exponents = jnp.asarray(_exponents(dim))  # [D/2]
            theta = self.theta * _power(growth, jnp.float64(dim / (dim - 2)))  # [B]
            return 1.0 / _power(theta[:, None], exponents[None])

    def _llama3(self, plain: np.ndarray) -> np.ndarray:
        factor, low, high = self.factor, self.low_freq_factor, self.high_freq_factor
        original = self.original_max_positions
        one = np.float32(1)
        wavelength = one / plain * np.float32(2 * math.pi)
        rotations = one / wavelength * np.float32(original)
        smooth = (rotations - np.float32(low)) / np.float32(high - low)
        divided = plain / np.float32(factor)
        blended = (1 - smooth) * plain / np.float32(factor) + smooth * plain
        return np.where(
            wavelength > np.float32(original / low),
            divided,
            np.where(wavelength < np.float32(original / high), plain, blended),
        )

    def _yarn(self, plain: np.ndarray) -> np.ndarray:
        dim, original = self.head_dim, self.original_max_positions
        factor = np.float32(self.factor)

        def dimension_of(rotations: float) -> float:
            ratio = original / (rotations * 2 * math.pi)
            return dim * math.log(ratio) / (2 * math.log(self.theta))

        low, high = dimension_of(self.beta_fast), dimension_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001
        index = np.arange(dim // 2, dtype=np.float32)
        ramp = np.clip((index - np.float32(low)) / np.float32(high - low), 0, 1)
        kept = 1 - ramp
        divided = np.float32(1) / (factor * _powers(self.theta, dim))
        return divided * (1 - kept) + plain * kept


def position_angles(positions: jax.Array, row_inverse_frequencies: jax.Array) -> jax.Array:
    """Rotation angles of absolute positions, ``position * frequency`` in float32.

    The product is rounded like that of transformers: half a unit in the last place, 0.002 rad at
    position 60,000 and 0.03 rad at a million for the fastest frequency.

    Args:
        positions: int32 ``[B, T]``.
        row_inverse_frequencies: float32 ``[B, D/2]``.

    Returns:
        Radians, float32 ``[B, T, D/2]``.
    """
    return positions.astype(jnp.float32)[:, :, None] * row_inverse_frequencies[:, None, :]


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _power(base: jax.Array, exponent: jax.Array) -> jax.Array:
    """float32 power, correctly rounded but for rare ties; needs 64-bit types enabled."""
    return (base.astype(jnp.float64) ** exponent.astype(jnp.float64)).astype(jnp.float32)


def _exponents(dim: int) -> np.ndarray:
    return np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)


def _powers(theta: float, dim: int) -> np.ndarray:
    exact = np.float64(theta) ** _exponents(dim).astype(np.float64)
    return exact.astype(np.float32)


def _plain_inverse_frequencies(theta: float, dim: int) -> np.ndarray:
    return np.float32(1) / _powers(theta, dim)
