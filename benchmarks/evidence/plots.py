"""Drawing: matplotlib is asked for where a picture is wanted, and the pictures' common looks."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retopk_jax.errors import ConfigError


def require_matplotlib() -> None:
    """Refuses before the work what could not be drawn after it.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib: pip install 'retopk-jax[demo]'")


def pyplot() -> Any:
    """matplotlib.pyplot, drawing to files."""
    require_matplotlib()
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, path: Path) -> None:
    """Writes a picture and frees it."""
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot().close(figure)


def head_maps(path: Path, maps: Mapping[str, np.ndarray], title: str) -> None:
    """Draws layers × heads maps side by side.

    Args:
        path: the picture.
        maps: ``[layers, H]`` each, NaN where there is nothing.
        title: above all.
    """
    plt = pyplot()
    layers = next(iter(maps.values())).shape[0]
    figure, axes = plt.subplots(
        1, len(maps), figsize=(2.9 * len(maps), 1.6 + 0.16 * layers), squeeze=False
    )
    for axis, (name, values) in zip(axes[0], maps.items(), strict=True):
        image = axis.imshow(np.ma.masked_invalid(values), aspect="auto", cmap="viridis")
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("query head")
        axis.set_xticks(range(0, values.shape[1], max(1, values.shape[1] // 8)))
        figure.colorbar(image, ax=axis, fraction=0.08, pad=0.03)
    axes[0][0].set_ylabel("layer")
    figure.suptitle(title)
    figure.tight_layout()
    save(figure, path)


def curves(
    path: Path,
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x: str,
    y: str,
    title: str,
    log_x: bool = False,
    styles: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Draws lines with markers.

    Args:
        path: the picture.
        lines: x and y values by label.
        x: what the x axis is.
        y: what the y axis is.
        title: above.
        log_x: a logarithmic x axis, base 2.
        styles: arguments of a label's line.
    """
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6.4, 4.2))
    for label, (xs, ys) in lines.items():
        axis.plot(xs, ys, label=label, **{"marker": "o", **dict((styles or {}).get(label, {}))})
    if log_x:
        axis.set_xscale("log", base=2)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.set_title(title)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    save(figure, path)


def heat_grid(
    path: Path,
    panels: Mapping[str, np.ndarray],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    x: str,
    y: str,
    title: str,
    low: float = 0.0,
    high: float = 100.0,
) -> None:
    """Draws a numbered heat map a panel, at most four in a row.

    Args:
        path: the picture.
        panels: ``[rows, columns]`` each, NaN where there is nothing.
        rows: labels of the rows.
        columns: labels of the columns.
        x: what the columns are.
        y: what the rows are.
        title: above all.
        low: value of the darkest color.
        high: value of the brightest.
    """
    plt = pyplot()
    across = min(4, len(panels))
    down = -(-len(panels) // across)
    size = (1.2 + across * (0.9 + 0.5 * len(columns)), 1.0 + down * (1.0 + 0.36 * len(rows)))
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat:
        axis.set_visible(False)
    for axis, (name, values) in zip(axes.flat, panels.items(), strict=False):
        axis.set_visible(True)
        axis.imshow(np.ma.masked_invalid(values), aspect="auto", cmap="RdYlGn", vmin=low, vmax=high)
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                place = (value - low) / (high - low)
                color = "black" if 0.12 < place < 0.88 else "white"
                axis.text(
                    column, row, f"{value:.0f}", ha="center", va="center", fontsize=8, color=color
                )
        axis.set_xticks(range(len(columns)), columns)
        axis.set_yticks(range(len(rows)), rows)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel(x)
        axis.set_ylabel(y)
    figure.suptitle(title)
    save(figure, path)
