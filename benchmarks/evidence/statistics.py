"""Perplexity of documents, and paired differences with a bootstrap interval."""

import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000


def perplexity(nll: Sequence[float], tokens: int) -> float:
    """``exp(total NLL / total tokens)``.

    Args:
        nll: summed over every document's scored tokens, in nats.
        tokens: scored in all documents.
    """
    return math.exp(math.fsum(nll) / tokens)


def paired_difference(
    nll: Sequence[float], reference: Sequence[float], tokens_each: int, seed: int
) -> dict[str, float]:
    """Change of perplexity against a reference on the same documents, in percent.

    The interval is the middle 95 % over resamples of the documents.

    Args:
        nll: a document each.
        reference: of the same documents.
        tokens_each: scored in a document.
        seed: of the resampling.
    """
    difference = (np.asarray(nll) - np.asarray(reference)) / tokens_each  # [documents]
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(difference), size=(RESAMPLES, len(difference)))
    means = difference[drawn].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return {
        "percent": 100 * math.expm1(float(difference.mean())),
        "low": 100 * math.expm1(float(low)),
        "high": 100 * math.expm1(float(high)),
        "documents_worse": int(np.sum(difference > 0)),
    }
