"""Maps from similarity to the expected error of a reuse, per layer and head, for ReTopK."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from retopk_jax.attention.checks import check_choice, check_integer, check_number
from retopk_jax.attention.path_policy import Risk
from retopk_jax.attention.retopk import REFRESH, REUSE, ReTopK
from retopk_jax.calibration.archive import load_archive, save_archive
from retopk_jax.calibration.isotonic import descending_knots
from retopk_jax.calibration.shadow import Samples, collect
from retopk_jax.calibration.text import check_fitted_on, name_of, read_tokens, source_of
from retopk_jax.errors import ConfigError, PromptError
from retopk_jax.fingerprint import model_fingerprint
from retopk_jax.language_model import LanguageModel
from retopk_jax.prefill import prefill

FORMAT = "retopk-jax risk policy 1"
KNOTS = 16
SIZES = ("budget", "capacity", "recall", "window")
"""Settings of ReTopK on which the errors depend."""

SHARES = (0.0, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35)
SHARES += (0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8, 0.9)
"""Scanned shares of groups for which a policy says theta and error."""

ERRORS = {
    "head": "head: |o_reuse - o_exact| / |o_exact|",
    "residual": "residual: |W_o (o_reuse - o_exact)| / |x|, |x| the median norm of what enters the "
    "layer, over the first tokens of the windows",
}
"""What is fitted, as files say it: W_o is a head's part of the output projection."""

METRIC_TOKENS = 1024
"""Tokens of a window over which the norm of the residual stream is taken."""

TARGETS = ("tau", "share", "error")
_ARRAYS = ("similarity", "error", "theta", "points")


@dataclass(frozen=True)
class Target:
    """What theta is chosen for.

    Attributes:
        kind: ``"tau"``, the error of a threshold tau on the same steps; ``"share"``, of KV groups
            scanned; ``"error"``, the mean relative error of a head-step, exact ones counting 0.
        value: of it.
    """

    kind: str
    value: float

    def __post_init__(self) -> None:
        if self.kind not in TARGETS:
            raise ConfigError(f"target {self.kind!r}: expected one of {', '.join(TARGETS)}")
        lowest = -1.0 if self.kind == "tau" else 0.0
        check_number(f"target {self.kind}", self.value, minimum=lowest)
        if self.kind == "share" and self.value > 1:
            raise ConfigError(f"target share={self.value}: expected 0 to 1")

    @classmethod
    def parse(cls, text: str) -> "Target":
        """The target of ``tau=0.85``, ``share=0.05`` or ``error=0.02``."""
        kind, _, value = text.partition("=")
        try:
            return cls(kind, float(value))
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"target {text!r}: expected tau=TAU, share=SHARE or error=ERROR"
            ) from None


@dataclass(frozen=True, eq=False)
class RiskPolicy:
    """Maps, a theta, and where they come from.

    Attributes:
        similarity: float32 ``[layers, H, N]``, knots, ascending.
        error: float32 ``[layers, H, N]``, expected relative error at the knots, descending.
        theta: chosen for the target.
        points: float64 ``[P, 3]``, share of KV groups scanned, theta, and mean error of a
            head-step, by ascending share; on the calibration's last decode, refreshes left out.
        provenance: model, texts, sizes, target, what was seen in every round; as JSON.
    """

    similarity: NDArray[np.float32]
    error: NDArray[np.float32]
    theta: float
    points: NDArray[np.float64]
    provenance: dict[str, Any]

    def risk(self, theta: float | None = None) -> Risk:
        """What `ReTopK` takes; with another theta where one is given."""
        maps = jnp.asarray(self.similarity), jnp.asarray(self.error)
        return Risk(*maps, self.theta if theta is None else float(theta))

    def theta_at(self, share: float) -> float:
        """Theta at which a share of the calibration's KV groups is scanned.

        Raises:
            ConfigError: the share is beyond those that `points` tells of.
        """
        shares, thetas = self.points[:, 0], self.points[:, 1]
        if not 0 <= share <= shares[-1]:
            raise ConfigError(f"share={share}: expected 0 to {shares[-1]:.4g}")
        return float(np.interp(share, shares, thetas))

    def method(self, **changes: Any) -> ReTopK:
        """ReTopK with the sizes, the schedule and the maps of the policy, and other settings."""
        sizes = {name: self.provenance["sizes"][name] for name in (*SIZES, "refresh")}
        return ReTopK(**{**sizes, "risk": self.risk(), **changes})

    def check_model(self, model: LanguageModel) -> None:
        """Refuses a model that the maps were not fitted on.

        Raises:
            ConfigError: it is another, with the reason.
        """
        check_fitted_on(model, self.provenance, kind="policy", method="retopk")

    def check_sizes(self, method: ReTopK) -> None:
        """Refuses a K, C, R or W that the maps were not fitted with.

        Raises:
            ConfigError: it is another.
        """
        for name in SIZES:
            given, fitted = getattr(method, name), self.provenance["sizes"][name]
            if given != fitted:
                raise ConfigError(
                    f"{name}={given}: the policy was fitted with {fitted}; fit one with "
                    "retopk calibrate --method retopk"
                )


@runtime_checkable
class TellsResiduals(Protocol):
    """A model that knows how its heads' outputs enter the residual stream."""

    def residual_metric(self, tokens: jax.Array) -> jax.Array:
        """See `models.residual.residual_metric`."""
        ...


def calibrate_retopk(
    model: LanguageModel,
    files: Sequence[Path | str],
    method: ReTopK,
    *,
    target: Target,
    error: str = "head",
    context: int = 4096,
    steps: int = 256,
    windows: int = 8,
    rows: int = 4,
    rounds: int = 2,
    knots: int = KNOTS,
    progress: Callable[[int, int], None] | None = None,
) -> RiskPolicy:
    """Fits maps on teacher-forced decodes of a text, under the feedback of their own policy.

    The first decode scans groups by the method's tau. Every round fits maps on the last decode,
    chooses theta for the target, and decodes anew by that policy; the last decode is fitted once
    more. Errors are those of a reuse against the exact output of the same query over the same keys,
    whether or not the step reused: a head's own, or what it adds to the residual stream.

    Args:
        model: with a tokenizer.
        files: UTF-8 texts, joined by a blank line and read in windows that do not overlap.
        method: its sizes, schedule and first threshold.
        target: what theta is chosen for.
        error: ``"head"``, relative to the norm of the head's exact output, or ``"residual"``, after
            the output projection and relative to the residual stream.
        context: tokens of a window that are read before the decode.
        steps: tokens of a window that are fed to it.
        windows: at most, spread evenly over the text.
        rows: windows decoded at once.
        rounds: decodes by the fitted policy; 0 fits under tau alone.
        knots: of a map.
        progress: called with (batches of windows decoded, in all).

    Raises:
        PromptError: a file cannot be used, or there are too few tokens for one window.
        ConfigError: a setting is out of range, or errors that are not finite.
    """
    longest = model.decoder.max_positions
    sizes = {"context": context, "steps": steps, "windows": windows, "rows": rows}
    for name, value in sizes.items():
        check_integer(name, value, minimum=1)
    check_integer("rounds", rounds, minimum=0)
    check_integer("knots", knots, minimum=2)
    check_choice("error", error, tuple(ERRORS))
    if context + steps > longest:
        raise ConfigError(f"context={context} and steps={steps}: the model has {longest} positions")
    if method.risk is not None:
        raise ConfigError("method.risk: expected None, as the maps are yet to be fitted")
    method.check(model.decoder.geometry)
    if error == "residual" and not isinstance(model, TellsResiduals):
        raise ConfigError(f"error='residual': {source_of(model)} does not tell its projections")
    pieces, texts, available = _windows(model, files, context + steps + 1, windows)
    metric = None
    if error == "residual" and isinstance(model, TellsResiduals):
        first = [piece[: min(context, METRIC_TOKENS)] for piece in pieces]
        metric = model.residual_metric(jnp.asarray(first, jnp.int32))
    batches = [pieces[at : at + rows] for at in range(0, len(pieces), rows)]
    contexts = [
        prefill(
            model,
            [piece[:context] for piece in batch],
            new_tokens=steps,
            tail_queries=method.tail_queries,
        ).context
        for batch in batches
    ]
    suffixes = [jnp.asarray([piece[context:] for piece in batch], jnp.int32) for batch in batches]
    groups = model.decoder.geometry.num_kv_heads
    total, done, history = (rounds + 1) * len(batches), itertools.count(1), []

    def fit_under(method: ReTopK) -> Fit:
        parts = []
        for place, suffix in enumerate(suffixes):
            part, contexts[place] = collect(model, method, contexts[place], suffix, metric)
            parts.append(part)
            if progress is not None:
                progress(next(done), total)
        samples = Samples.joined(parts)
        found = Fit.of(samples, target, knots, groups)
        history.append({"theta": _plain(found.theta), **observed(samples, groups)})
        return found

    found = fit_under(replace(method, share_scan=True))
    for _ in range(rounds):
        risk = _risk(found.similarity, found.error, found.theta)
        found = fit_under(replace(method, share_scan=False, risk=risk))
    provenance = {
        "format": FORMAT,
        "model": name_of(model),
        "fingerprint": model_fingerprint(model),
        "dtype": str(jnp.dtype(model.decoder.dtype)),
        "texts": texts,
        "text_tokens": available,
        "sizes": {name: int(getattr(method, name)) for name in (*SIZES, "refresh")},
        "first_tau": float(method.tau),
        "error": ERRORS[error],
        "settings": {**sizes, "windows": len(pieces), "rounds": rounds, "knots": knots},
        "target": {target.kind: target.value},
        "rounds": history,
    }
    return RiskPolicy(found.similarity, found.error, found.theta, found.points, provenance)


@dataclass(frozen=True)
class Fit:
    """Maps and theta of one decode; see `RiskPolicy`."""

    similarity: NDArray[np.float32]
    error: NDArray[np.float32]
    theta: float
    points: NDArray[np.float64]

    @classmethod
    def of(cls, samples: Samples, target: Target, knots: int, groups: int) -> "Fit":
        """Fits samples and chooses theta on them."""
        similarity, error = fit_maps(samples, knots)
        curve = Curve.of(samples, similarity, error, groups)
        return cls(similarity, error, curve.theta_for(target, samples), curve.points())


def fit_maps(samples: Samples, knots: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Knots of every layer and head, ``[layers, H, N]``.

    Raises:
        ConfigError: a head without a similarity, or an error that is not finite.
    """
    layers, heads = samples.similarity.shape[1:]
    x = np.zeros((layers, heads, knots), np.float32)
    y = np.zeros_like(x)
    for layer in range(layers):
        for head in range(heads):
            rho, error = samples.similarity[:, layer, head], samples.error[:, layer, head]
            known = rho != -np.inf
            try:
                x[layer, head], y[layer, head] = descending_knots(rho[known], error[known], knots)
            except ConfigError as problem:
                raise ConfigError(f"layer {layer}, head {head}: {problem}") from problem
    return x, y


@dataclass(frozen=True)
class Curve:
    """What every theta would scan and leave wrong on given steps.

    Attributes:
        risks: float64 ``[n]``, expected errors of groups, added up, ascending.
        errors: float64 ``[n]``, mean error of a head-step if the groups up to this one reuse.
    """

    risks: NDArray[np.float64]
    errors: NDArray[np.float64]

    @classmethod
    def of(
        cls,
        samples: Samples,
        similarity: NDArray[np.float32],
        error: NDArray[np.float32],
        groups: int,
    ) -> "Curve":
        """Of samples under maps; steps that no theta decides are left out."""
        count, layers, heads = samples.similarity.shape
        free = samples.free
        if not free.any():
            raise ConfigError("no step whose path a policy decides: expected fewer refreshes")
        maps = _risk(similarity, error, 0.0)
        expected = np.stack(
            [
                np.asarray(maps.expected(i, jnp.asarray(samples.similarity[:, i])))
                for i in range(layers)
            ],
            axis=1,
        )  # [n, layers, H]
        by_group = (count, layers, groups, heads // groups)
        risk = np.asarray(jnp.sum(jnp.asarray(expected).reshape(by_group), axis=3))
        true = samples.error.astype(np.float64).reshape(by_group).sum(axis=3)
        risk, true = risk[free].ravel().astype(np.float64), true[free].ravel()
        order = np.argsort(risk, kind="stable")
        return cls(risk[order], np.cumsum(true[order]) / (len(risk) * (heads // groups)))

    def at(self, theta: float) -> tuple[float, float]:
        """Share of groups scanned, and mean error of a head-step."""
        kept = int(np.searchsorted(self.risks, theta, side="right"))
        return 1 - kept / len(self.risks), float(self.errors[kept - 1]) if kept else 0.0

    def theta_of_share(self, share: float) -> float:
        """Least theta, of the sums seen, at which no more than a share is scanned."""
        if share >= 1:
            return -math.inf
        # Rounding of 1 - share must not keep one group more.
        kept = math.ceil(len(self.risks) * (1 - share) - 1e-9)
        return float(self.risks[max(kept, 1) - 1])

    def theta_of_error(self, budget: float) -> float:
        """Greatest theta, of the sums seen, at which the mean error is within a budget."""
        kept = int(np.searchsorted(self.errors, budget * (1 + 1e-12), side="right"))
        while kept and self.at(float(self.risks[kept - 1]))[1] > budget * (1 + 1e-12):
            kept = int(np.searchsorted(self.risks, self.risks[kept - 1], side="left"))
        return float(self.risks[kept - 1]) if kept else -math.inf

    def theta_for(self, target: Target, samples: Samples) -> float:
        """Theta for a target."""
        if target.kind == "share":
            return self.theta_of_share(target.value)
        if target.kind == "error":
            return self.theta_of_error(target.value)
        return self.theta_of_error(threshold_error(samples, target.value))

    def points(self) -> NDArray[np.float64]:
        """Share, theta and error at `SHARES`; those that ties make equal are one."""
        found = []
        for share in SHARES:
            theta = self.theta_of_share(share)
            scanned, error = self.at(theta)
            if not found or scanned > found[-1][0]:
                found.append((scanned, theta, error))
        return np.array(found, np.float64)


def threshold_error(samples: Samples, tau: float) -> float:
    """Mean error of a head-step that scans below tau, heads alone, refreshes left out."""
    free = samples.free
    error, rho = samples.error[free].astype(np.float64), samples.similarity[free]
    return float(np.where(rho >= tau, error, 0.0).mean())


def observed(samples: Samples, groups: int) -> dict[str, float]:
    """What a decode did: shares of groups and heads that scanned, and error; without refreshes."""
    count, layers, heads = samples.path.shape
    known = samples.path != REFRESH
    scans = (samples.path != REUSE) & known
    by_group = (count, layers, groups, heads // groups)
    steps = max(int(known.sum()), 1)
    return {
        "groups_scanned": float(
            scans.reshape(by_group).any(axis=3).sum()
            / max(int(known.reshape(by_group).any(axis=3).sum()), 1)
        ),
        "heads_exact": float(scans.sum() / steps),
        "error": float(
            np.where(samples.path == REUSE, samples.error, 0).sum(dtype=np.float64) / steps
        ),
    }


def save_policy(path: Path | str, policy: RiskPolicy) -> None:
    """Writes a ``.npz`` file aside and renames it, so that it is whole or not there."""
    arrays = {name: np.asarray(getattr(policy, name)) for name in _ARRAYS}
    save_archive(path, arrays, policy.provenance)


def load_policy(path: Path | str) -> RiskPolicy:
    """Reads what `save_policy` wrote; the policy's checks tell what may use it.

    Raises:
        ConfigError: the file cannot be read, is no policy, is truncated, or was changed.
    """
    arrays, provenance = load_archive(path, _ARRAYS, kind="policy", version=FORMAT)
    theta = float(arrays.pop("theta"))
    return RiskPolicy(**arrays, theta=theta, provenance=provenance)


def _risk(similarity: NDArray[Any], error: NDArray[Any], theta: float) -> Risk:
    return Risk(jnp.asarray(similarity), jnp.asarray(error), theta)


def _plain(theta: float) -> float | str:
    """As JSON: infinite numbers by name."""
    return theta if math.isfinite(theta) else str(theta)


def _windows(
    model: LanguageModel, files: Sequence[Path | str], size: int, count: int
) -> tuple[list[list[int]], list[dict[str, str]], int]:
    """Windows spread evenly over the text, its description, and its tokens."""
    tokens, texts = read_tokens(model, files)
    whole = min(len(tokens) // size, count)
    if not whole:
        raise PromptError(
            f"{len(tokens)} tokens of text: a window of context, steps and a label takes {size}"
        )
    starts = [place * len(tokens) // whole for place in range(whole)]
    return [tokens[at : at + size] for at in starts], texts, len(tokens)
