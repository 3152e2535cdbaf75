"""Run as a module: decodes over meshes of simulated CPU devices and prints what came out.

Arguments are cases such as ``tensor=2,sequence=4:retopk``; without a mesh one device decodes.
"""

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.model_shapes import SHAPES
from models import CausalLM, random_model, shard_model
from retopk_jax import ExactTopK, Full, ReTopK, generate, prefill, start_session
from retopk_jax.decode import remember, step_logits
from retopk_jax.sharding import make_mesh

LAYERS, HEADS, KV_HEADS, STEPS, SLOTS = 2, 16, 4, 7, 1024
RETOPK = ReTopK(budget=16, capacity=8, recall=2, window=4, tau=0.6, refresh=5)
METHODS = {method.name: method for method in (RETOPK, ExactTopK(16), Full())}
COLLECTIVE = r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("


def model() -> CausalLM:
    """Four query heads a KV head."""
    shape = replace(
        SHAPES["tiny"], num_layers=LAYERS, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=8
    )
    return random_model(shape, dtype="float32")


def prompts() -> list[list[int]]:
    """One that fills several devices of a sequence, and a short one."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 64, length).tolist() for length in (700, 40)]


def decode(lm: CausalLM, name: str) -> dict[str, Any]:
    """Greedy decoding with one compiled step, and what that is made of."""
    method = METHODS[name]
    read = prefill(lm, prompts(), new_tokens=STEPS, capacity=SLOTS, tail_queries=8)
    context = read.context
    if lm.decoder.mesh is not None and isinstance(method, ReTopK):  # one device fills its own
        context = remember(lm, method, context)
    state, logits = start_session(lm, method, context).state, context.logits
    step = jax.jit(step_logits, static_argnames="decoder", donate_argnames="state")
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    compiled = step.lower(lm.decoder, method, lm.params, state, tokens).compile()
    chosen, supports, paths = [], [], []
    for _ in range(STEPS):
        chosen.append(tokens.tolist())
        logits, state, reports = compiled(method, lm.params, state, tokens)
        tokens = jax.device_put(
            jnp.argmax(logits, axis=-1).astype(jnp.int32), compiled.input_shardings[0][-1]
        )
        supports.append([None if r.support is None else r.support.tolist() for r in reports])
        paths.append([None if r.path is None else r.path.tolist() for r in reports])
    part = state.cache.keys[0].addressable_shards[0].data
    memory: Any = compiled.memory_analysis()
    text = compiled.as_text() or ""
    return {
        "tokens": chosen,
        "supports": supports,
        "paths": paths,
        "logits": logits.tolist(),
        "generated": generate(
            lm, prompts(), attention=method, max_new_tokens=STEPS, capacity=SLOTS, ignore_eos=True
        ).tokens
        if name == "full"
        else None,
        "collectives": Counter(re.findall(COLLECTIVE, text)),
        "copies": [
            line.strip()[:200]
            for line in text.splitlines()
            if re.search(r" (copy|copy-start|transpose)\(", line)
            and "[" + ",".join(map(str, part.shape)) in line
        ],
        "part": part.shape,
        "cache_bytes": 2 * LAYERS * part.nbytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "key_bytes": state.usage.key_bytes.tolist(),
    }


def main(cases: list[str]) -> None:
    """Decodes every case and prints them as one JSON object."""
    one, found = model(), {}
    for case in cases:
        mesh, _, method = case.rpartition(":")
        sizes = {name: int(n) for name, n in (part.split("=") for part in mesh.split(",") if part)}
        devices = jax.devices()[: int(np.prod(list(sizes.values())))]
        lm = shard_model(one, make_mesh(**sizes, devices=devices)) if sizes else one
        found[case] = decode(lm, method)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
