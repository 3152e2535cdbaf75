"""Records which heads scan at every step of a decode, for `end_to_end --pattern`.

The end of every document is fed token by token, all but its last; steps of one row follow each
other, and rows follow rows. The file holds ``scans``, bool [steps, layers, G, H / G], and what
they are of as JSON in ``about``.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.evidence.arguments import fill, make_parser
from benchmarks.evidence.experiment import Scene, set_scene
from benchmarks.evidence.suffix import Plan
from benchmarks.results_file import commit, machine
from retopk_jax import ReTopK, decode_step, prefill, start_session
from retopk_jax.attention.retopk import REUSE
from retopk_jax.errors import ConfigError

NORMAL = {
    "methods": ["retopk"],
    "budgets": [128],
    "lengths": [8192],
    "documents": 8,
    "rows": 8,
    "suffix": 256,
}
SMOKE = {"budgets": [32], "lengths": [256], "documents": 2, "rows": 2, "suffix": 9}


def main(argv: Sequence[str]) -> None:
    """Runs the decode; see ``--help``."""
    parser = make_parser("record-paths", __doc__)
    parser.add_argument("--suffix", type=int, metavar="N", help="tokens fed at the end (256)")
    args = parser.parse_args(argv)
    fill(args, NORMAL, SMOKE)
    if len(args.lengths) != 1 or len(args.methods) != 1 or len(args.budgets) != 1:
        raise ConfigError("record-paths takes one of --methods, --budgets and --lengths")
    plan = Plan.of(args, args.lengths, args.suffix)
    scene = set_scene(args, plan)
    (variant,) = scene.variants
    if not isinstance(variant.method, ReTopK):
        raise ConfigError(f"--methods {variant.name}: expected retopk, whose heads choose a path")
    scans = record(scene, variant.method, plan)
    path = args.out / (f"paths-{args.tag}.npz" if args.tag else "paths.npz")
    save(path, scans, {"commit": commit(), "machine": machine(), "settings": scene.settings})
    print(
        f"{len(scans):,} steps of {scans.shape[1]} layers: {scans.mean():.2%} of heads, "
        f"{scans.any(axis=3).mean():.2%} of KV groups scan. Written to {path}"
    )


def record(scene: Scene, method: ReTopK, plan: Plan) -> np.ndarray:
    """Heads that scan, bool ``[rows * steps, layers, G, H / G]``."""
    geometry, tokens = scene.model.decoder.geometry, scene.documents.ending(plan.lengths[0])
    parts = []
    for first in range(0, len(tokens), plan.rows):
        batch = tokens[first : first + plan.rows]
        prefix, fed = np.split(batch, [batch.shape[1] - plan.suffix], axis=1)
        context = prefill(
            scene.model,
            [row.tolist() for row in prefix],
            new_tokens=plan.suffix,
            tail_queries=method.tail_queries,
        ).context
        session, steps = start_session(scene.model, method, context), []
        for column in fed.T[: plan.scored]:
            _, session, reports = decode_step(session, jnp.asarray(column))
            steps.append([report.path for report in reports])
        paths = np.array(jax.device_get(steps))  # [T, layers, B, H]
        parts.append((paths != REUSE).transpose(2, 0, 1, 3).reshape(-1, *paths.shape[1::2]))
    scans = np.concatenate(parts)
    return scans.reshape(*scans.shape[:2], geometry.num_kv_heads, geometry.group_size)


def save(path: Path, scans: np.ndarray, about: dict[str, Any]) -> None:
    """Writes the scans aside and renames them."""
    aside = path.with_name(f".{path.name}.aside")
    with aside.open("wb") as file:
        np.savez_compressed(file, scans=scans, about=np.array(json.dumps(about)))
    aside.replace(path)
