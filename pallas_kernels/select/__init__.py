"""Exact top-K of scored candidates."""

from pallas_kernels.select.api import select

__all__ = ["select"]
