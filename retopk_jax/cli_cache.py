"""Where compiled programs are kept between runs of the command line."""

import os
from pathlib import Path

import jax

VARIABLE = "RETOPK_COMPILATION_CACHE"
"""Environment variable: a directory, or ``off``."""


def enable_compilation_cache() -> Path | None:
    """Lets JAX keep compiled programs in the user's cache directory, and reuse them.

    A directory that JAX has been given by its own means is left alone.

    Returns:
        The directory, or None when it is turned off or cannot be made.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted == "off":
        return None
    configured = jax.config.jax_compilation_cache_dir
    if configured:
        return Path(configured)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(wanted) if wanted else Path(home) / "retopk-jax" / "compiled"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    return directory
