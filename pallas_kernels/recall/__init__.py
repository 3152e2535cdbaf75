"""Which remembered queries resemble the current one."""

from pallas_kernels.recall.api import Recalled, recall

__all__ = ["Recalled", "recall"]
