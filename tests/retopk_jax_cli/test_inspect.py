import json

import jax
import pytest

from models import load_model
from retopk_jax import ReTopK, prefill, start_session
from retopk_jax.cli import main


def inspect(tmp_path, *args):
    out = tmp_path / "inspect.json"
    assert main(["inspect", *map(str, args), "--json", str(out)]) == 0
    return json.loads(out.read_text())


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_are_those_of_the_arrays(tiny, tmp_path, dtype):
    options = ["--budget", 24, "--capacity", 6, "--dtype", dtype]
    report = inspect(tmp_path, "--model", tiny, "--context", 300, "--batch", 2, *options)
    model = load_model(tiny, dtype=dtype)
    method = ReTopK(budget=24, capacity=6)
    read = prefill(model, [[5] * 200, [6] * 90], new_tokens=100, tail_queries=6)
    layers = start_session(model, method, read.context).state.layers
    needed = report["methods"]["retopk"]["bytes"]
    assert report["kv_cache_slots"] == read.context.cache.capacity
    assert needed["weights"] == nbytes(model.params)
    assert needed["kv_cache"] == nbytes((read.context.cache.keys, read.context.cache.values))
    assert needed["recall_cache"] == nbytes([layer.cache for layer in layers])
    assert needed["total"] == sum(needed[k] for k in ("weights", "kv_cache", "recall_cache"))
    assert report["methods"]["full"]["bytes"]["recall_cache"] == 0
    assert report["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(model.params))


def test_loads_nothing(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jax, "device_put", lambda *_, **__: pytest.fail("allocated"))
    report = inspect(tmp_path, "--model", tiny, "--context", 100_000, "--attention", "full")
    assert list(report["methods"]) == ["full"]
    printed = capsys.readouterr().out
    for line in ("weights", "KV cache", "recall cache", "total", "65,536 positions"):
        assert line in printed


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--context", "0"], "context=0"),
        (["--context", "8", "--batch", "0"], "batch=0"),
        (["--context", "8", "--attention", "exact", "--tau", "1"], "--tau 1.0 does not apply"),
        (["--context", "8", "--json", "/nowhere/x.json"], "/nowhere does not exist"),
        (["--context", "8", "--model", "/nowhere"], "/nowhere: no such file"),
    ],
)
def test_bad_input(tiny, options, part, capsys):
    assert main(["inspect", "--model", str(tiny), *options]) == 2
    assert part in capsys.readouterr().err
