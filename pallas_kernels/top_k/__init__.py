"""Exact top-K of scores over the whole cache."""

from pallas_kernels.top_k.api import top_k

__all__ = ["top_k"]
