"""What a method has to learn from a text before it can decode."""

from retopk_jax.calibration.loki import LokiBasis, calibrate_loki, load_basis, save_basis
from retopk_jax.calibration.retopk import (
    RiskPolicy,
    Target,
    calibrate_retopk,
    load_policy,
    save_policy,
)
from retopk_jax.fingerprint import model_fingerprint

__all__ = [
    "LokiBasis",
    "RiskPolicy",
    "Target",
    "calibrate_loki",
    "calibrate_retopk",
    "load_basis",
    "load_policy",
    "model_fingerprint",
    "save_basis",
    "save_policy",
]
