"""Sizes at which the kernel benchmarks run on a CPU, with kernels in interpret mode."""

import pytest

from benchmarks import attention, decomposition, kernel_workload, stages

SIZES = {
    "HEADS": 4,
    "GROUPS": 2,
    "DIM": 16,
    "BUDGET": 16,
    "CAPACITY": 4,
    "ENTRIES": 2,
    "WINDOW": 4,
    "QUERIES": 2,
}


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the workload of the kernel benchmarks small, and the copy rate 1 TB/s."""
    for module in (attention, decomposition, kernel_workload, stages):
        for name, value in SIZES.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
        if hasattr(module, "copy_bytes_per_microsecond"):
            monkeypatch.setattr(module, "copy_bytes_per_microsecond", lambda: 1e6)
    monkeypatch.setattr(kernel_workload, "layers_for", lambda *_: 1)
    monkeypatch.setattr(kernel_workload, "loop_size", lambda *_: {"steps": 1, "rounds": 2})
    monkeypatch.setattr(attention, "torch_microseconds", lambda *_: None)
