"""Perplexity of documents, scores of tasks, and paired differences with a bootstrap interval."""

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


def paired_points(
    scores: Sequence[Sequence[float]], reference: Sequence[Sequence[float]], seed: int
) -> dict[str, float]:
    """Change of the mean over tasks of their mean score, against a reference on the same samples.

    The interval is the middle 95 % over resamples of every task's samples.

    Args:
        scores: a task each, of its samples.
        reference: of the same samples.
        seed: of the resampling.
    """
    rng = np.random.default_rng(seed)
    means, resampled = [], []
    for mine, theirs in zip(scores, reference, strict=True):
        difference = np.asarray(mine) - np.asarray(theirs)  # [samples]
        drawn = rng.integers(len(difference), size=(RESAMPLES, len(difference)))
        means.append(difference.mean())
        resampled.append(difference[drawn].mean(axis=1))
    low, high = np.percentile(np.mean(resampled, axis=0), [2.5, 97.5])
    return {"points": float(np.mean(means)), "low": float(low), "high": float(high)}
