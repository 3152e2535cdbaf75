"""One decode step of StreamingLLM, Quest, SparQ, Loki and TokenSelect, in float64 NumPy.

Written from the methods' descriptions alone, one row of a batch and one layer at a time, sharing no
code with the package. Every step sees the queries ``[H, D]`` and the valid keys and values
``[G, L, D]``, the current token's last; query head h reads KV head h // (H / G); ties go to the
lower token, page or component.

A selection ranked by a rounded number (a softmax, a projection) also gives its margin: the least
distance between a number that was taken and one that was left, relative to the larger. Where a
margin is below the rounding of float32, no implementation could be asked for the same selection.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Support = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Step:
    supports: list[Support]  # per query head, ascending
    output: Array  # [H, D]
    margin: float = np.inf


def softmax(scores: Array) -> Array:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def largest(numbers: Array, count: int) -> Support:
    """Indices of the `count` largest, ties to the lower index; ascending."""
    order = sorted(range(len(numbers)), key=lambda index: (-numbers[index], index))
    return tuple(sorted(order[: max(count, 0)]))


def margin_of(numbers: Array, taken: Support) -> float:
    left = sorted(set(range(len(numbers))) - set(taken))
    if not taken or not left:
        return np.inf
    lowest, highest = numbers[list(taken)].min(), numbers[left].max()
    return float((lowest - highest) / max(abs(lowest), abs(highest), 1e-300))


def attend(query: Array, keys: Array, values: Array, support: Support) -> Array:
    """Softmax attention of one head over a support."""
    chosen = list(support)
    return softmax(keys[chosen] @ query / np.sqrt(query.size)) @ values[chosen]


def attend_all(q: Array, keys: Array, values: Array, supports: list[Support]) -> Array:
    group = len(q) // len(keys)
    return np.stack(
        [
            attend(q[h], keys[h // group], values[h // group], support)
            for h, support in enumerate(supports)
        ]
    )


def full(q: Array, keys: Array, values: Array) -> Array:
    return attend_all(q, keys, values, [tuple(range(keys.shape[1]))] * len(q))


def exact_top_k(q: Array, keys: Array, values: Array, budget: int) -> Step:
    group = len(q) // len(keys)
    scores = [keys[h // group] @ q[h] for h in range(len(q))]
    supports = [largest(score, budget) for score in scores]
    margin = min(margin_of(s, t) for s, t in zip(scores, supports, strict=True))
    return Step(supports, attend_all(q, keys, values, supports), margin)


# ---- StreamingLLM ---------------------------------------------------------------------------


def streaming_support(length: int, sinks: int, recent: int) -> Support:
    kept = list(range(length))
    return tuple(kept if length <= sinks + recent else kept[:sinks] + kept[length - recent :])


def streaming_absolute(q: Array, keys: Array, values: Array, sinks: int, recent: int) -> Step:
    """Keys and queries carry their true positions."""
    support = streaming_support(keys.shape[1], sinks, recent)
    supports = [support] * len(q)
    return Step(supports, attend_all(q, keys, values, supports))


def rotate(vector: Array, position: int, frequencies: Array, scale: float = 1.0) -> Array:
    """Rotates the pairs (i, i + D/2) of a vector to a position."""
    half = vector.size // 2
    a, b = vector[:half], vector[half:]
    angle = position * frequencies
    cos, sin = np.cos(angle) * scale, np.sin(angle) * scale
    return np.concatenate([a * cos - b * sin, b * cos + a * sin])


def streaming_cached(
    raw_q: Array,
    raw_keys: Array,
    values: Array,
    sinks: int,
    recent: int,
    frequencies: Array,
    scale: float = 1.0,
) -> Step:
    """Keys before RoPE, rotated to their slots in the cache; the query stands at the last slot."""
    support = streaming_support(raw_keys.shape[1], sinks, recent)
    slots = len(support)
    keys = np.stack(
        [
            [rotate(head[token], slot, frequencies, scale) for slot, token in enumerate(support)]
            for head in raw_keys
        ]
    )
    q = np.stack([rotate(vector, slots - 1, frequencies, scale) for vector in raw_q])
    kept = values[:, list(support)]
    return Step([support] * len(q), full(q, keys, kept))


# ---- Quest ----------------------------------------------------------------------------------


def page_bounds(query: Array, keys: Array, page: int) -> Array:
    """Upper bound of query · key in every page of one KV head's keys [L, D]."""
    bounds = []
    for start in range(0, len(keys), page):
        low, high = keys[start : start + page].min(axis=0), keys[start : start + page].max(axis=0)
        bounds.append(np.sum(np.maximum(query * high, query * low)))
    return np.array(bounds)


def quest(
    q: Array,
    keys: Array,
    values: Array,
    *,
    budget: int,
    page: int,
    last_page: str = "always",
    select_per: str = "query_head",
    dense: bool = False,
) -> Step:
    length, groups = keys.shape[1], len(keys)
    group = len(q) // groups
    everything = tuple(range(length))
    if dense:
        return Step([everything] * len(q), full(q, keys, values))
    if select_per == "query_head":
        bounds = [page_bounds(q[h], keys[h // group], page) for h in range(len(q))]
    else:
        means = q.reshape(groups, group, -1).mean(axis=1)
        shared = [page_bounds(mean, head, page) for mean, head in zip(means, keys, strict=True)]
        if select_per == "layer":
            shared = [np.sum(shared, axis=0)] * groups
        bounds = [shared[h // group] for h in range(len(q))]
    supports = []
    margin = np.inf
    for bound in bounds:
        if last_page == "always":
            chosen = largest(bound[:-1], budget // page - 1)
            margin = min(margin, margin_of(bound[:-1], chosen))
            chosen = (*chosen, len(bound) - 1)
        else:
            chosen = largest(bound, budget // page)
            margin = min(margin, margin_of(bound, chosen))
        supports.append(tuple(token for token in everything if token // page in chosen))
    return Step(supports, attend_all(q, keys, values, supports), margin)


# ---- SparQ ----------------------------------------------------------------------------------


def sparq(
    q: Array,
    keys: Array,
    values: Array,
    *,
    budget: int,
    components: int,
    local: int,
    reallocate: bool = True,
) -> Step:
    length, dims = keys.shape[1:]
    group = len(q) // len(keys)
    supports, outputs, margin = [], [], np.inf
    for c, (head_keys, head_values) in enumerate(zip(keys, values, strict=True)):
        members = q[c * group : (c + 1) * group]
        chosen = list(largest(np.abs(members).sum(axis=0), components))
        mass = []
        for query in members:
            share = np.abs(query[chosen]).sum() / np.abs(query).sum()
            mass.append(softmax(head_keys[:, chosen] @ query[chosen] / np.sqrt(dims * share)))
        total = np.sum(mass, axis=0)
        # The local tokens, the current one among them, are chosen first; the rest compete.
        forced = range(max(0, length - max(local, 1)), length)
        others = [token for token in range(length) if token not in forced]
        picked = largest(total[others], budget - len(forced))
        margin = min(margin, margin_of(total[others], picked))
        support = tuple(sorted([*(others[i] for i in picked), *forced]))
        for query, a in zip(members, mass, strict=True):
            y = attend(query, head_keys, head_values, support)
            if reallocate:
                alpha = a[list(support)].sum()
                y = alpha * y + (1 - alpha) * head_values.mean(axis=0)
            supports.append(support)
            outputs.append(y)
    return Step(supports, np.stack(outputs), margin)


# ---- Loki -----------------------------------------------------------------------------------


def loki(q: Array, keys: Array, values: Array, *, budget: int, rank: int, basis: Array) -> Step:
    """`basis` [G, D, D] holds a component a column, the most important first."""
    group = len(q) // len(keys)
    supports, margin = [], np.inf
    for h, query in enumerate(q):
        c = h // group
        scores = (keys[c] @ basis[c])[:, :rank] @ (query @ basis[c])[:rank]
        supports.append(largest(scores, budget))
        margin = min(margin, margin_of(scores, supports[-1]))
    return Step(supports, attend_all(q, keys, values, supports), margin)


# ---- TokenSelect ----------------------------------------------------------------------------


class TokenSelect:
    """Remembers the query of the last selection, and what it chose."""

    def __init__(self, *, initial: int, selected: int, local: int, theta: float) -> None:
        self.initial, self.selected, self.local, self.theta = initial, selected, local, theta
        self.query: Array | None = None
        self.chosen: Support = ()
        self.selections = self.hits = 0

    def step(self, q: Array, keys: Array, values: Array) -> tuple[Step, str, float]:
        """The step, "all", "hit" or "selected", and the cosine with the remembered query."""
        length = keys.shape[1]
        group = len(q) // len(keys)
        if self.initial + self.selected + self.local >= length:
            supports = [tuple(range(length))] * len(q)
            return Step(supports, attend_all(q, keys, values, supports)), "all", np.nan
        flat = q.ravel()
        cosine, margin = np.nan, np.inf
        if self.query is not None:
            norms = np.linalg.norm(flat) * np.linalg.norm(self.query)
            cosine = float(flat @ self.query / norms)
        if self.query is None or cosine < self.theta:
            middle = slice(self.initial, length - self.local)
            votes = np.sum(
                [softmax(keys[h // group, middle] @ query) for h, query in enumerate(q)], axis=0
            )
            best = largest(votes, self.selected)
            margin = margin_of(votes, best)
            self.query, self.chosen = flat, tuple(self.initial + i for i in best)
            self.selections += 1
            how = "selected"
        else:
            self.hits += 1
            how = "hit"
        support = (
            *range(self.initial),
            *self.chosen,
            *range(length - self.local, length),
        )
        supports = [support] * len(q)
        return Step(supports, attend_all(q, keys, values, supports), margin), how, cosine
