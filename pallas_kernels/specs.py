"""Named arguments of the ops, for tests and benchmarks.

Queries and keys are small multiples of a power of two, so that every order of summation gives the
same float32 scores and supports must be equal, not nearly so.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.retopk_step import Remembered


@dataclass(frozen=True)
class Shape:
    """Sizes of a problem, by their letters, and the dtype of the cache."""

    b: int = 2
    h: int = 4
    g: int = 2
    d: int = 16
    s: int = 96
    k: int = 16
    c: int = 4
    r: int = 3
    w: int = 5
    dtype: Any = jnp.float32


@dataclass(frozen=True)
class Spec:
    """Arguments of one call of an op.

    Attributes:
        op: name of the op.
        name: of these arguments.
        args: positional arguments.
        kwargs: keyword arguments.
    """

    op: str
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def _grid(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.asarray(rng.integers(-4, 5, shape) / 4.0, dtype)


def supports_of(
    rng: np.random.Generator, shape: Shape, lengths: np.ndarray, kind: str
) -> jax.Array:
    """Recalled supports ``[B, H, C, K]`` below the lengths, ascending with −1 last.

    Args:
        rng: source of randomness.
        shape: sizes.
        lengths: ``[B]``.
        kind: ``mixed`` (overlapping, some short), ``same`` in all entries, ``disjoint`` where the
            length allows, or ``empty``.
    """
    out = np.full((shape.b, shape.h, shape.c, shape.k), -1, np.int32)
    for b, h, c in np.ndindex(shape.b, shape.h, shape.c):
        known = int(lengths[b]) - 1
        own = np.random.default_rng((b, h)) if kind == "same" else rng
        number = max(0, min(shape.k, known) - (3 if kind == "mixed" and c == 1 else 0))
        tokens = np.arange(max(known, 0))
        if kind == "disjoint":
            tokens = tokens[c :: shape.c]
        number = 0 if kind == "empty" else min(number, len(tokens))
        out[b, h, c, :number] = np.sort(own.choice(tokens, number, replace=False))
    return jnp.asarray(out)


def problem(
    shape: Shape,
    lengths: tuple[int, ...],
    *,
    keys: str = "grid",
    supports: str = "mixed",
    bad: str = "",
    one_query: bool = False,
) -> dict[str, Any]:
    """Everything that a ReTopK step takes.

    Args:
        shape: sizes.
        lengths: valid tokens of every row.
        keys: ``grid``; ``equal`` (every key the same); ``twins`` (pairs of keys the same);
            ``close`` (pairs of keys one bfloat16 step apart).
        supports: see `supports_of`.
        bad: ``keys``, ``values`` or ``queries`` of which some are NaN, infinite or zero.
        one_query: whether all remembered queries of a head are the same.
    """
    rng = np.random.default_rng(0)
    cache = (shape.b, shape.g, shape.s, shape.d)
    k, v = _grid(rng, cache, shape.dtype), _grid(rng, cache, shape.dtype)
    if keys == "equal":
        k = jnp.broadcast_to(k[:, :, :1], cache)
    elif keys in ("twins", "close"):
        k = k.at[:, :, 1::2].set(k[:, :, : shape.s // 2 * 2 : 2])
        if keys == "close":
            k = k.at[:, :, 1::2, 0].add(jnp.asarray(2.0**-8, shape.dtype))
    if bad == "values":
        v = v.at[:, :, 0].set(jnp.nan).at[:, :, 9].set(jnp.inf)  # row 0 is what padding reads
    elif bad == "keys":
        k = k.at[:, :, 3].set(jnp.nan).at[:, :, 5, 0].set(jnp.inf).at[:, :, 8, 1].set(-jnp.inf)
    counts = np.asarray(lengths, np.int32)
    ring = rng.standard_normal((shape.b, shape.h, shape.c, shape.d)).astype(np.float32)
    ring /= np.linalg.norm(ring, axis=-1, keepdims=True)
    q = np.array(_grid(rng, (shape.b, shape.h, shape.d), jnp.float32))
    q[..., 0] = 1.0  # never zero
    pushed = np.asarray([2 * shape.c + 1, 2, *[shape.c] * shape.b][: shape.b], np.int32)
    similar = rng.random((shape.b, shape.h)) < 0.6
    ring[:, :, 1] = np.where(
        similar[..., None], q / np.linalg.norm(q, axis=-1, keepdims=True), ring[:, :, 1]
    )
    if one_query:
        ring = np.broadcast_to(ring[:, :, 1:2], ring.shape)
    if bad == "queries":
        q[0, 0], q[0, 1, 3], q[-1, 2, 0] = 0.0, np.nan, np.inf
    return {
        "q": jnp.asarray(q, shape.dtype),
        "keys": k,
        "values": v,
        "lengths": jnp.asarray(counts),
        "remembered": Remembered.of(
            jnp.asarray(ring, shape.dtype),
            supports_of(rng, shape, counts, supports),
            jnp.asarray(pushed),
        ),
        "slots": jnp.asarray(
            np.stack([rng.permutation(shape.c)[: shape.r] for _ in range(shape.b * shape.h)])
            .reshape(shape.b, shape.h, shape.r)
            .astype(np.int32)
        ),
        "wanted": jnp.asarray(rng.random((shape.b, shape.h)) < 0.5),
    }


def _ranking(shape: Shape, lengths: jax.Array, name: str) -> jax.Array:
    """Scores ``[B, H, S]`` with ties, −inf beyond the lengths, and what the name says."""
    rng = np.random.default_rng(1)
    scores = rng.integers(-6, 7, (shape.b, shape.h, shape.s)).astype(np.float32) / 4.0
    scores[np.arange(shape.s) >= np.asarray(lengths)[:, None, None].repeat(shape.h, 1)] = -np.inf
    last = shape.s - 1
    if name == "equal_scores":
        scores[scores > -np.inf] = 0.5
    elif name == "few_finite":
        scores[rng.random(scores.shape) < 1.0 - 0.5 * shape.k / shape.s] = -np.inf
    elif name == "none_finite":
        scores[:] = -np.inf
    elif name == "some_forced":  # as methods force the last tokens
        scores[..., last - shape.k // 4 : last] = np.inf
    elif name == "only_forced":
        scores[:] = -np.inf
        scores[..., 1] = scores[..., last] = np.inf
    elif name == "many_forced":
        scores[..., 1 : last - 1 : 2] = np.inf
    elif name == "close_scores":
        scores = np.nextafter(np.float32(1.0), np.where(scores > 0, np.float32(2.0), 1.0)) - 0.0
    elif name == "skewed":
        scores = np.exp(rng.standard_normal(scores.shape) * 20.0)
    return jnp.asarray(scores, jnp.float32)


def _of_op(op: str, name: str, shape: Shape, p: dict[str, Any]) -> Spec:
    remembered: Remembered = p["remembered"]
    no = jnp.zeros((shape.b,), jnp.bool_)
    rng = np.random.default_rng(1)
    if op == "recall":
        args = (p["q"], remembered.queries, remembered.pushed)
        return Spec(op, name, args, {"entries": shape.r})
    if op == "candidates":
        args = (p["q"], p["keys"], remembered.supports, p["slots"], p["lengths"])
        return Spec(op, name, args, {"window": shape.w})
    if op == "select":
        n = shape.r * shape.k + shape.w
        ids = np.sort(
            np.stack([rng.permutation(4 * n)[:n] for _ in range(shape.b * shape.h)]), axis=-1
        )
        scores = rng.integers(-6, 7, ids.shape).astype(np.float32)
        scores[rng.random(ids.shape) < 0.4] = -np.inf
        full = (shape.b, shape.h, n)
        args = (jnp.asarray(ids.reshape(full), jnp.int32), jnp.asarray(scores.reshape(full)))
        return Spec(op, name, args, {"budget": shape.k})
    if op == "top_k":
        return Spec(op, name, (_ranking(shape, p["lengths"], name),), {"budget": shape.k})
    if op == "support_scores":
        return Spec(op, name, (p["q"], p["keys"], remembered.supports[:, :, 1]), {})
    if op == "sparse_attend":
        support = remembered.supports[:, :, 0]
        scores = jnp.asarray(rng.standard_normal(support.shape), jnp.float32)
        scores = jnp.where(support >= 0, scores, -jnp.inf)
        return Spec(op, name, (p["values"], support, scores), {})
    if op == "exact_support":
        args = (p["q"], p["keys"], p["lengths"], p["wanted"])
        return Spec(op, name, args, {"budget": shape.k})
    if op == "exact_attention":
        args = (p["q"], p["keys"], p["values"], p["lengths"], p["wanted"])
        return Spec(op, name, args, {"budget": shape.k})
    if op == "full_attention":
        return Spec(op, name, (p["q"], p["keys"], p["values"], p["lengths"]), {})
    if op == "prefill_supports":
        queries = _grid(rng, (shape.b, shape.h, shape.c, shape.d), shape.dtype)
        positions = p["lengths"][:, None] - shape.c + jnp.arange(shape.c, dtype=jnp.int32)[None]
        return Spec(op, name, (queries, p["keys"], positions), {"budget": shape.k})
    args = (
        p["q"],
        p["keys"],
        p["values"],
        remembered,
        p["lengths"],
        no.at[-1].set(name == "refresh"),
        ~no.at[0].set(name in ("ended", "boundary_0_capacity")),
        jnp.float32(0.85),
    )
    return Spec("retopk_step", name, args, {"entries": shape.r, "window": shape.w})


OPS = (
    "recall",
    "candidates",
    "select",
    "top_k",
    "support_scores",
    "sparse_attend",
    "exact_support",
    "exact_attention",
    "full_attention",
    "prefill_supports",
    "retopk_step",
)

_SMALL = Shape()
_PROBLEMS: dict[str, Callable[[], tuple[Shape, dict[str, Any]]]] = {
    "ragged": lambda: (_SMALL, problem(_SMALL, (90, 23))),
    "boundary_0_capacity": lambda: (_SMALL, problem(_SMALL, (0, 96))),
    "boundary_1_k": lambda: (_SMALL, problem(_SMALL, (1, 16))),
    "boundary_k-1_k+1": lambda: (_SMALL, problem(_SMALL, (15, 17))),
    "boundary_w-1_w+1": lambda: (_SMALL, problem(_SMALL, (4, 6))),
    "equal_keys": lambda: (_SMALL, problem(_SMALL, (90, 23), keys="equal")),
    "close_keys": lambda: (_SMALL, problem(_SMALL, (90, 23), keys="close")),
    "twin_keys": lambda: (_SMALL, problem(_SMALL, (90, 23), keys="twins")),
    "bad_keys": lambda: (_SMALL, problem(_SMALL, (90, 23), bad="keys")),
    "bad_queries": lambda: (_SMALL, problem(_SMALL, (90, 23), bad="queries")),
    "same_supports": lambda: (_SMALL, problem(_SMALL, (90, 23), supports="same")),
    "disjoint_supports": lambda: (_SMALL, problem(_SMALL, (90, 23), supports="disjoint")),
    "empty_supports": lambda: (_SMALL, problem(_SMALL, (90, 23), supports="empty")),
}
_ONLY_STEP = {
    "ended": lambda: (_SMALL, problem(_SMALL, (90, 23))),
    "refresh": lambda: (_SMALL, problem(_SMALL, (90, 23))),
    "window_covers_all": lambda: ((s := Shape(w=40)), problem(s, (30, 23))),
    "no_window": lambda: ((s := Shape(w=0)), problem(s, (90, 23))),
    "one_group_odd_sizes": lambda: (
        (s := Shape(b=1, h=3, g=1, d=80, s=77, k=12, c=5, r=2, w=3, dtype=jnp.bfloat16)),
        problem(s, (70,)),
    ),
    "float16": lambda: ((s := Shape(b=1, dtype=jnp.float16)), problem(s, (90,))),
    "bad_values": lambda: (_SMALL, problem(_SMALL, (90, 23), bad="values")),
    "same_queries": lambda: (_SMALL, problem(_SMALL, (90, 23), one_query=True)),
    "one_head_each": lambda: ((s := Shape(b=1, h=2)), problem(s, (90,))),
    "five_heads_each": lambda: (
        (s := Shape(b=1, h=5, g=1, dtype=jnp.bfloat16)),
        problem(s, (90,), keys="close"),
    ),
    "seven_heads_each": lambda: (
        (s := Shape(b=1, h=7, g=1, dtype=jnp.bfloat16)),
        problem(s, (90,), keys="twins"),
    ),
    "long_supports": lambda: ((s := Shape(b=1, h=2, g=1, s=200, k=40)), problem(s, (190,))),
    "eight_heads_each": lambda: ((s := Shape(b=1, h=8, g=1, w=0)), problem(s, (90,))),
    "three_rows_of_28": lambda: (
        (s := Shape(b=3, h=28, g=4, d=128, s=40, r=2)),
        problem(s, (37, 23, 5)),
    ),
}
_MANY_HEADS = {
    "three_rows_of_28": _ONLY_STEP["three_rows_of_28"],
    "forty_wide_heads": lambda: ((s := Shape(b=1, h=40, g=8, d=256, s=40)), problem(s, (37,))),
}
_ONLY_TOP_K = {
    name: lambda: (_SMALL, problem(_SMALL, (96, 23)))
    for name in (
        "equal_scores",
        "few_finite",
        "none_finite",
        "some_forced",
        "only_forced",
        "many_forced",
        "close_scores",
        "skewed",
    )
} | {
    "budget_above_stored": lambda: ((s := Shape(k=100)), problem(s, (96, 23))),
    "one_of_one": lambda: ((s := Shape(b=1, h=1, g=1, s=1, k=1)), problem(s, (1,))),
}


def spec(op: str, name: str) -> Spec:
    """The arguments of that name for an op."""
    shape, arguments = {**_PROBLEMS, **_ONLY_STEP, **_MANY_HEADS, **_ONLY_TOP_K}[name]()
    return _of_op(op, name, shape, arguments)


def names(op: str) -> list[str]:
    """Names that `spec` knows for an op."""
    relevant = {
        "recall": ("ragged", "boundary_1_k", "same_queries", "bad_queries"),
        "select": ("ragged",),
        "top_k": ("ragged", "boundary_k-1_k+1", *_ONLY_TOP_K),
        "support_scores": (
            "ragged",
            "empty_supports",
            "boundary_1_k",
            "bad_keys",
            "one_group_odd_sizes",
            "float16",
        ),
        "sparse_attend": ("ragged", "empty_supports", "boundary_1_k", "bad_values", *_MANY_HEADS),
        "full_attention": ("ragged", "bad_keys", "boundary_0_capacity", "boundary_1_k"),
        "prefill_supports": (
            "ragged",
            "equal_keys",
            "twin_keys",
            "bad_keys",
            "boundary_0_capacity",
            "boundary_1_k",
        ),
    }
    if op == "retopk_step":
        return [*_PROBLEMS, *_ONLY_STEP]
    if op == "candidates":
        return [*_PROBLEMS, "long_supports"]
    return list(relevant.get(op, _PROBLEMS))
