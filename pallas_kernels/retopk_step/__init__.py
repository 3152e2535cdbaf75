"""One decode step of ReTopK attention, fused: recall, path, candidates or scan, output, push."""

from pallas_kernels.retopk_step.api import Remembered, ReTopKStep, retopk_step

__all__ = ["ReTopKStep", "Remembered", "retopk_step"]
