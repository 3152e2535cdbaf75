"""Device time of every kernel that a function launches, from the profiler."""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


def kernel_times(run: Callable[[], Any]) -> dict[str, list[float]]:
    """Microseconds of every launch, by kernel; those alike but for a number are one.

    Empty where the profiler sees no GPU.

    Args:
        run: returns what is waited for.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (trace,) = Path(folder).rglob("*.xplane.pb")
        found: dict[str, list[float]] = defaultdict(list)
        for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
            if not plane.name.startswith("/device:GPU:0"):  # of several devices, one
                continue
            for line in plane.lines:
                for event in line.events if line.name.startswith("Stream") else ():
                    name = re.sub(r"(_\d+)+$", "", event.name.partition("(")[0])
                    found[name].append(event.duration_ns / 1e3)
    return dict(found)
