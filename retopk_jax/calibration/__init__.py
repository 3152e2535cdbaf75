"""What a method has to learn from a text before it can decode."""

from retopk_jax.calibration.loki import LokiBasis, calibrate_loki, load_basis, save_basis
from retopk_jax.fingerprint import model_fingerprint

__all__ = ["LokiBasis", "calibrate_loki", "load_basis", "model_fingerprint", "save_basis"]
