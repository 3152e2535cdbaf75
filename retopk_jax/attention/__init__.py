"""Decode-time attention methods, one file each, all behind `AttentionMethod`."""

from retopk_jax.attention.base import AttentionMethod, PathStatistics, Report, Step
from retopk_jax.attention.exact import ExactTopK
from retopk_jax.attention.full import Full
from retopk_jax.attention.loki import Loki
from retopk_jax.attention.path_policy import Risk
from retopk_jax.attention.quest import Quest
from retopk_jax.attention.retopk import ReTopK
from retopk_jax.attention.sparq import SparQ
from retopk_jax.attention.streaming import StreamingLLM
from retopk_jax.attention.tokenselect import TokenSelect

__all__ = [
    "AttentionMethod",
    "ExactTopK",
    "Full",
    "Loki",
    "PathStatistics",
    "Quest",
    "ReTopK",
    "Report",
    "Risk",
    "SparQ",
    "Step",
    "StreamingLLM",
    "TokenSelect",
]
