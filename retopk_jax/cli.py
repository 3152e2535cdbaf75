"""The `retopk` command."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import jax

from models import ModelError, convert
from retopk_jax.calibration.retopk import ERRORS
from retopk_jax.cli_cache import VARIABLE, enable_compilation_cache
from retopk_jax.cli_calibrate import run_calibrate
from retopk_jax.cli_generate import run_generate
from retopk_jax.cli_inspect import run_inspect
from retopk_jax.cli_methods import add_method_options
from retopk_jax.cli_prefill import run_prefill
from retopk_jax.errors import RetopkError

BAD_INPUT, FAILED, INTERRUPTED, BROKEN_PIPE = 2, 1, 130, 141
"""Exit codes other than 0."""

_MODEL_HELP = (
    "a Hugging Face directory, a .gguf file, a directory written by `retopk convert`, "
    "'smollm2', or a name on the Hugging Face hub (organisation/name)"
)
_DTYPES = ("float32", "bfloat16", "float16")


class _Parser(argparse.ArgumentParser):
    """Reports a usage error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {_one_line(message)} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        argv: arguments after the program's name; None for those of the process.
    """
    args = _parser().parse_args(argv)
    if args.compilation_cache:
        enable_compilation_cache()
    run: Callable[[argparse.Namespace], None] = args.run
    try:
        run(args)
    except (RetopkError, ModelError) as error:
        return _complain(args.command, error, BAD_INPUT)
    except BrokenPipeError:
        # Python flushes standard output once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return _complain(args.command, "interrupted", INTERRUPTED)
    except (OSError, jax.errors.JaxRuntimeError) as error:
        return _complain(args.command, error, FAILED)
    return 0


def _complain(command: str, problem: object, code: int) -> int:
    print(f"retopk {command}: {_one_line(str(problem))}", file=sys.stderr)
    return code


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="retopk",
        description="Decode from long contexts with ReTopK and the methods it is compared to.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_generate(commands.add_parser("generate", help="continue prompts", allow_abbrev=False))
    _add_prefill(
        commands.add_parser(
            "prefill", help="read prompts once, for many questions", allow_abbrev=False
        )
    )
    _add_convert(
        commands.add_parser("convert", help="write a model to load faster", allow_abbrev=False)
    )
    _add_inspect(
        commands.add_parser("inspect", help="say what memory is needed", allow_abbrev=False)
    )
    _add_calibrate(
        commands.add_parser(
            "calibrate", help="fit what a method learns from a text", allow_abbrev=False
        )
    )
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_generate)
    _add_model(parser, required=False)
    parser.add_argument(
        "--context",
        type=Path,
        metavar="DIR",
        help="what retopk prefill stored: the prompts follow it, and its model is the default",
    )
    _add_mesh(parser)
    _add_prompts(parser)
    add_method_options(parser, default="retopk")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 for greedy (the default)"
    )
    parser.add_argument("--top-k", type=int, metavar="N", help="draw from the N likeliest")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw from this probability mass")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampler")
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; can be repeated",
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="go on after the model's end of sequence"
    )
    _add_json(parser)
    _add_cache(parser)


def _add_prefill(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_prefill)
    _add_model(parser)
    _add_mesh(parser)
    _add_prompts(parser)
    parser.add_argument(
        "--save",
        type=Path,
        required=True,
        metavar="DIR",
        help="the directory to make, or a stored context to put another in place of",
    )
    for name, metavar, default, text in (
        ("budget", "K", 512, "tokens of each support"),
        ("capacity", "C", 32, "(query, support) pairs a head"),
    ):
        parser.add_argument(
            f"--{name}",
            type=int,
            default=default,
            metavar=metavar,
            help=f"of the recall cache that is stored for ReTopK: {text} (default: {default}); "
            "generate fills another one where it is given other sizes",
        )
    _add_cache(parser)


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(
        run=lambda args: convert(args.source, args.destination, dtype=args.dtype),
    )
    parser.add_argument("source", metavar="SRC", help=_MODEL_HELP)
    parser.add_argument("destination", metavar="DST", help="the directory to make")
    parser.add_argument(
        "--dtype", choices=_DTYPES, help="of the written weights (default: the source's)"
    )
    _add_cache(parser)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_inspect)
    _add_model(parser)
    parser.add_argument(
        "--context",
        type=int,
        required=True,
        metavar="N",
        help="tokens a row, prompt and continuation",
    )
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="rows (default: 1)")
    add_method_options(parser, default=None)
    _add_json(parser)
    _add_cache(parser)


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_calibrate)
    parser.add_argument(
        "--method",
        choices=["loki", "retopk"],
        required=True,
        help="loki: principal components of the keys; retopk: maps from similarity to the "
        "expected error of a reuse",
    )
    _add_model(parser)
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="UTF-8 texts, joined by a blank line",
    )
    parser.add_argument(
        "--window",
        type=int,
        metavar="N",
        help="loki: tokens read at once (default: 4096, or as many as the model has positions "
        "for); retopk: recent tokens that are always candidates (default: 32)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to make")
    _add_risk(parser.add_argument_group("options of --method retopk"))
    _add_cache(parser)


def _add_risk(group: argparse._ArgumentGroup) -> None:
    for name, metavar, text in (
        ("budget", "K", "tokens attended (default: 512)"),
        ("capacity", "C", "remembered (query, support) pairs a head (default: 32)"),
        ("recall", "R", "entries whose supports are merged (default: 4)"),
        ("refresh", "T", "scan all keys every T steps, 0 for never (default: 128)"),
        ("context", "N", "tokens of a window that are read before the decode (default: 4096)"),
        ("steps", "N", "tokens of a window that are fed to the decode (default: 256)"),
        ("windows", "N", "windows of the text at most, spread evenly (default: 8)"),
        ("rows", "B", "windows decoded at once (default: 4)"),
        ("rounds", "N", "decodes by the fitted policy, each fitted anew (default: 2)"),
    ):
        group.add_argument(f"--{name}", type=int, metavar=metavar, help=text)
    group.add_argument(
        "--tau", type=float, help="threshold of the first decode, groups scanning whole (0.85)"
    )
    group.add_argument(
        "--target",
        metavar="WHAT=VALUE",
        help="what theta is chosen for: tau=TAU, the error of that threshold; share=SHARE of KV "
        "groups scanned; or error=ERROR, mean relative error of a head-step (default: tau=0.85)",
    )
    group.add_argument(
        "--error",
        choices=list(ERRORS),
        help="what is fitted: the error of a head's output relative to the output, or after the "
        "output projection relative to the residual stream (default: head)",
    )


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt",
        dest="prompts",
        action="append",
        default=[],
        metavar="TEXT",
        help="repeat it for a batch",
    )
    parser.add_argument(
        "--prompt-file",
        dest="prompts",
        action="append",
        type=_prompt_file,
        metavar="FILE",
        help="UTF-8 text, read as it is; - for standard input; repeat it for a batch",
    )
    parser.add_argument(
        "--chat", action="store_true", help="each prompt is what a user says in a conversation"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message of --chat")


def _add_model(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    parser.add_argument("--model", required=required, metavar="MODEL", help=_MODEL_HELP)
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="of weights, activations and cache (default: float32 on CPU, bfloat16 elsewhere)",
    )


def _add_mesh(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mesh",
        default="",
        metavar="AXES",
        help="shard over all devices: data=N by rows, tensor=N by heads, sequence=N by positions, "
        "or several with commas",
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")


def _add_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-compilation-cache",
        dest="compilation_cache",
        action="store_false",
        help=f"do not keep compiled programs between runs (also {VARIABLE}=off)",
    )


def _prompt_file(name: str) -> str:
    try:
        if name == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        return Path(name).read_bytes().decode("utf-8")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"{name}: not UTF-8 text ({error})") from error


if __name__ == "__main__":
    sys.exit(main())
