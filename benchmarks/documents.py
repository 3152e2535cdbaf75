"""Cuts documents of token ids out of texts once, into a small file that experiments take."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.evidence.documents import cut_documents, save_documents, token_hash
from benchmarks.evidence.texts import ON_BAD, BadItems, read_texts
from models import load_model
from retopk_jax.cli_files import check_target


def main(argv: Sequence[str]) -> None:
    """Cuts documents; see ``--help``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks documents", description=__doc__)
    parser.add_argument("--texts", type=Path, required=True, help="directory of .txt, or one file")
    parser.add_argument("--model", default="smollm2", help="whose tokenizer (%(default)s)")
    parser.add_argument("--length", type=int, required=True, help="tokens a document")
    parser.add_argument(
        "--documents",
        type=int,
        required=True,
        help="how many; one more than are scored, for Loki's calibration",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the choice (%(default)s)")
    parser.add_argument("--on-bad", choices=ON_BAD, default="skip", help="(%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="the .npz file to write")
    args = parser.parse_args(argv)
    check_target(args.out, "--out")
    bad = BadItems(args.on_bad)
    documents = cut_documents(
        read_texts(args.texts, bad),
        load_model(args.model).require_tokenizer(),
        length=args.length,
        count=args.documents,
        seed=args.seed,
        source=args.texts.name,
        bad=bad,
    )
    save_documents(args.out, documents)
    print(
        f"{len(documents.names)} documents of {documents.length:,} tokens, sha256 "
        f"{token_hash(documents.tokens)}, {args.out.stat().st_size:,} bytes in {args.out}"
    )
