"""Exact scores of given tokens."""

from pallas_kernels.support_scores.api import support_scores

__all__ = ["support_scores"]
