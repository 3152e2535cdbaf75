"""`retopk inspect`: memory that a model, a context and a batch need, before anything is loaded."""

import argparse
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from models import ModelConfig, TransformerDecoder, default_dtype, parameter_count, read_config
from models import parameter_bytes as weight_bytes
from retopk_jax.attention.checks import check_integer
from retopk_jax.cli_files import check_target, write_json
from retopk_jax.cli_methods import chosen_methods, settings
from retopk_jax.device_memory import human_bytes
from retopk_jax.memory import memory_need
from retopk_jax.prefill import rounded_capacity

_COLUMNS = {
    "weights": "weights",
    "kv_cache": "KV cache",
    "recall_cache": "recall cache",
    "total": "total",
}


def run_inspect(args: argparse.Namespace) -> None:
    """Prints, and writes where asked, what decoding would hold in memory.

    Raises:
        RetopkError: a setting is out of range.
        ModelError: the model's configuration cannot be read.
    """
    methods = chosen_methods(args)
    check_integer("context", args.context, minimum=1)
    check_integer("batch", args.batch, minimum=1)
    if args.json is not None:
        check_target(args.json, "--json")
    config = read_config(args.model)
    dtype = default_dtype() if args.dtype is None else args.dtype
    decoder = TransformerDecoder(config, dtype)
    capacity = rounded_capacity(args.context)
    needs: dict[str, dict[str, Any]] = {}
    for name, method in methods.items():
        need = memory_need(
            decoder.geometry,
            method,
            weights=weight_bytes(config, dtype),
            batch=args.batch,
            capacity=capacity,
            dtype=dtype,
        )
        needs[name] = {
            "settings": settings(method),
            "bytes": {**asdict(need), "total": need.total},
        }
    report = {
        "model": args.model,
        "dtype": str(dtype),
        "parameters": parameter_count(config),
        "max_positions": config.max_positions,
        "context": args.context,
        "batch": args.batch,
        "kv_cache_slots": capacity,
        "methods": needs,
    }
    if args.json is not None:
        write_json(args.json, report)
    _print(report, config)


def _print(report: dict[str, Any], config: ModelConfig) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{report['model']}: {config.model_type}, {report['parameters']:,} parameters, "
        f"{config.num_layers} layers, {config.num_heads} query and {config.num_kv_heads} KV heads "
        f"of {config.head_dim}, {report['dtype']}",
        markup=False,
    )
    console.print(
        f"context {report['context']:,} (cache of {report['kv_cache_slots']:,} tokens a row), "
        f"batch {report['batch']}"
    )
    table = Table("bytes")
    for title in _COLUMNS.values():
        table.add_column(title, justify="right")
    for name, item in report["methods"].items():
        cells = [
            f"{human_bytes(item['bytes'][key])}  {item['bytes'][key]:>15,}" for key in _COLUMNS
        ]
        table.add_row(name, *cells)
    console.print(table)
    console.print("Bytes held while decoding; temporaries of the compiled programs come on top.")
    if report["context"] > config.max_positions:
        console.print(
            f"The model has {config.max_positions:,} positions: generate refuses this context."
        )
