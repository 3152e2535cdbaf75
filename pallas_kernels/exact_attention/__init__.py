"""Exact top-K over all keys, and attention to them."""

from pallas_kernels.exact_attention.api import exact_attention

__all__ = ["exact_attention"]
