"""The timed decode steps of the 7B shape, compiled for one and two H200s on a machine without."""

import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from benchmarks.end_to_end import parts_of
from benchmarks.model_shapes import SHAPES
from benchmarks.synthetic_decode import Sizes, compile_steps
from models import TransformerDecoder
from models.sharding import shard_decoder
from retopk_jax import ReTopK
from retopk_jax.sharding import AXES
from tests import aot

pytestmark = aot.MARKS

LAYERS, SLOTS = 2, 131072


def kernels_of_a_layer(part: str) -> int:
    """Kernels that one more layer launches in a step."""
    counts = []
    for layers in (2, 3):
        shape = replace(SHAPES["qwen2.5-7b"], num_layers=layers)
        mesh = aot.mesh_for("sm_90", (1, 1, 1), AXES)
        decoder = shard_decoder(TransformerDecoder(shape, jnp.dtype("bfloat16")), mesh)
        method = parts_of(decoder.config, ReTopK(), 32, ())[part][0]
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            program = compile_steps(
                decoder, method, decoder.abstract_params, Sizes(8192, 128, layers), calls=3
            )
        text = program.run.as_text()
        body = re.search(r" while\(.*?body=%([\w.\-]+)", text)
        assert body is not None
        (steps,) = re.findall(rf"\n%{re.escape(body[1])} .*?\n}}", text, re.DOTALL)
        counts.append(len(re.findall(r" (?:fusion|custom-call|copy)\(", steps)))
    return counts[1] - counts[0]


@pytest.mark.parametrize(("part", "most"), [("none", 15), ("risk", 20)])
def test_a_layer_launches_few_kernels(part: str, most: int) -> None:
    assert 10 < kernels_of_a_layer(part) <= most


@pytest.mark.parametrize("part", ["risk", "exact", "full"])
@pytest.mark.parametrize("ways", [(1, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_steps_copy_no_cache_and_no_weights(ways: tuple[int, int, int], part: str) -> None:
    shape = replace(SHAPES["qwen2.5-7b"], num_layers=LAYERS)
    mesh = aot.mesh_for("sm_90", ways, AXES)
    decoder = shard_decoder(TransformerDecoder(shape, jnp.dtype("bfloat16")), mesh)
    method = parts_of(decoder.config, ReTopK(), 32, ())[part][0]
    sizes = Sizes(SLOTS, 128, LAYERS)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = compile_steps(decoder, method, decoder.abstract_params, sizes, calls=3)
    text, memory = program.run.as_text(), program.run.memory_analysis()
    _, tensor, sequence = ways
    cache = f"[1,{4 // tensor},{SLOTS // sequence},128]"
    assert cache in text, "this test looks for nothing"
    copied = [line for line in text.splitlines() if re.search(r" (copy|transpose)\(", line)]
    assert not [line for line in copied if cache in line]
    assert not [line for line in copied if "3584" in line], "weights are laid out anew"
    cache_bytes = 4 * LAYERS * 4 * SLOTS * 128 // (tensor * sequence)
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < 50e6
    counts = Counter(re.findall(r" (all-reduce|all-gather|all-to-all)(?:-start)?\(", text))
    assert counts["all-to-all"] == 0
    if tensor > 1:  # the last one also carries the counters
        assert 2 * LAYERS - 1 <= counts["all-reduce"] <= 2 * LAYERS + 2
    if sequence > 1:
        assert counts["all-gather"] <= LAYERS
    if ways == (1, 1, 1):
        assert not counts
