"""The candidate tokens of the reuse path and their exact scores."""

from pallas_kernels.candidates.api import Candidates, candidates

__all__ = ["Candidates", "candidates"]
