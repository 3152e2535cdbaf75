"""StreamingLLM against its oracle, which never sees a key at its place in the text."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.rope import Rope, position_angles
from retopk_jax.attention import Step, StreamingLLM
from retopk_jax.errors import ConfigError
from retopk_jax.rotary import rotate
from tests.oracle import baselines as oracle
from tests.retopk_jax.attention.harness import (
    GROUPS,
    SLOTS,
    UNIT,
    assert_same,
    compiled,
    normal_problem,
    ragged,
    walk,
)


@pytest.mark.parametrize(
    ("split", "group"),
    [("3+6", "g1"), ("3+6", "g3"), ("3+6", "g7"), ("0+9", "g3"), ("8+1", "g3"), ("20+40", "g3")],
)
def test_absolute_steps_equal_the_oracle(group: str, split: str) -> None:
    sinks, recent = map(int, split.split("+"))
    method = StreamingLLM(sinks, recent, "absolute")
    for seed, lengths in enumerate(ragged()[:: 1 if split == "3+6" else 3]):
        for row in walk(method, normal_problem(seed, GROUPS[group], lengths)):
            want = oracle.streaming_absolute(row.q, row.keys, row.values, sinks, recent)
            assert_same(row, want.supports, want.output)
            if row.length <= sinks + recent:
                full = oracle.full(row.q, row.keys, row.values)
                assert_same(row, [tuple(range(row.length))] * len(row.q), full)


# ---- cache-relative positions -----------------------------------------------------------------

DIM = 64
ROPES = {
    "default": {"rope_theta": 1e5},
    "llama3": {
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    },
    "yarn": {
        "rope_theta": 1e6,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    },
}


def rope_of(name: str) -> Rope:
    return Rope.from_hf({"max_position_embeddings": 2048, **ROPES[name]}, DIM)


def rotated(raw: np.ndarray, rope: Rope, dtype=jnp.float32) -> jnp.ndarray:
    """``[B, T, heads, D]`` at positions 0, 1, … as the model caches them."""
    rates = jnp.broadcast_to(
        jnp.asarray(rope.inverse_frequencies())[None], (raw.shape[0], DIM // 2)
    )
    positions = jnp.broadcast_to(jnp.arange(raw.shape[1], dtype=jnp.int32)[None], raw.shape[:2])
    return rotate(jnp.asarray(raw, dtype), position_angles(positions, rates), rope.scale)


@pytest.mark.parametrize(
    ("name", "heads", "groups"), [("default", 2, 2), ("llama3", 7, 1), ("yarn", 6, 2)]
)
def test_equals_unrotated_keys_at_cache_positions(name: str, heads: int, groups: int) -> None:
    """Up to 655 evictions, in rows that have evicted other numbers, or none yet."""
    sinks, recent, batch, slots = 4, 21, 3, 680
    rope = rope_of(name)
    assert (rope.scale > 1) == (name == "yarn")
    rng = np.random.default_rng(0)
    raw_q = rng.normal(size=(batch, slots, heads, DIM)).astype(np.float32)
    raw_keys = rng.normal(size=(batch, slots, groups, DIM)).astype(np.float32)
    values = rng.normal(size=(batch, groups, slots, DIM)).astype(np.float32)
    q, keys = rotated(raw_q, rope), jnp.moveaxis(rotated(raw_keys, rope), 1, 2)
    rates = rope.inverse_frequencies()
    method = StreamingLLM(sinks, recent)
    _, attend = compiled()
    moved_matters = 0.0
    for last in (3, 23, 24, 25, 26, 100, 350, 600, 624, 678):
        lengths = np.array([last, max(last - 19, 1), last + 1], np.int32)
        step = Step(
            jnp.asarray(lengths),
            jnp.zeros(batch, jnp.int32),
            jnp.ones(batch, jnp.bool_),
            jnp.broadcast_to(jnp.asarray(rates)[None], (batch, rates.size)),
        )
        now = q[jnp.arange(batch), jnp.asarray(lengths) - 1]
        out, _, report = attend(method, (), now, keys, jnp.asarray(values), step)
        absolute, _, _ = attend(
            StreamingLLM(sinks, recent, "absolute"), (), now, keys, jnp.asarray(values), step
        )
        for row, length in enumerate(lengths):
            want = oracle.streaming_cached(
                raw_q[row, length - 1].astype(np.float64),
                raw_keys[row, :length].swapaxes(0, 1).astype(np.float64),
                values[row, :, :length].astype(np.float64),
                sinks,
                recent,
                rates.astype(np.float64),
                rope.scale,
            )
            support = np.asarray(report.support[row])
            assert [tuple(s[s >= 0].tolist()) for s in support] == want.supports
            norms = (
                np.linalg.norm(raw_q[row, length - 1], axis=-1).max()
                * np.linalg.norm(raw_keys[row, :length], axis=-1).max()
                * rope.scale**2
            )
            # Two angles of at most `length` radians, each rounded once, and 4 rotations of 4u.
            extra = (2 * length + 16) * UNIT * norms / np.sqrt(DIM)
            bound = (2 * extra + (DIM + 2) * 2 * UNIT * norms / np.sqrt(DIM) + 100 * UNIT) * float(
                np.abs(values[row]).max()
            )
            np.testing.assert_allclose(out[row], want.output, rtol=0, atol=bound)
            moved_matters = max(
                moved_matters, float(np.abs(absolute[row] - out[row]).max()) / bound
            )
    assert moved_matters > 100, "the positions make no difference to this test"


def test_sinks_stay_at_their_distance_at_long_range() -> None:
    """At position 130,000 a float32 angle is off by 0.004 radians; the sinks' distance is not."""
    rope = rope_of("default")
    sinks, recent, position = 4, 12, 130_001
    rates = rope.inverse_frequencies()
    rng = np.random.default_rng(0)
    raw_q, raw_keys = rng.normal(size=(1, 1, 1, DIM)), rng.normal(size=(1, sinks, 1, DIM))
    raw_q, raw_keys = raw_q.astype(np.float32), raw_keys.astype(np.float32)
    row_rates = jnp.asarray(rates)[None]
    at = position_angles(jnp.array([[position]], jnp.int32), row_rates)
    q = rotate(jnp.asarray(raw_q), at)[:, 0]  # [1, 1, D]
    first = jnp.moveaxis(rotated(raw_keys, rope), 1, 2)  # [1, 1, sinks, D]
    step = Step(
        jnp.array([position + 1], jnp.int32),
        jnp.array([0], jnp.int32),
        jnp.array([True]),
        row_rates,
    )
    moved = StreamingLLM(sinks, recent)._moved_sinks(first, step)
    got = np.asarray(moved[0, 0], np.float64) @ np.asarray(q[0, 0], np.float64)
    query = oracle.rotate(raw_q[0, 0, 0].astype(np.float64), sinks + recent - 1, rates)
    for slot in range(sinks):
        want = oracle.rotate(raw_keys[0, slot, 0].astype(np.float64), slot, rates) @ query
        norms = np.linalg.norm(raw_q) * np.linalg.norm(raw_keys[0, slot])
        assert abs(got[slot] - want) < 100 * UNIT * norms


def test_bfloat16_cache() -> None:
    """Moving a key rounds it once more, by 2^-9 of its norm at most."""
    rope = rope_of("default")
    rng = np.random.default_rng(0)
    raw = rng.normal(size=(1, SLOTS, 1, DIM)).astype(np.float32)
    keys = jnp.moveaxis(rotated(raw, rope, jnp.bfloat16), 1, 2)
    lengths = jnp.array([SLOTS], jnp.int32)
    step = Step(
        lengths,
        jnp.array([0], jnp.int32),
        jnp.array([True]),
        jnp.asarray(rope.inverse_frequencies())[None],
    )
    moved = StreamingLLM(4, 8)._moved_sinks(keys, step)
    assert moved.dtype == jnp.bfloat16
    for slot in range(4):
        key = np.asarray(keys[0, 0, slot], np.float64)
        want = oracle.rotate(key, SLOTS - 12, rope.inverse_frequencies())
        error = np.linalg.norm(np.asarray(moved[0, 0, slot], np.float64) - want)
        assert error < 2.0**-8 * np.linalg.norm(key)


def test_needs_the_frequencies() -> None:
    step = Step(jnp.array([20], jnp.int32), jnp.array([0], jnp.int32), jnp.array([True]))
    keys = jnp.zeros((1, 1, SLOTS, 16))
    with pytest.raises(ValueError, match="inverse_frequencies"):
        StreamingLLM(4, 8).attend(0, (), jnp.zeros((1, 2, 16)), keys, keys, step)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sinks": -1}, "sinks=-1"),
        ({"recent": 0}, "recent=0.*>= 1"),
        ({"position_mode": "true"}, "position_mode='true'.*cache_relative, absolute"),
    ],
)
def test_refuses(settings: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StreamingLLM(**settings)


def test_defaults_are_the_matched_setting() -> None:
    method = StreamingLLM()
    assert (method.sinks, method.recent, method.budget) == (64, 448, 512)
    assert method.position_mode == "cache_relative"
