"""Which positions a method attends to, step by step, and a picture of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from retopk_jax import AttentionMethod, Context, decode_step, start_session
from retopk_jax.attention.retopk import FALLBACK, REFRESH, REUSE
from retopk_jax.language_model import LanguageModel

_PATHS = {
    REUSE: ("reuse", "#0072b2"),
    FALLBACK: ("fallback", "#d55e00"),
    REFRESH: ("refresh", "#009e73"),
}
_SCAN = ("scan of all keys", "#404040")
_FACT = "#cc79a7"


@dataclass(frozen=True)
class Trace:
    """What a method attended to in every decode step of one row.

    Attributes:
        title: of the method.
        supports: int ``[steps, layers, H, K]``, tokens, −1 for none.
        paths: int ``[steps, layers, H]``, or None for a method with one path.
    """

    title: str
    supports: np.ndarray
    paths: np.ndarray | None


def trace(
    model: LanguageModel,
    method: AttentionMethod,
    context: Context,
    tokens: Sequence[int],
    title: str,
) -> tuple[Trace, Context]:
    """Feeds tokens to one row and keeps what each step attended; the context comes back."""
    lengths = np.asarray(context.cache.lengths)
    session = start_session(model, method, context)
    supports, paths = [], []
    for token in tokens:
        _, session, reports = decode_step(session, [token])
        supports.append([np.asarray(report.support)[0] for report in reports])
        paths.append([None if r.path is None else np.asarray(r.path)[0] for r in reports])
    cache = replace(session.state.cache, lengths=jnp.asarray(lengths))
    found = None if paths[0][0] is None else np.asarray(paths)
    return Trace(title, np.asarray(supports), found), replace(context, cache=cache)


def choose_head(exact: Trace, fact: tuple[int, int]) -> tuple[int, int]:
    """Layer and head whose exact supports hold most of the fact's tokens, summed over the steps.

    It is the head in which losing a token would matter most to the answer. Ties: the lower layer,
    then the lower head.
    """
    inside = (exact.supports >= fact[0]) & (exact.supports < fact[1])
    held = inside.sum(axis=(0, 3))  # [layers, H]
    layer, head = np.unravel_index(np.argmax(held), held.shape)
    return int(layer), int(head)


def plot_attended(
    path: Path,
    traces: Sequence[Trace],
    layer: int,
    head: int,
    fact: tuple[int, int],
    prompt_tokens: int,
) -> None:
    """Draws the attended positions of one head: Full as a solid area, then a panel a trace.

    Args:
        path: the picture to write.
        traces: of the other methods.
        layer: whose head is drawn.
        head: drawn.
        fact: first and last + 1 token of the hidden fact.
        prompt_tokens: tokens before the first step.
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    steps = len(traces[0].supports)
    figure, axes = plt.subplots(
        1, 1 + len(traces), figsize=(4.2 * (1 + len(traces)), 5.2), sharey=True, squeeze=False
    )
    full, *others = axes[0]
    full.fill_between(
        np.arange(steps + 1) - 0.5,
        0,
        prompt_tokens + np.arange(steps + 1),
        color=_SCAN[1],
        alpha=0.35,
        linewidth=0,
        label="every position",
    )
    full.set_title("Full")
    for axis, item in zip(others, traces, strict=True):
        _draw(axis, item, layer, head)
    for axis in axes[0]:
        axis.axhspan(*fact, color=_FACT, alpha=0.6, label="the hidden fact")
        axis.set_xlabel("decode step")
        axis.set_xlim(-0.5, steps - 0.5)
        axis.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, -0.12),
            ncols=4,
            frameon=False,
            markerscale=4,
            columnspacing=1.2,
            handlelength=1.2,
        )
    full.set_ylabel("attended position (token)")
    full.set_ylim(0, prompt_tokens + steps)
    figure.suptitle(
        f"Layer {layer}, query head {head}: the head whose exact supports hold most of the "
        "hidden fact\n(every method is fed the answer of Full)",
        fontsize="medium",
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw(axis, item: Trace, layer: int, head: int) -> None:
    supports = item.supports[:, layer, head]  # [steps, K]
    step, column = np.nonzero(supports >= 0)
    position = supports[step, column]
    if item.paths is None:
        kinds = {0: _SCAN}
        kind = np.zeros_like(step)
    else:
        kinds = _PATHS
        kind = item.paths[step, layer, head]
    for number, (label, color) in kinds.items():
        here = kind == number
        if here.any():
            axis.scatter(
                step[here], position[here], s=7, marker="_", color=color, label=label, linewidths=1
            )
    axis.set_title(item.title)
