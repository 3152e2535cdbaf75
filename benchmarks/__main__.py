"""`python -m benchmarks NAME [arguments]`."""

import importlib
import sys
from collections.abc import Sequence

from benchmarks.table import BENCHMARKS
from models import ModelError
from retopk_jax.cli_cache import enable_compilation_cache
from retopk_jax.errors import RetopkError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark that the first argument names, or lists them all.

    Args:
        argv: the name and the benchmark's own arguments; None for those of the process.
    """
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("", "-h", "--help"):
        print("python -m benchmarks NAME [arguments]; NAME --help says what a benchmark takes\n")
        width = max(map(len, BENCHMARKS))
        for known, what in BENCHMARKS.items():
            print(f"  {known:{width}}  {what}")
        return 0
    if name not in BENCHMARKS:
        print(
            f"python -m benchmarks: no benchmark named {name!r}: "
            f"expected one of {', '.join(BENCHMARKS)}",
            file=sys.stderr,
        )
        return 2
    enable_compilation_cache()
    try:
        importlib.import_module(f"benchmarks.{name.replace('-', '_')}").main(rest)
    except (RetopkError, ModelError) as error:
        print(f"python -m benchmarks {name}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
