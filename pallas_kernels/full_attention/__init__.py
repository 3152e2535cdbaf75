"""Attention of one query token over all keys."""

from pallas_kernels.full_attention.api import full_attention

__all__ = ["full_attention"]
