"""Decode-time attention methods, one file each, all behind `AttentionMethod`."""

from retopk_jax.attention.base import AttentionMethod, PathStatistics, Report, Step
from retopk_jax.attention.exact import ExactTopK
from retopk_jax.attention.full import Full
from retopk_jax.attention.retopk import ReTopK

__all__ = ["AttentionMethod", "ExactTopK", "Full", "PathStatistics", "ReTopK", "Report", "Step"]
