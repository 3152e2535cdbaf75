"""Decode steps of SmolLM2 on this CPU: Full beside transformers, and ReTopK beside Full.

Windows of steps are timed in turns, all from the same context, and medians are compared. At 4K
and 8K the cache holds random keys and values, the same ones in ours and in transformers': a step's
time depends on their number alone, as long as the paths do not depend on them. ReTopK's default
paths do, so it is timed on a text that the model has read.
"""

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.demo import TEXT
from benchmarks.results_file import prepare_directory, write_results
from models import CausalLM, load_model
from models.weights import parameter_paths, tensor_name
from retopk_jax import (
    AttentionMethod,
    ConfigError,
    Context,
    Full,
    Generation,
    ReTopK,
    generate,
    prefill,
)
from retopk_jax.cli_methods import settings
from retopk_jax.kv_cache import KVCache
from retopk_jax.prefill import rounded_capacity

SHORT, LONG = 4096, 8192
"""Tokens at the end of a window."""

REUSE_ONLY = ReTopK(budget=128, tau=-1.0, refresh=0)

Window = Callable[[], float]
"""Runs one window of decode steps and returns the seconds a step took."""


def main(argv: Sequence[str]) -> None:
    """Runs the benchmark; see ``--help``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks cpu_decode", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for cpu_decode.json")
    parser.add_argument("--steps", type=int, default=16, help="in a window (%(default)s)")
    parser.add_argument("--windows", type=int, default=7, help="of each (%(default)s)")
    args = parser.parse_args(argv)
    for name in ("steps", "windows"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)}: expected 1 or more")
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"the comparison needs {package}: pip install {package}")
    if jax.default_backend() != "cpu":
        raise ConfigError(
            f"the backend is {jax.default_backend()}: this measures the CPU; set JAX_PLATFORMS=cpu"
        )
    out = prepare_directory(args.out)
    console = Console(highlight=False)
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    model = load_model("smollm2", dtype="float32")
    rows: list[dict[str, Any]] = []
    for part in (
        lambda: beside_transformers(model, args.steps, args.windows, threads or 1),
        lambda: beside_full(model, args.steps, args.windows),
        lambda: on_text(model, args.steps, args.windows),
    ):
        rows += part()
        console.print(_table(rows))
    run = {
        "model": "smollm2",
        "dtype": "float32",
        "threads": threads,
        "steps": args.steps,
        "windows": args.windows,
    }
    write_results(out / "cpu_decode.json", "cpu_decode", run, rows)
    console.print(f"Written to {out / 'cpu_decode.json'}", markup=False)


def beside_transformers(
    model: CausalLM, steps: int, windows: int, threads: int
) -> list[dict[str, Any]]:
    """Full at `SHORT` tokens beside transformers with the faster of its two caches."""
    context = random_context(model, SHORT - steps, capacity=SHORT)
    reference = Transformers(model, context, threads)
    ours = Ours(model, Full(), context, steps)
    runs: dict[str, Window] = {
        "Full": ours.window,
        "transformers, default cache": lambda: reference.window("dynamic", steps),
        "transformers, static cache": lambda: reference.window("static", steps),
    }
    seconds = interleaved(runs, windows)
    if ours.tokens != reference.tokens["dynamic"]:
        raise RuntimeError(
            f"transformers decoded {reference.tokens['dynamic']} and Full {ours.tokens}: "
            "they must agree to be compared"
        )
    fastest = min(seconds["transformers, default cache"], seconds["transformers, static cache"])
    return [
        {
            "context": SHORT,
            "keys": "random",
            "name": name,
            "milliseconds_a_token": 1e3 * took,
            "speed": fastest / took,
            "relative_to": "transformers",
        }
        for name, took in seconds.items()
    ]


def beside_full(model: CausalLM, steps: int, windows: int) -> list[dict[str, Any]]:
    """Full and ReTopK with reuse only at `LONG` tokens."""
    context = random_context(model, LONG - steps, capacity=LONG)
    return _compare(model, context, {"Full": Full(), "ReTopK, reuse only": REUSE_ONLY},
                    steps, windows, LONG, "random")  # fmt: skip


def on_text(model: CausalLM, steps: int, windows: int) -> list[dict[str, Any]]:
    """Full, ReTopK with reuse only and with its default paths, after reading a text."""
    tokens = model.require_tokenizer().encode(TEXT.read_text(encoding="utf-8"))
    read = prefill(model, [tokens], new_tokens=steps, tail_queries=ReTopK().tail_queries)
    methods = {
        "Full": Full(),
        "ReTopK, reuse only": REUSE_ONLY,
        "ReTopK, K=128": ReTopK(budget=128),
        "ReTopK": ReTopK(),
    }
    return _compare(model, read.context, methods, steps, windows, len(tokens) + steps, TEXT.name)


def _compare(
    model: CausalLM,
    context: Context,
    methods: Mapping[str, AttentionMethod],
    steps: int,
    windows: int,
    tokens: int,
    keys: str,
) -> list[dict[str, Any]]:
    shared = Ours(model, Full(), context, steps)
    runs = {name: shared.using(method) for name, method in methods.items()}
    seconds = interleaved({name: run.window for name, run in runs.items()}, windows)
    rows = []
    for name, took in seconds.items():
        paths = runs[name].generation.completions[0].paths
        rows.append(
            {
                "context": tokens,
                "keys": keys,
                "name": name,
                "settings": settings(methods[name]),
                "milliseconds_a_token": 1e3 * took,
                "speed": seconds["Full"] / took,
                "relative_to": "Full",
                "path_shares": None if paths is None else paths.shares,
            }
        )
    return rows


def interleaved(runs: Mapping[str, Window], windows: int) -> dict[str, float]:
    """Median seconds a step of each, their windows in turns; one window each warms up."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(windows + 1):
        for name, window in runs.items():
            seconds = window()
            if turn > 0:
                taken[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def random_context(model: CausalLM, length: int, capacity: int) -> Context:
    """A context of one row whose keys, values and last queries are random."""
    geometry, rng = model.decoder.geometry, np.random.default_rng(0)
    shape = (1, geometry.num_kv_heads, rounded_capacity(capacity), geometry.head_dim)
    tail = (1, ReTopK().tail_queries, geometry.num_heads, geometry.head_dim)

    def draw(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    layers = range(geometry.num_layers)
    return Context(
        KVCache(
            tuple(draw(shape) for _ in layers),
            tuple(draw(shape) for _ in layers),
            jnp.asarray([length], jnp.int32),
        ),
        tuple(draw(tail) for _ in layers),
        jnp.zeros((1, model.decoder.vocab_size), jnp.float32),
    )


class Ours:
    """Decodes from one context again and again, with any method."""

    def __init__(self, model: CausalLM, method: AttentionMethod, context: Context, steps: int):
        self._model, self._method, self._steps = model, method, steps
        self._shared = [context]

    def using(self, method: AttentionMethod) -> "Ours":
        """The same context, which is passed on from window to window, with another method."""
        other = Ours(self._model, method, self._shared[0], self._steps)
        other._shared = self._shared
        return other

    def window(self) -> float:
        """Decodes; returns the seconds a step took."""
        self.generation: Generation = generate(
            self._model,
            context=self._shared[0],
            donate=True,
            attention=self._method,
            max_new_tokens=self._steps,
            ignore_eos=True,
        )
        self._shared[0] = self.generation.context
        return self.generation.decode_seconds / self.generation.decode_steps

    @property
    def tokens(self) -> list[int]:
        """What the last window decoded."""
        return self.generation.tokens[0]


class Transformers:
    """The same weights and the same context in transformers, float32, greedy."""

    def __init__(self, model: CausalLM, context: Context, threads: int):
        import torch
        import transformers

        torch.set_num_threads(threads)
        self._torch = torch
        config = model.config
        self._model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_positions,
                rms_norm_eps=config.rms_norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
                tie_word_embeddings=config.tied,
            )
        ).eval()
        weights = {
            tensor_name(path): torch.from_numpy(
                np.array(leaf).T.copy() if path.endswith(".kernel") else np.array(leaf)
            )
            for path, leaf in parameter_paths(model.params).items()
        }
        missing, unexpected = self._model.load_state_dict(weights, strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise RuntimeError(f"weights differ: missing {missing}, unexpected {unexpected}")
        self._model.tie_weights()
        cache = context.cache
        static = transformers.StaticCache(self._model.config, max_cache_len=cache.capacity)
        self._caches = {"dynamic": transformers.DynamicCache(), "static": static}
        length = int(cache.lengths[0])
        for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
            k, v = (torch.from_numpy(np.array(x[:, :, :length])) for x in (keys, values))
            for filled in self._caches.values():
                filled.update(k, v, layer)
        self.tokens: dict[str, list[int]] = {}

    def window(self, cache: str, steps: int) -> float:
        """Decodes with one of the caches; returns the seconds a step took."""
        torch, filled = self._torch, self._caches[cache]
        token = torch.zeros((1, 1), dtype=torch.long)
        tokens = [0]
        with torch.inference_mode():
            began = time.perf_counter()
            for _ in range(steps - 1):
                logits = self._model(input_ids=token, past_key_values=filled).logits
                token = logits[:, -1].argmax(-1, keepdim=True)
                tokens.append(int(token))
            seconds = time.perf_counter() - began
            filled.crop(1 - steps)
        self.tokens[cache] = tokens
        return seconds / (steps - 1)


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("context", "keys", "", "ms a token", "speed", "relative to", "reuse")
    for row in rows:
        shares = row.get("path_shares")
        table.add_row(
            f"{row['context']:,}",
            row["keys"],
            row["name"],
            f"{row['milliseconds_a_token']:.1f}",
            f"{row['speed']:.2f}x",
            row["relative_to"],
            "" if shares is None else f"{shares['reuse']:.0%}",
        )
    return table
