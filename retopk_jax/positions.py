"""The ops of attention over keys that may be sharded by position.

Without such a mesh they are those of `pallas_kernels`. With one, every device works on its block of
positions: supports are merged from each one's top-K, scores come from where the keys live, and
outputs are summed. Queries, supports and scores are the same on all devices of the axis.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import exact_attention as exact_attention_op
from pallas_kernels import exact_support as exact_op
from pallas_kernels import full_attention as full_op
from pallas_kernels import prefill_supports as prefill_op
from pallas_kernels import retopk_step as step_op
from pallas_kernels import sparse_attend as sparse_op
from pallas_kernels import support_scores as scores_op
from pallas_kernels.candidates.reference import union
from pallas_kernels.exact_support.reference import all_scores
from pallas_kernels.numerics import PAD, gather_rows
from pallas_kernels.recall import recall
from pallas_kernels.retopk_step import Remembered, ReTopKStep
from pallas_kernels.retopk_step.reference import newest_slots
from pallas_kernels.retopk_step.types import FALLBACK, REFRESH, REUSE
from pallas_kernels.select import select
from retopk_jax.sharding import SEQUENCE, place_of, ways


def _local(keys: jax.Array, tokens: jax.Array) -> jax.Array:
    """Tokens by their slot on this device, PAD where another has them."""
    slots = keys.shape[2]
    local = tokens - place_of(SEQUENCE, slots)
    return jnp.where((tokens >= 0) & (local >= 0) & (local < slots), local, PAD)


def _local_lengths(keys: jax.Array, lengths: jax.Array) -> jax.Array:
    """Valid tokens on this device."""
    slots = keys.shape[2]
    return jnp.clip(lengths - place_of(SEQUENCE, slots), 0, slots).astype(jnp.int32)


def _merge(
    keys: jax.Array, support: jax.Array, scores: jax.Array, budget: int
) -> tuple[jax.Array, jax.Array]:
    """The K best of every device's own supports, ``[B, H, K]`` by slots on it."""
    tokens = jnp.where(support != PAD, support + place_of(SEQUENCE, keys.shape[2]), PAD)
    both = jnp.stack([tokens, lax.bitcast_convert_type(scores, jnp.int32)])  # one collective
    both = lax.all_gather(both, SEQUENCE, axis=3, tiled=True)  # in the order of positions
    return select(both[0], lax.bitcast_convert_type(both[1], jnp.float32), budget=budget)


def full_attention(
    q: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array
) -> jax.Array:
    """See `pallas_kernels.full_attention.full_attention`."""
    if ways(SEQUENCE) == 1:
        return full_op.full_attention(q, keys, values, lengths)
    batch, heads, dim = q.shape
    groups, slots = keys.shape[1:3]
    scores = all_scores(q, keys, _local_lengths(keys, lengths))  # [B, H, S]
    best = lax.pmax(jnp.max(scores, axis=-1), SEQUENCE)
    weights = jnp.exp(scores - jnp.where(best > -jnp.inf, best, 0.0)[..., None])
    out = jnp.einsum(
        "bgqs,bgsd->bgqd",
        weights.reshape(batch, groups, heads // groups, slots).astype(values.dtype),
        values,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    ).reshape(batch, heads, dim)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    both = lax.psum(jnp.concatenate([out, total], axis=-1), SEQUENCE)
    out, total = both[..., :dim], both[..., dim:]
    return (out / jnp.where(total > 0, total, 1.0)).astype(values.dtype)


def exact_support(
    q: jax.Array, keys: jax.Array, lengths: jax.Array, wanted: jax.Array, *, budget: int
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.exact_support.exact_support`."""
    if ways(SEQUENCE) == 1:
        return exact_op.exact_support(q, keys, lengths, wanted, budget=budget)
    local = exact_op.exact_support(q, keys, _local_lengths(keys, lengths), wanted, budget=budget)
    return _merge(keys, *local, budget)


def exact_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array,
    wanted: jax.Array,
    *,
    budget: int,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.exact_attention.exact_attention`."""
    if ways(SEQUENCE) == 1:
        op = exact_attention_op.exact_attention
        return op(q, keys, values, lengths, wanted, budget=budget)
    support, scores = exact_support(q, keys, lengths, wanted, budget=budget)
    return sparse_attend(values, support, scores), support


def support_scores(q: jax.Array, keys: jax.Array, support: jax.Array) -> jax.Array:
    """See `pallas_kernels.support_scores.support_scores`."""
    if ways(SEQUENCE) == 1:
        return scores_op.support_scores(q, keys, support)
    return lax.pmax(scores_op.support_scores(q, keys, _local(keys, support)), SEQUENCE)


def sparse_attend(values: jax.Array, support: jax.Array, scores: jax.Array) -> jax.Array:
    """See `pallas_kernels.sparse_attend.sparse_attend`."""
    if ways(SEQUENCE) == 1:
        return sparse_op.sparse_attend(values, support, scores)
    best = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(best > -jnp.inf, best, 0.0))  # [B, H, K]
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    local = _local(values, support)
    rows = jnp.where((local != PAD)[..., None], gather_rows(values, local), 0)  # [B, H, K, D]
    out = jnp.einsum(
        "bhk,bhkd->bhd", weights, rows.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    return lax.psum(out, SEQUENCE).astype(values.dtype)


def prefill_supports(
    queries: jax.Array, keys: jax.Array, positions: jax.Array, *, budget: int
) -> jax.Array:
    """See `pallas_kernels.prefill_supports.prefill_supports`."""
    if ways(SEQUENCE) == 1:
        return prefill_op.prefill_supports(queries, keys, positions, budget=budget)
    batch, heads, count, _ = queries.shape
    wanted = jnp.ones((batch, heads), jnp.bool_)

    def one(query: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        q, position = query  # [B, H, D], [B]
        lengths = _local_lengths(keys, position + 1)
        return exact_op.exact_support(q, keys, lengths, wanted, budget=budget)

    found = lax.map(one, (jnp.moveaxis(queries, 2, 0), jnp.moveaxis(positions, 1, 0)))
    support, scores = (jnp.moveaxis(x, 0, 2).reshape(batch, -1, budget) for x in found)
    return _merge(keys, support, scores, budget)[0].reshape(batch, heads, count, budget)


def retopk_step(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    remembered: Remembered,
    lengths: jax.Array,
    refresh_due: jax.Array,
    active: jax.Array,
    tau: float | jax.Array,
    *,
    entries: int,
    window: int,
    by_recency: bool = False,
) -> ReTopKStep:
    """See `pallas_kernels.retopk_step.retopk_step`."""
    if ways(SEQUENCE) == 1:
        return step_op.retopk_step(
            q,
            keys,
            values,
            remembered,
            lengths,
            refresh_due,
            active,
            tau,
            entries=entries,
            window=window,
            by_recency=by_recency,
        )
    queries, supports, pushed, paths, candidate_total, signals = remembered
    capacity, budget = supports.shape[2:]
    tau = jnp.broadcast_to(jnp.asarray(tau, jnp.float32), q.shape[:2])
    found = recall(q, queries, pushed, entries=entries)
    similar = (found.rho_max >= tau) & (found.rho_max > -jnp.inf)
    path = jnp.where(refresh_due[:, None], REFRESH, jnp.where(similar, REUSE, FALLBACK))
    path = path.astype(jnp.int32)
    counted = active[:, None]
    slots = newest_slots(pushed, capacity, found.slots.shape) if by_recency else found.slots
    ids, unique = union(supports, slots, lengths, window=window)
    support, scores = select(ids, support_scores(q, keys, ids), budget=budget)
    wanted = (path != REUSE) & counted
    exact, exact_scores = exact_support(q, keys, lengths, wanted, budget=budget)
    support = jnp.where(wanted[..., None], exact, support)
    scores = jnp.where(wanted[..., None], exact_scores, scores)
    support = jnp.where(counted[..., None], support, PAD)
    scores = jnp.where(counted[..., None], scores, -jnp.inf)
    # As in the op's reference: the ring is written once it has been read, in place.
    qbar, support = lax.optimization_barrier((found.qbar, support))
    rows = jnp.arange(pushed.shape[0])
    slot = jnp.where(active, pushed % capacity, capacity)  # capacity: dropped
    unique = jnp.where((path == REUSE) & counted, unique, 0)
    taken = (path[..., None] == jnp.arange(3)[None, None]) & counted[..., None]
    return ReTopKStep(
        sparse_attend(values, support, scores),
        Remembered(
            queries.at[rows, :, slot].set(qbar.astype(queries.dtype), mode="drop"),
            supports.at[rows, :, slot].set(support, mode="drop"),
            pushed + active.astype(jnp.int32),
            paths + taken.astype(jnp.int32),
            candidate_total + unique,
            signals,
        ),
        support,
        path,
        found.rho_max,
        unique,
    )
