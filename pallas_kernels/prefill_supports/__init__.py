"""Exact supports of the last prompt tokens."""

from pallas_kernels.prefill_supports.api import prefill_supports

__all__ = ["prefill_supports"]
