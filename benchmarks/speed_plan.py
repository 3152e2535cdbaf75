"""Runs every measurement of speed on one GPU, each in a process of its own.

Compiled programs are kept between them as between all benchmarks. A step writes its own results
under --out; the plan ends in good time with --seconds, and with exit code 1 if a step failed.
"""

import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks.results_file import ROOT, prepare_directory
from benchmarks.timed_rows import check_only, options

RECORDED = [
    str(ROOT / "benchmarks" / "results" / f"paths-qwen-128-{name}.npz")
    for name in ("tau", "risk-0.02")
]
STEPS = {
    "attention": ["attention", "--pattern", *RECORDED],
    "end_to_end": [
        *["end_to_end", "--steps", "16", "--pattern", *RECORDED],
        *["--lengths", "131072", "1048576", "5242880", "16384"],
    ],
    "stages": ["stages"],
    "decomposition": ["decomposition"],
    "prefill": ["prefill"],
    "kernel_matrix": ["kernel_matrix"],
    "qwen2.5-14b": ["end_to_end", "--steps", "16", "--model", "qwen2.5-14b", "--lengths", "131072"],
    "llama-3.1-8b": [
        *["end_to_end", "--steps", "16", "--model", "llama-3.1-8b", "--lengths", "131072"],
    ],
}
"""Benchmarks and their arguments, the most telling first."""


def main(argv: Sequence[str]) -> None:
    """Runs the steps; see ``--help``."""
    args = options("speed-plan", __doc__).parse_args(argv)
    check_only(args.only, STEPS)
    out, end = prepare_directory(args.out), time.monotonic() + args.seconds
    failed = []
    for name in args.only or STEPS:
        left = end - time.monotonic()
        if left <= 0:
            print(f"time is over before {name}", file=sys.stderr)
            break
        given = [*STEPS[name], "--out", str(out.resolve()), "--seconds", str(left)]
        if args.commit is not None:
            given += ["--commit", args.commit]
        print(f"== {name}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "benchmarks", *given]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
