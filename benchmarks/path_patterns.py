"""Which heads scan at which step: the path mixtures that whole decode steps are timed under."""

from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from benchmarks.kernel_workload import MIXTURE
from retopk_jax.errors import ConfigError

REFRESH_SHARE = 1 / 128
"""Steps of a layer in which every head scans by schedule, T_r = 128."""

TRACED = {"heads": 0.083, "groups": 0.306}
"""Shares of heads and of groups of 7 that fall back under tau = .85: means of three traces of
Qwen2.5-Coder-0.5B at 6K tokens and K = 128, taken outside this repository."""

RISK_GROUPS = 0.04
"""Share of groups of 7 that the risk policy scans at the error that tau = .85 has there."""


@dataclass(frozen=True)
class Pattern:
    """Heads that scan.

    Attributes:
        source: where the pattern comes from.
        scans: bool ``[steps, layers, H]``.
        groups: G; H / G query heads share a scan.
    """

    source: str
    scans: np.ndarray
    groups: int

    @property
    def head_share(self) -> float:
        """Of head-steps that scan."""
        return float(self.scans.mean())

    @property
    def group_share(self) -> float:
        """Of group-steps in which a head scans, so that the group's keys are read."""
        steps, layers, _ = self.scans.shape
        return float(self.scans.reshape(steps, layers, self.groups, -1).any(-1).mean())


def independent(steps: int, layers: int, heads: int, groups: int) -> Pattern:
    """The source's shares of paths, every head for itself."""
    scans = _share(1 - MIXTURE["reuse"], (steps, layers, heads), seed=0)
    return Pattern("the source's shares, independent heads", scans, groups)


def traced(steps: int, layers: int, heads: int, groups: int) -> Pattern:
    """Heads of a group that fall back together as often as they were seen to, and refreshes.

    The shares were measured on groups of 7; of the others of a scanned group's heads, each scans
    with the probability that gives the traced share of heads in such a group.
    """
    grouped = _share(TRACED["groups"], (steps, layers, groups), seed=1)
    size = heads // groups
    rng = np.random.default_rng(2)
    others = (7 * TRACED["heads"] / TRACED["groups"] - 1) / 6
    scans = rng.random((steps, layers, groups, size)) < others
    first = rng.integers(size, size=(steps, layers, groups, 1))
    scans |= np.arange(size) == first
    scans &= grouped[..., None]
    scans = _refresh(scans.reshape(steps, layers, heads))
    return Pattern("tau = .85 as traced on Qwen2.5-Coder-0.5B, shares only", scans, groups)


def risk(steps: int, layers: int, heads: int, groups: int) -> Pattern:
    """Whole groups at the risk policy's share, and refreshes."""
    grouped = _share(RISK_GROUPS, (steps, layers, groups), seed=3)
    scans = _refresh(np.repeat(grouped, heads // groups, axis=2))
    return Pattern("the risk policy's share of groups, simulated", scans, groups)


def recorded(path: Path, steps: int, layers: int, heads: int, groups: int) -> Pattern:
    """A pattern that a decode left: ``scans``, bool ``[T, layers, G, H / G]``, in a ``.npz``.

    Fewer layers than asked for are spread over them; further groups are those of other layers and
    steps, so that what happens together in one group stays together.

    Raises:
        ConfigError: the file holds no such array, or groups of another size.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            scans = np.asarray(file["scans"], np.bool_)
    except (OSError, EOFError, KeyError, ValueError, BadZipFile) as error:
        raise ConfigError(f"--pattern {path}: no array 'scans' to read ({error})") from error
    if scans.ndim != 4 or scans.shape[3] != heads // groups:
        raise ConfigError(
            f"--pattern {path}: scans of shape {scans.shape}, expected [steps, layers, groups, "
            f"{heads // groups}]"
        )
    time, depth, width, _ = scans.shape
    at = np.arange(steps)[:, None, None], np.arange(layers)[None, :, None]
    group = np.arange(groups)[None, None]
    shift = group // width  # a group beyond the recorded ones: another step of another layer
    step = (at[0] + shift * (time // 2 + 1)) % time
    layer = (at[1] * depth // layers + shift) % depth
    return Pattern(
        str(path.name), scans[step, layer, group % width].reshape(steps, layers, heads), groups
    )


def representative(pattern: Pattern, count: int) -> np.ndarray:
    """Some of a pattern's steps of layers, bool ``[count, H]``, that scan as many groups as all do.

    Those that scan few groups and those that scan many are there in the shares that they have.
    """
    steps, layers, heads = pattern.scans.shape
    every = pattern.scans.reshape(steps * layers, heads)
    groups = every.reshape(len(every), pattern.groups, -1).any(-1).sum(-1)
    rng = np.random.default_rng(5)
    order = rng.permutation(len(every))
    order = order[np.argsort(groups[order], kind="stable")]
    chosen = order[((np.arange(count) + 0.5) * len(every) / count).astype(int)]
    return every[rng.permutation(chosen)]


def _share(share: float, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Bools of which exactly this share, rounded, is true."""
    count = int(np.prod(shape))
    chosen = np.random.default_rng(seed).permutation(count) < round(share * count)
    return chosen.reshape(shape)


def _refresh(scans: np.ndarray) -> np.ndarray:
    """Adds the layers and steps in which every head scans by schedule."""
    return scans | _share(REFRESH_SHARE, scans.shape[:2], seed=4)[..., None]
