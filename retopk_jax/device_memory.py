"""Refuses what would not fit a device, with the numbers, before anything is allocated."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from retopk_jax.errors import CapacityError


def free_bytes(device: Any) -> int | None:
    """Bytes that can still be allocated on a `jax.Device`; None where nobody knows."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if device.platform != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    available = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(available[0]) * 1024 if available else None


def check_memory(what: str, parts: Mapping[str, int], device: Any = None) -> None:
    """Refuses to go on where the parts do not fit a device together.

    Args:
        what: is to be held, for the message.
        parts: bytes on the device by purpose.
        device: a `jax.Device`; None for the default device.

    Raises:
        CapacityError: they do not fit.
    """
    device = jax.local_devices()[0] if device is None else device
    free, needed = free_bytes(device), sum(parts.values())
    if free is None or needed <= free:
        return
    listed = " + ".join(f"{human_bytes(size)} of {name}" for name, size in parts.items() if size)
    raise CapacityError(
        f"{what} needs {listed} = {human_bytes(needed)}: {device.device_kind} has "
        f"{human_bytes(free)} free"
    )


def human_bytes(count: int) -> str:
    """A number of bytes in the unit that suits it."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
