"""Contexts on disk: prompts that are read once and continued in other processes.

A store is a directory of arrays, written by Orbax under a new name, and ``context.json``, which
names them with the hash of every file. That file is put in place last, by one rename: whatever
interrupts a save, the store holds the context it held before, or none.

A context's recall caches are kept with it, and serve ReTopK of the same K and C as they are. Beside
them lie the last queries, from which those of another K or C, and other methods, start.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding

from pallas_kernels.packed import unpacked
from retopk_jax.attention.checks import check_integer
from retopk_jax.cli_files import write_json
from retopk_jax.device_memory import check_memory
from retopk_jax.errors import CapacityError, ConfigError, ContextError
from retopk_jax.fingerprint import model_fingerprint
from retopk_jax.kv_cache import KVCache, stored
from retopk_jax.language_model import LanguageModel
from retopk_jax.prefill import Context, check_context, context_bytes, rounded_capacity
from retopk_jax.recall_cache import FilledRecall, RecallCache, recall_cache_bytes
from retopk_jax.sharding import CACHE, HEADS, ROWS, TAIL, check_sizes, placed, shards_of

FORMAT = "retopk-jax context 2"
MANIFEST = "context.json"
_ARRAYS = "arrays-"
_OWN = re.compile(
    rf"{_ARRAYS}[0-9a-f]{{16}}(\..*)?|{re.escape(MANIFEST)}|\.{re.escape(MANIFEST)}\..*"
)
"""Names that a save makes in its directory, those that Orbax and `write_json` rename included."""


@dataclass(frozen=True)
class StoredContext:
    """A context and what was stored beside it.

    Attributes:
        context: to generate from.
        tokens: token ids of every row.
        notes: what the writer of the store wanted kept.
    """

    context: Context
    tokens: list[list[int]]
    notes: dict[str, Any]


def check_store(path: Path | str) -> None:
    """Checks that a context can be saved under a name, before it is read.

    Raises:
        ConfigError: it is a file, another directory than a store, or cannot be written.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: the directory {path.parent} does not exist")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file: expected a directory to make, or a stored context")
    if path.is_dir() and _strangers(path):
        raise ConfigError(
            f"{path} holds {', '.join(_strangers(path)[:3])}: expected a directory to make, or a "
            "stored context"
        )
    written = path if path.is_dir() else path.parent
    if not os.access(written, os.W_OK | os.X_OK):
        raise ConfigError(f"{path}: the directory {written} cannot be written")


def _strangers(path: Path) -> list[str]:
    """Names in a directory that are not of a store."""
    names = sorted(entry.name for entry in path.iterdir())
    strangers = [name for name in names if not _OWN.fullmatch(name)]
    if MANIFEST in names and not _describes_a_context(path / MANIFEST):
        strangers.append(MANIFEST)
    return strangers


def _describes_a_context(manifest: Path) -> bool:
    """Whether a file is the description of a stored context, of whatever version."""
    try:
        value = json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(value, dict) and str(value.get("format")).startswith(FORMAT.rstrip("2"))


def save_context(
    path: Path | str,
    model: LanguageModel,
    context: Context,
    tokens: Sequence[Sequence[int]],
    **notes: Any,
) -> None:
    """Stores a context, in place of one that is there: all of it or, on any failure, nothing.

    Args:
        path: the directory.
        model: the one that read the context.
        context: what it read.
        tokens: token ids of every row.
        **notes: JSON to keep beside it.

    Raises:
        ConfigError: the directory holds something else, the tokens are not the context's, or the
            context is another model's or was donated.
        OSError: the disk is full, or the like.
    """
    path = Path(path)
    check_store(path)
    check_context(model.decoder, context)
    lengths = np.asarray(context.cache.lengths).tolist()
    if [len(row) for row in tokens] != lengths:
        raise ConfigError(
            f"tokens of {[len(row) for row in tokens]} in rows: the context holds {lengths}"
        )
    path.mkdir(exist_ok=True)
    arrays = path / f"{_ARRAYS}{secrets.token_hex(8)}"
    slots = min(context.cache.capacity, rounded_capacity(max(lengths)))
    recall = context.recall
    padded = np.full((len(lengths), max(lengths)), -1, np.int32)
    for row, ids in enumerate(tokens):
        padded[row, : len(ids)] = ids
    tree = {
        "tokens": padded,
        "lengths": context.cache.lengths,
        "logits": context.logits,
        "keys": _first_slots(context.cache.keys, slots),
        "values": _first_slots(context.cache.values, slots),
        "tail_queries": list(context.tail_queries),
        **({} if recall is None else {"recall": _recall_tree(recall)}),
    }
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(arrays.absolute(), tree)
        manifest = {
            "format": FORMAT,
            "arrays": arrays.name,
            "model": model_fingerprint(model),
            "settings": _settings(model),
            "sizes": {
                "rows": len(lengths),
                "slots": slots,
                "longest": max(lengths),
                "tail_queries": context.tail_queries[0].shape[1],
                "recall": None if recall is None else recall.sizes,
            },
            "notes": notes,
            "files": _hashes(arrays),
        }
        write_json(path / MANIFEST, {**manifest, "digest": _digest(manifest)})
    except BaseException:
        shutil.rmtree(arrays, ignore_errors=True)
        raise
    for old in path.iterdir():  # the context before, and what saves that were killed left
        if old.is_dir() and old.name != arrays.name:
            shutil.rmtree(old, ignore_errors=True)
        elif old.is_file() and old.name != MANIFEST:
            old.unlink(missing_ok=True)


def read_manifest(path: Path | str) -> dict[str, Any]:
    """What a store says of itself; its arrays are not looked at.

    Raises:
        ContextError: there is no store, or its description is truncated or was changed.
    """
    path = Path(path)
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        digest = manifest.pop("digest")
    except OSError as error:
        raise ContextError(f"{path}: no stored context ({MANIFEST}: {error.strerror})") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ContextError(f"{path}: {MANIFEST} is truncated, or none of a context") from error
    if manifest.get("format") != FORMAT:
        raise ContextError(
            f"{path}: of format {manifest.get('format')!r}, this version reads {FORMAT!r}"
        )
    if digest != _digest(manifest):
        raise ContextError(f"{path}: {MANIFEST} was changed after it was written")
    return manifest


def load_context(
    path: Path | str, model: LanguageModel, *, new_tokens: int | None = None
) -> StoredContext:
    """Reads what `save_context` wrote.

    Args:
        path: the directory.
        model: the one that is to continue it.
        new_tokens: tokens to leave room for in every row; None for as many as were stored.

    Raises:
        ContextError: there is no store, it is truncated or was changed, or another model or other
            settings made it; says what differs.
        CapacityError: it does not fit the device, or the tokens not the model's positions.
    """
    path = Path(path)
    manifest = read_manifest(path)
    _check_made_by(path, manifest, model)
    sizes, arrays = manifest["sizes"], path / manifest["arrays"]
    decoder, geometry = model.decoder, model.decoder.geometry
    slots, longest = sizes["slots"], sizes["longest"]
    if new_tokens is not None:
        check_integer("new_tokens", new_tokens, minimum=0)
        needed = longest + new_tokens
        if needed > decoder.max_positions:
            raise CapacityError(
                f"context of {longest} tokens + {new_tokens} new tokens = {needed}: the model has "
                f"{decoder.max_positions} positions"
            )
        slots = rounded_capacity(needed)
    rows, tail, recalled = sizes["rows"], sizes["tail_queries"], sizes["recall"]
    parts = context_bytes(decoder, rows, slots, tail)
    if recalled is not None:
        capacity, budget = recalled
        bytes_of_all = recall_cache_bytes(geometry, rows, capacity, budget, decoder.dtype)
        parts["recall caches"] = bytes_of_all // shards_of(decoder.mesh, HEADS)
    check_memory(f"the context {path}", parts)
    _check_files(path, arrays, manifest["files"])
    check_sizes(rows, slots, decoder.mesh)
    one = SingleDeviceSharding(jax.local_devices()[0])

    def target(shape: tuple[int, ...], dtype: Any, spec: P = ROWS) -> jax.ShapeDtypeStruct:
        where = placed(decoder.mesh, spec) or one
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=where)

    layers = range(geometry.num_layers)
    cache = (rows, geometry.num_kv_heads, slots, geometry.head_dim)
    cached = target(cache, decoder.dtype, CACHE)
    queries = target((rows, tail, geometry.num_heads, geometry.head_dim), decoder.dtype, TAIL)
    targets = {
        "tokens": target((rows, sizes["longest"]), jnp.int32),
        "lengths": target((rows,), jnp.int32),
        "logits": target((rows, decoder.vocab_size), jnp.float32),
        "keys": [cached for _ in layers],
        "values": [cached for _ in layers],
        "tail_queries": [queries for _ in layers],
    }
    if recalled is not None:
        ring, dim = (rows, geometry.num_heads, recalled[0]), geometry.head_dim
        targets["recall"] = {
            "queries": [target((*ring, dim), decoder.dtype, HEADS) for _ in layers],
            "supports": [target((*ring, recalled[1]), jnp.int32, HEADS) for _ in layers],
            "pushed": target((rows,), jnp.int32),
            "lengths": target((rows,), jnp.int32),
        }
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            # Not strict: the cache may be larger than the stored one, and is zero beyond it.
            tree = checkpointer.restore(arrays.absolute(), targets, strict=False)
    # Orbax and TensorStore raise many kinds for damaged files.
    except Exception as error:
        raise ContextError(f"{path}: its arrays cannot be read: {error}") from error
    cache = KVCache(*stored(tuple(tree["keys"]), tuple(tree["values"])), tree["lengths"])
    lengths = np.asarray(tree["lengths"])
    tokens = [row[:n].tolist() for row, n in zip(np.asarray(tree["tokens"]), lengths, strict=True)]
    recall = None if recalled is None else _recall_of(tree["recall"])
    context = Context(cache, tuple(tree["tail_queries"]), tree["logits"], recall)
    return StoredContext(context, tokens, manifest["notes"])


def _recall_tree(recall: FilledRecall) -> dict[str, Any]:
    """The arrays to store; every layer of a row has been pushed to as often."""
    return {
        "queries": [layer.queries for layer in recall.layers],
        "supports": [layer.supports for layer in recall.layers],
        "pushed": recall.layers[0].pushed,
        "lengths": recall.lengths,
    }


def _recall_of(tree: dict[str, Any]) -> FilledRecall:
    """Inverse of `_recall_tree`."""
    both = zip(tree["queries"], tree["supports"], strict=True)
    layers = [
        RecallCache(queries, supports, jnp.copy(tree["pushed"])) for queries, supports in both
    ]
    return FilledRecall(tuple(layers), tree["lengths"])


def _first_slots(arrays: Sequence[jax.Array], slots: int) -> list[jax.Array]:
    return [unpacked(x) if x.shape[2] == slots else x[:, :, :slots] for x in arrays]


def _settings(model: LanguageModel) -> dict[str, Any]:
    """What a context's arrays depend on besides the weights."""
    decoder = model.decoder
    return {
        **asdict(decoder.geometry),
        "vocab_size": decoder.vocab_size,
        "rotary_scale": decoder.rotary_scale,
        "dtype": jnp.dtype(decoder.dtype).name,
    }


def _check_made_by(path: Path, manifest: dict[str, Any], model: LanguageModel) -> None:
    found = _settings(model)
    differing = [
        f"{name} {kept} and not {found[name]}"
        for name, kept in manifest["settings"].items()
        if kept != found.get(name)
    ]
    if differing:
        raise ContextError(f"{path}: made by a model of {', '.join(differing)}")
    mine = model_fingerprint(model)
    what = {"weights": "weights", "rope": "positional encoding (RoPE)"}
    differing = [what[name] for name, kept in manifest["model"].items() if kept != mine[name]]
    if differing:
        raise ContextError(
            f"{path}: made by a model of other {' and '.join(differing)} than this one's"
        )


def _hashes(directory: Path) -> dict[str, list[Any]]:
    """Bytes and SHA-256 of every file, by path."""

    def describe(file: Path) -> list[Any]:
        with file.open("rb") as opened:
            return [file.stat().st_size, hashlib.file_digest(opened, "sha256").hexdigest()]

    files = sorted(file for file in directory.rglob("*") if file.is_file())
    with ThreadPoolExecutor() as pool:
        found = pool.map(describe, files)
        return {str(f.relative_to(directory)): d for f, d in zip(files, found, strict=True)}


def _check_files(path: Path, arrays: Path, wanted: dict[str, list[Any]]) -> None:
    found = _hashes(arrays) if arrays.is_dir() else {}
    for title, names in {
        "missing": wanted.keys() - found.keys(),
        "unexpected": found.keys() - wanted.keys(),
        "truncated": {n for n in wanted.keys() & found.keys() if found[n][0] != wanted[n][0]},
        "changed after it was written": {
            n for n in wanted.keys() & found.keys() if found[n] != wanted[n]
        },
    }.items():
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ContextError(f"{path}: {arrays.name}/{min(names)}{more}: {title}")


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
