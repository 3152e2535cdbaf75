"""Reading a long prompt with random weights, beside the floor of its arithmetic, on one device."""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.model_shapes import SHAPES
from benchmarks.results_file import prepare_directory, write_results
from benchmarks.timed_rows import options
from models import CausalLM, ModelConfig, parameter_count, random_model
from retopk_jax.attention import ReTopK
from retopk_jax.attention.checks import check_integer
from retopk_jax.decode import prime
from retopk_jax.device_memory import human_bytes
from retopk_jax.prefill import Context, prefill

Row = dict[str, Any]
NAME = "prefill"


def flops(config: ModelConfig, tokens: int) -> dict[str, float]:
    """Floating-point operations of a dense causal prefill, by part.

    The head is left out: it is applied to the last token alone.
    """
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tied else 2)
    blocks = parameter_count(config) - embeddings
    pairs = tokens * (tokens + 1) / 2
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    return {"blocks": 2.0 * blocks * tokens, "attention": attention}


def matmul_flops_per_second(size: int, dtype: Any = jnp.bfloat16) -> float:
    """Rate of a square matrix product, the median of several, each of four in a row.

    Of random numbers: a GPU multiplies equal ones faster.
    """
    a, b = jax.random.normal(jax.random.key(0), (2, size, size), dtype) * size**-0.5
    product = jax.jit(lambda a, b: (a @ b).astype(a.dtype))
    jax.block_until_ready(product(a, b))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        out = a
        for _ in range(4):
            out = product(out, b)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - began) / 4)
    return 2.0 * size**3 / float(np.median(times))


def measure(model: CausalLM, tokens: int, rate: float, runs: int) -> Row:
    """Reads one prompt several times; the first also compiles."""
    method, config = ReTopK(), model.config
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, tokens).tolist()
    seconds, primed, compiling, temporaries = [], [], 0.0, 0
    for _ in range(runs + 1):
        read = prefill(model, [prompt], new_tokens=1, tail_queries=method.tail_queries)
        compiling += read.compile_seconds
        temporaries = read.temporary_bytes
        seconds.append(read.seconds)
        primed.append(_prime_seconds(method, read.context))
        del read  # before the next cache is made
    work = flops(config, tokens)
    middle, recall = float(np.median(seconds[1:])), float(np.median(primed[1:]))
    floor = sum(work.values()) / rate
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        "length": tokens,
        "seconds": round(middle, 4),
        "compile_seconds": round(compiling, 1),
        "floor_seconds": round(floor, 4),
        "over_floor": round(middle / floor, 3),
        "tokens_per_second": round(tokens / middle, 1),
        "flops": work,
        "recall_cache_seconds": round(recall, 4),
        "recall_cache_share": round(recall / (middle + recall), 4),
        "temporary_bytes": temporaries,
        "temporary_bytes_per_token": round(temporaries / tokens),
        "peak_bytes": stats.get("peak_bytes_in_use"),
    }


def _prime_seconds(method: ReTopK, context: Context) -> float:
    """Seconds of filling the recall caches of all layers."""
    began = time.perf_counter()
    jax.block_until_ready(prime(method, context))
    return time.perf_counter() - began


def main(argv: Sequence[str]) -> None:
    """Measures, prints and writes ``prefill.json``."""
    parser = options(NAME, __doc__, has_parts=False)
    parser.add_argument("--model", choices=list(SHAPES), default="qwen2.5-7b")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**14, 2**17])
    parser.add_argument("--runs", type=int, default=2, help="after one that compiles (%(default)s)")
    parser.add_argument("--matmul", type=int, default=8192, help="size of the product that gives "
                        "the rate (%(default)s)")  # fmt: skip
    args = parser.parse_args(argv)
    for name in ("runs", "matmul"):
        check_integer(f"--{name}", getattr(args, name), minimum=1)
    for length in args.lengths:
        check_integer("--lengths", length, minimum=1)
    out, end = prepare_directory(args.out), time.monotonic() + args.seconds
    rate = matmul_flops_per_second(args.matmul)
    print(f"matrix products at {rate * 1e-12:.1f} Tflop/s", flush=True)
    model = random_model(SHAPES[args.model], dtype=jnp.bfloat16)
    settings = {
        "model": args.model,
        "dtype": "bfloat16",
        "runs": args.runs,
        "matmul_size": args.matmul,
        "matmul_flops_per_second": rate,
    }
    more = {} if args.commit is None else {"commit": args.commit}
    rows: list[Row] = []
    for length in args.lengths:
        if time.monotonic() > end:
            break
        row = measure(model, length, rate, args.runs)
        rows.append(row)
        write_results(out / f"{NAME}.json", NAME, settings, rows, **more)
        print(
            f"{args.model} {length:9,} tokens in {row['seconds']:.2f} s, floor "
            f"{row['floor_seconds']:.2f}; recall cache {row['recall_cache_share']:.1%}; "
            f"temporaries {human_bytes(row['temporary_bytes'])}",
            flush=True,
        )
