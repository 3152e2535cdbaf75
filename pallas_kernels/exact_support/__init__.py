"""Exact top-K over all keys."""

from pallas_kernels.exact_support.api import exact_support

__all__ = ["exact_support"]
