"""Attention over a support whose scores are known."""

from pallas_kernels.sparse_attend.api import sparse_attend

__all__ = ["sparse_attend"]
