"""Two processes, a simulated device each, as two hosts: the same tokens, one file of results."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.model_shapes import SHAPES
from models import random_model
from retopk_jax import ReTopK, generate

METHOD = ReTopK(budget=16, capacity=4, recall=2, window=4)
PROMPTS = [[5, 3, 9, 1, 7, 7, 2], list(range(60))]
MESHES = ("tensor=2", "sequence=2", "data=2")
HOST = """
import json, sys
import jax
from benchmarks import end_to_end
from models import shard_model
from retopk_jax.sharding import parse_mesh
from tests.benchmarks import test_several_hosts as t

port, process, out = sys.argv[1:]
end_to_end.copy_bytes_per_microsecond = lambda: 1e4
end_to_end.ReTopK = lambda: t.METHOD
hosts = ["--coordinator", f"localhost:{port}", "--processes", "2", "--process", process]
run = ["--out", out, "--model", "tiny", "--steps", "2", "--calls", "1", "--commit", "abc"]
end_to_end.main([*run, "--lengths", "128", "--mesh", "tensor=2", *hosts])
assert jax.process_count() == 2 == len(jax.devices()), jax.devices()
models = [shard_model(t.tiny(), parse_mesh(mesh)) for mesh in t.MESHES]
print(json.dumps([t.generated(model) for model in models]))
"""


def tiny():
    return random_model(SHAPES["tiny"], dtype="float32")


def generated(model) -> list[list[int]]:
    return generate(
        model, PROMPTS, attention=METHOD, max_new_tokens=5, ignore_eos=True, capacity=256
    ).tokens


@pytest.mark.long
def test_two_hosts_decode_as_one(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", HOST, str(port), str(process), str(tmp_path)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    printed = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], printed[0][1][-3000:]
    expected = [generated(tiny())] * len(MESHES)
    assert [json.loads(out.splitlines()[-1]) for out, _ in printed] == [expected, expected]
    rows = json.loads((tmp_path / "end_to_end.json").read_text())["rows"]
    assert len(rows) == 7
    assert all(row["milliseconds"] > 0 and row["devices"] == 2 for row in rows)
