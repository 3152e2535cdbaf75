"""Monotone maps from samples: isotonic regression, and a few knots that say nearly the same."""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from retopk_jax.errors import ConfigError

BINS, BIN_SAMPLES = 128, 8
"""Bins that samples are averaged in before the fit at most, and samples of a bin at least."""


def descending_knots(
    x: NDArray[np.floating], y: NDArray[np.floating], knots: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Knots of a descending map that is linear between and constant beyond them.

    Neighbouring samples are averaged, so that no single one makes a knot; the isotonic fit of the
    averages is followed from its ends by the knots that come nearest to its largest deviation.

    Args:
        x: ``[n]``, one or more.
        y: ``[n]``.
        knots: N, two or more.

    Returns:
        ``x`` ascending and ``y`` descending, ``[N]``; the last knot is repeated where fewer do.

    Raises:
        ConfigError: no sample, or one that is not finite.
    """
    if x.shape != y.shape or x.ndim != 1 or not x.size:
        raise ConfigError(f"samples of shapes {x.shape} and {y.shape}: expected one or more pairs")
    bad = int(np.sum(~(np.isfinite(x) & np.isfinite(y))))
    if bad:
        raise ConfigError(f"{bad} of {x.size} samples are not finite: expected similarity, error")
    centre, mean, weight = _averages(np.asarray(x, np.float64), np.asarray(y, np.float64))
    fit = isotonic_regression(mean, weights=weight, increasing=False).x
    kept = [0, len(fit) - 1] if len(fit) > 1 else [0]
    while len(kept) < knots:
        away = np.abs(np.interp(centre, centre[kept], fit[kept]) - fit)
        if away.max() <= 1e-9 * max(np.abs(fit).max(), 1e-30):
            break
        kept = sorted([*kept, int(away.argmax())])
    kept += kept[-1:] * (knots - len(kept))
    return centre[kept].astype(np.float32), fit[kept].astype(np.float32)


def _averages(
    x: NDArray[np.float64], y: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Means of bins of neighbours, and their samples; bins of one ``x`` are one."""
    order = np.argsort(x, kind="stable")
    bins = max(min(BINS, len(x) // BIN_SAMPLES), 1)
    parts = np.array_split(order, bins)
    weight = np.array([len(part) for part in parts], np.float64)
    centre = np.array([x[part].mean() for part in parts])
    mean = np.array([y[part].mean() for part in parts])
    # A mean of equal numbers may round to either side of them.
    different, place = np.unique(np.maximum.accumulate(centre), return_inverse=True)
    total = np.bincount(place, weights=weight)
    return different, np.bincount(place, weights=weight * mean) / total, total
