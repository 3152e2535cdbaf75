"""Principal components of a model's keys, per layer and key-value head, for Loki."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from retopk_jax.attention.checks import check_integer
from retopk_jax.calibration.archive import load_archive, save_archive
from retopk_jax.calibration.text import check_fitted_on, name_of, read_tokens
from retopk_jax.errors import PromptError
from retopk_jax.fingerprint import model_fingerprint
from retopk_jax.language_model import LanguageModel
from retopk_jax.prefill import prefill

WINDOW = 4096
"""Tokens that are read at once, unless told otherwise."""

FORMAT = "retopk-jax loki basis 1"
_ARRAYS = ("basis", "explained_variance")


@dataclass(frozen=True, eq=False)
class LokiBasis:
    """A basis and where it comes from.

    Attributes:
        basis: float32 ``[layers, G, D, D]``, orthonormal components in columns, the largest
            variance first.
        explained_variance: float32 ``[layers, G, D]``, variance along each component.
        provenance: model, text, window, tokens; as JSON.
    """

    basis: NDArray[np.float32]
    explained_variance: NDArray[np.float32]
    provenance: dict[str, Any]

    def rank_of(self, share: float) -> int:
        """Least rank that explains a share of the variance in every layer and head."""
        cumulated = np.cumsum(self.explained_variance.astype(np.float64), axis=-1)
        reached = cumulated >= share * cumulated[..., -1:] * (1 - 1e-12)
        return int(np.max(np.argmax(reached, axis=-1))) + 1

    def check_model(self, model: LanguageModel) -> None:
        """Refuses a model that the basis was not fitted on.

        Raises:
            ConfigError: it is another, with the reason.
        """
        check_fitted_on(model, self.provenance, kind="basis", method="loki")


def calibrate_loki(
    model: LanguageModel,
    files: Sequence[Path | str],
    *,
    window: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LokiBasis:
    """Fits the components on a text, from keys as the cache holds them.

    The files are joined by a blank line and read in consecutive windows that do not overlap, each
    from position 0; a last, shorter one is read only if there is no other. A longer window shows
    more of the angles that keys take at long range.

    Args:
        model: with a tokenizer.
        files: UTF-8 texts.
        window: tokens read at once; None for `WINDOW`, or as many as the model has positions for.
        progress: called with (tokens read, tokens in all) after every window.

    Raises:
        PromptError: a file cannot be read or is not UTF-8, or there are fewer tokens than a key has
            dimensions.
        ConfigError: no file, or a window that the model has no positions for.
    """
    decoder, geometry = model.decoder, model.decoder.geometry
    longest = decoder.max_positions - 1  # prefill leaves room for a token to come
    if window is None:
        window = min(WINDOW, longest)
    check_integer("window", window, minimum=geometry.head_dim, maximum=longest)
    tokens, texts = read_tokens(model, files)
    if len(tokens) < geometry.head_dim:
        raise PromptError(
            f"{len(tokens)} tokens of text: {geometry.head_dim} principal components need at least "
            f"{geometry.head_dim}"
        )
    windows = [tokens[at : at + window] for at in range(0, len(tokens), window)]
    if len(windows) > 1 and len(windows[-1]) < window:
        windows.pop()
    used = sum(map(len, windows))
    heads = (geometry.num_layers, geometry.num_kv_heads)
    total = np.zeros((*heads, geometry.head_dim))
    squares = np.zeros((*heads, geometry.head_dim, geometry.head_dim))
    read = 0
    for piece in windows:
        context = prefill(model, [piece], new_tokens=1, tail_queries=1).context
        for layer, cache in enumerate(context.cache.keys):
            keys = np.asarray(cache[0, :, : len(piece)].astype(jnp.float32), np.float64)
            total[layer] += keys.sum(axis=1)
            squares[layer] += np.swapaxes(keys, 1, 2) @ keys
        read += len(piece)
        if progress is not None:
            progress(read, used)
    mean = total / used
    covariance = squares / used - mean[..., :, None] * mean[..., None, :]
    basis, variance = principal_components(covariance)
    provenance = {
        "format": FORMAT,
        "model": name_of(model),
        "fingerprint": model_fingerprint(model),
        "dtype": str(jnp.dtype(decoder.dtype)),
        "texts": texts,
        "window": window,
        "windows": len(windows),
        "tokens": used,
        "rotary": "post",
    }
    return LokiBasis(basis.astype(np.float32), variance.astype(np.float32), provenance)


def principal_components(
    covariance: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Orthonormal components of covariances ``[..., D, D]`` in columns, and their variances.

    The largest variance comes first; of a component the entry of largest size is positive.
    """
    variance, vectors = np.linalg.eigh(covariance)
    variance, vectors = np.maximum(variance[..., ::-1], 0.0), vectors[..., ::-1]
    largest = np.argmax(np.abs(vectors), axis=-2, keepdims=True)
    sign = np.sign(np.take_along_axis(vectors, largest, axis=-2))
    return vectors * sign, variance


def save_basis(path: Path | str, basis: LokiBasis) -> None:
    """Writes a ``.npz`` file aside and renames it, so that it is whole or not there."""
    save_archive(path, {name: getattr(basis, name) for name in _ARRAYS}, basis.provenance)


def load_basis(path: Path | str) -> LokiBasis:
    """Reads what `save_basis` wrote; `LokiBasis.check_model` tells whether a model may use it.

    Raises:
        ConfigError: the file cannot be read, is no basis, is truncated, or was changed.
    """
    arrays, provenance = load_archive(path, _ARRAYS, kind="basis", version=FORMAT)
    return LokiBasis(**arrays, provenance=provenance)
