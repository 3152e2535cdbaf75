"""What calibrations say of the model and the texts that they were fitted on."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retopk_jax.errors import ConfigError, PromptError
from retopk_jax.fingerprint import model_fingerprint
from retopk_jax.language_model import LanguageModel


def source_of(model: LanguageModel) -> str:
    """What errors and files call a model."""
    return str(getattr(model, "source", type(model).__name__))


def name_of(model: LanguageModel) -> str:
    """What files call a model: its source without directories."""
    return Path(source_of(model)).resolve().name


def read_tokens(
    model: LanguageModel, files: Sequence[Path | str]
) -> tuple[list[int], list[dict[str, str]]]:
    """Token ids of the files joined by a blank line, and the name and hash of each.

    Raises:
        PromptError: a file cannot be read or is not UTF-8, or the model has no tokenizer.
        ConfigError: no file.
    """
    if not files:
        raise ConfigError("no text: give at least one file")
    if model.tokenizer is None:
        raise PromptError(f"{source_of(model)} has no tokenizer to read a text with")
    texts, described = [], []
    for path in files:
        try:
            content = Path(path).read_bytes()
            texts.append(content.decode("utf-8"))
        except OSError as error:
            raise PromptError(f"text {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise PromptError(f"text {path}: not UTF-8 ({error})") from error
        described.append({"file": Path(path).name, "sha256": hashlib.sha256(content).hexdigest()})
    return model.tokenizer.encode("\n\n".join(texts)), described


def check_fitted_on(
    model: LanguageModel, provenance: Mapping[str, Any], *, kind: str, method: str
) -> None:
    """Refuses a model that something was not fitted on.

    Args:
        model: that is to use it.
        provenance: with the ``model`` and its ``fingerprint``.
        kind: what errors call what was fitted.
        method: that another could be fitted for.

    Raises:
        ConfigError: it is another, with the reason.
    """
    found, wanted = model_fingerprint(model), provenance["fingerprint"]
    source, fitted = source_of(model), provenance["model"]
    if found["weights"] != wanted["weights"]:
        raise ConfigError(
            f"{kind} fitted on {fitted}: the weights of {source} are not those "
            f"(a fingerprint of every parameter differs); fit one with "
            f"retopk calibrate --method {method}"
        )
    if found["rope"] != wanted["rope"]:
        raise ConfigError(
            f"{kind} fitted on {fitted}: {source} has the same weights under another rotary "
            f"embedding, so its keys are others; fit one with retopk calibrate --method {method}"
        )
