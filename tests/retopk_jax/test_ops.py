"""The ops' public functions, with and without jit: what they return, and what they refuse."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from pallas_kernels.candidates import candidates
from pallas_kernels.exact_support import exact_support
from pallas_kernels.full_attention import full_attention
from pallas_kernels.prefill_supports import prefill_supports
from pallas_kernels.recall import recall
from pallas_kernels.select import select
from pallas_kernels.sparse_attend import sparse_attend
from tests.oracle import decode_step as oracle

B, H, G, S, D, C, K = 2, 4, 2, 24, 16, 5, 6
RNG = np.random.default_rng(3)
Q = jnp.asarray(RNG.integers(-2, 3, (B, H, D)), jnp.float32)
KEYS, VALUES = (jnp.asarray(RNG.integers(-2, 3, (B, G, S, D)), jnp.float32) for _ in range(2))
LENGTHS = jnp.array([S, 9], jnp.int32)
WANTED = jnp.array([[True, False, True, True], [False, False, True, False]])
RING = jnp.asarray(RNG.normal(size=(B, H, C, D)), jnp.float32)
SUPPORTS = jnp.sort(
    jnp.asarray(np.stack([RNG.permutation(9)[:K] for _ in range(B * H * C)]), jnp.int32)
).reshape(B, H, C, K)
SLOTS = jnp.array([[[0, 3]] * H, [[2, -1]] * H], jnp.int32)
PUSHED = jnp.array([7, 2], jnp.int32)
IDS = jnp.broadcast_to(jnp.arange(10, dtype=jnp.int32), (B, H, 10))
SCORES = jnp.asarray(RNG.integers(-2, 3, (B, H, 10)), jnp.float32)

variants: Any = chex.variants  # typed as an object


def exact(b: int, h: int, length: int) -> tuple[int, ...]:
    return oracle.top(
        np.asarray(Q[b, h], np.float64),
        np.asarray(KEYS[b, h // 2], np.float64),
        list(range(length)),
        K,
    )


def pad(tokens: tuple[int, ...]) -> list[int]:
    return [*tokens, *[-1] * (K - len(tokens))]


class OpTest(chex.TestCase, parameterized.TestCase):
    @variants(with_jit=True, without_jit=True)
    def test_exact_support_of_the_wanted_heads(self) -> None:
        run = self.variant(exact_support, static_argnames=("budget",))
        support, scores = run(Q, KEYS, LENGTHS, WANTED, budget=K)
        chex.assert_shape([support, scores], (B, H, K))
        for b in range(B):
            for h in range(H):
                wanted = exact(b, h, int(LENGTHS[b])) if WANTED[b, h] else ()
                assert support[b, h].tolist() == pad(wanted)
        np.testing.assert_array_equal(scores > -jnp.inf, support >= 0)

    @variants(with_jit=True, without_jit=True)
    def test_candidates_are_the_union_scored(self) -> None:
        run = self.variant(candidates, static_argnames=("window",))
        found = run(Q, KEYS, SUPPORTS, SLOTS, LENGTHS, window=3)
        for b in range(B):
            for h in range(H):
                slots = [int(slot) for slot in SLOTS[b, h] if slot >= 0]
                union = {int(t) for slot in slots for t in SUPPORTS[b, h, slot]}
                union |= set(range(int(LENGTHS[b]) - 3, int(LENGTHS[b])))
                ids = np.asarray(found.ids[b, h])
                assert ids[ids >= 0].tolist() == sorted(union)
                assert int(found.unique[b, h]) == len(union)
                want = np.asarray(KEYS[b, h // 2])[ids[ids >= 0]] @ np.asarray(Q[b, h]) / 4
                np.testing.assert_array_equal(found.scores[b, h][ids >= 0], want)

    @variants(with_jit=True, without_jit=True)
    def test_select_keeps_the_lower_of_equal_tokens(self) -> None:
        run = self.variant(select, static_argnames=("budget",))
        support, scores = run(IDS, SCORES, budget=K)
        for b in range(B):
            for h in range(H):
                best = sorted(range(10), key=lambda t: (-float(SCORES[b, h, t]), t))[:K]
                assert support[b, h].tolist() == sorted(best)
                np.testing.assert_array_equal(scores[b, h], SCORES[b, h][jnp.array(sorted(best))])

    @variants(with_jit=True, without_jit=True)
    def test_recall_prefers_the_newer_of_equals(self) -> None:
        """Zero vectors have similarity 0, or -0 by the signs of q: they tie all the same."""
        ring = jnp.zeros((1, 2, 4, D)).at[:, 0, 1].set(Q[0, 0] / jnp.linalg.norm(Q[0, 0]))
        run = self.variant(recall, static_argnames=("entries",))
        found = run(-Q[:1, :2], ring, jnp.array([6], jnp.int32), entries=4)
        # Pushes 5, 4, 3, 2 lie in slots 1, 0, 3, 2; head 0 has its opposite in slot 1.
        assert found.slots[0].tolist() == [[0, 3, 2, 1], [1, 0, 3, 2]]

    def test_zeros_of_either_sign_tie(self) -> None:
        orthogonal = jnp.zeros(D).at[0].set(1.0)
        q = jnp.zeros(D).at[1:].set(-1.0)
        ring = jnp.stack([orthogonal, jnp.zeros(D)])[None, None]
        found = recall(q[None, None], ring, jnp.array([2], jnp.int32), entries=2)
        assert found.slots[0, 0].tolist() == [1, 0]

    @variants(with_jit=True, without_jit=True)
    def test_prefill_supports_under_their_own_masks(self) -> None:
        positions = jnp.array([[3, 8, -1], [0, 23, 7]], jnp.int32)
        run = self.variant(prefill_supports, static_argnames=("budget",))
        supports = run(jnp.stack([Q] * 3, axis=2), KEYS, positions, budget=K)
        for b in range(B):
            for h in range(H):
                for c in range(3):
                    want = exact(b, h, int(positions[b, c]) + 1)
                    assert supports[b, h, c].tolist() == pad(want)

    @variants(with_jit=True, without_jit=True)
    def test_attention_over_a_support_and_over_all(self) -> None:
        support, scores = exact_support(Q, KEYS, LENGTHS, jnp.ones_like(WANTED), budget=S)
        sparse = self.variant(sparse_attend)(VALUES, support, scores)
        full = self.variant(full_attention)(Q, KEYS, VALUES, LENGTHS)
        # As in test_retopk_step: exact scores, so (16 + 2 * S + 3) u of the largest value, 2.
        bound = (19 + 2 * S) * 2.0**-24 * 2
        for b in range(B):
            for h in range(H):
                rows = (
                    np.asarray(x[b, h // 2, : int(LENGTHS[b])], np.float64) for x in (KEYS, VALUES)
                )
                want = oracle.full_step(np.asarray(Q[b, h], np.float64), *rows)
                np.testing.assert_allclose(sparse[b, h], want, rtol=0, atol=bound)
                np.testing.assert_allclose(full[b, h], want, rtol=0, atol=bound)


@pytest.mark.parametrize("seed", range(5))
def test_true_top_k_among_the_candidates_is_selected(seed: int) -> None:
    """Real-valued: gathered and scanned scores rank alike, so reuse equals exact."""
    rng = np.random.default_rng(seed)
    q = jnp.asarray(rng.normal(size=(B, H, D)), jnp.float32)
    keys = jnp.asarray(rng.normal(size=(B, G, S, D)), jnp.float32)
    best, _ = exact_support(q, keys, LENGTHS, jnp.ones_like(WANTED), budget=K)
    supports = SUPPORTS.at[:, :, 3].set(best).at[:, :, 2].set(best)
    found = candidates(q, keys, supports, SLOTS, LENGTHS, window=2)
    np.testing.assert_array_equal(select(found.ids, found.scores, budget=K)[0], best)


REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, int]]] = {
    "heads no multiple of groups": (
        exact_support,
        (Q[:, :3], KEYS, LENGTHS, WANTED),
        {"budget": K},
    ),
    "keys of another head dim": (exact_support, (Q, KEYS[..., :8], LENGTHS, WANTED), {"budget": K}),
    "lengths of another batch": (exact_support, (Q, KEYS, LENGTHS[:1], WANTED), {"budget": K}),
    "wanted that is no mask": (
        exact_support,
        (Q, KEYS, LENGTHS, WANTED.astype(jnp.int32)),
        {"budget": K},
    ),
    "no budget": (exact_support, (Q, KEYS, LENGTHS, WANTED), {"budget": 0}),
    "float lengths": (full_attention, (Q, KEYS, VALUES, LENGTHS.astype(jnp.float32)), {}),
    "values of another length": (full_attention, (Q, KEYS, VALUES[:, :, :3], LENGTHS), {}),
    "a negative window": (candidates, (Q, KEYS, SUPPORTS, SLOTS, LENGTHS), {"window": -1}),
    "supports of other heads": (
        candidates,
        (Q, KEYS, SUPPORTS[:, :2], SLOTS, LENGTHS),
        {"window": 1},
    ),
    "more entries than slots": (recall, (Q, RING, PUSHED), {"entries": C + 1}),
    "no entries": (recall, (Q, RING, PUSHED), {"entries": 0}),
    "a ring of other heads": (recall, (Q, RING[:, :2], PUSHED), {"entries": 1}),
    "scores of another shape": (select, (IDS, SCORES[..., :4]), {"budget": K}),
    "float ids": (select, (SCORES, SCORES), {"budget": K}),
    "positions of another count": (
        prefill_supports,
        (RING, KEYS, jnp.zeros((B, 2), jnp.int32)),
        {"budget": K},
    ),
    "a support of another shape": (sparse_attend, (VALUES, IDS, SCORES[..., :4]), {}),
    "values of another batch": (sparse_attend, (VALUES[:1], IDS, SCORES), {}),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("jitted", [False, True])
def test_wrong_shapes_and_types_are_refused(name: str, jitted: bool) -> None:
    op, args, sizes = REFUSED[name]
    run = jax.jit(op, static_argnames=tuple(sizes)) if jitted else op
    with pytest.raises((ValueError, AssertionError)):
        run(*args, **sizes)
