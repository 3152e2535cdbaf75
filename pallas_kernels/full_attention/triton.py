"""Full attention as two Triton kernels: stretches of keys in parallel, then their combination."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.triton_lib import (
    Array,
    Ref,
    call,
    check,
    finite_scores,
    load_at,
    round_up,
    store_at,
)


def full_attention(
    q: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array
) -> jax.Array:
    """See `pallas_kernels.full_attention.full_attention`."""
    batch, heads, dim = q.shape
    groups, stored = keys.shape[1:3]
    each = heads // groups
    check(dim <= 256 and each <= 16, "up to 256 dimensions, 16 query heads a key-value head")
    check(q.dtype == keys.dtype == values.dtype, "queries, keys and values of one dtype")
    rows, scans = batch * heads, batch * groups
    tile = min(64, max(16, 16384 // (round_up(dim) * keys.dtype.itemsize)))
    tiles = max(1, -(-stored // (tile * max(1, min(128, round_up(512 // scans))))))
    stretches = -(-stored // (tile * tiles))
    precision = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None  # no TF32

    def partial(
        q_ref: Ref,  # [BH, D]
        keys_ref: Ref,  # [BG, S, D]
        values_ref: Ref,  # [BG, S, D]
        lengths_ref: Ref,  # [B]
        out_ref: Ref,  # [BH, P, D]: weighted sums of P stretches
        best_ref: Ref,  # [BH, P]: their largest scores
        total_ref: Ref,  # [BH, P]: their sums of weights
    ) -> None:
        group, stretch = pl.program_id(0), pl.program_id(1)
        lane = lax.iota(jnp.int32, max(16, round_up(each)))
        row = group * each + lane
        d = lax.iota(jnp.int32, round_up(dim))
        length = lengths_ref[group // groups]
        mine = (lane < each)[:, None] & (d < dim)[None, :]
        q = load_at(q_ref, row[:, None], d[None, :], mask=mine, other=0.0)
        start = stretch * tile * tiles

        def body(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            best, total, out = carry
            token = start + i * tile + lax.iota(jnp.int32, tile)
            valid = token < length
            inside = valid[:, None] & (d < dim)[None, :]
            k = load_at(keys_ref, group, token[:, None], d[None, :], mask=inside, other=0.0)
            v = load_at(values_ref, group, token[:, None], d[None, :], mask=inside, other=0.0)
            scores = finite_scores(plt.dot(q, k.T, precision=precision), dim**-0.5, valid[None, :])
            new_best = jnp.maximum(best, jnp.max(scores, axis=1))
            shift = jnp.where(new_best > -float("inf"), new_best, 0.0)
            weights = jnp.exp(scores - shift[:, None])
            keep = jnp.exp(best - shift)
            out = out * keep[:, None] + plt.dot(weights.astype(v.dtype), v, precision=precision)
            return new_best, total * keep + jnp.sum(weights, axis=1), out

        best, total, out = lax.fori_loop(
            0,
            jnp.clip((length - start + (tile - 1)) // tile, 0, tiles),
            body,
            (
                jnp.full(lane.shape, -float("inf"), jnp.float32),
                jnp.zeros(lane.shape, jnp.float32),
                jnp.zeros((lane.shape[0], d.shape[0]), jnp.float32),
            ),
        )
        store_at(best_ref, best, row, stretch, mask=lane < each)
        store_at(total_ref, total, row, stretch, mask=lane < each)
        store_at(out_ref, out, row[:, None], stretch, d[None, :], mask=mine)

    def combine(
        parts_ref: Ref,  # [BH, P, D]
        best_ref: Ref,  # [BH, P]
        total_ref: Ref,  # [BH, P]
        out_ref: Ref,  # [BH, D]
    ) -> None:
        row = pl.program_id(0)
        p = lax.iota(jnp.int32, round_up(stretches))
        d = lax.iota(jnp.int32, round_up(dim))
        best = load_at(best_ref, row, p, mask=p < stretches, other=-float("inf"))
        total = load_at(total_ref, row, p, mask=p < stretches, other=0.0)
        top = jnp.max(best)
        share = jnp.exp(best - jnp.where(top > -float("inf"), top, 0.0))
        weight = jnp.sum(total * share)
        parts = load_at(
            parts_ref,
            row,
            p[:, None],
            d[None, :],
            mask=(p < stretches)[:, None] & (d < dim)[None, :],
            other=0.0,
        )
        out = jnp.sum(parts * share[:, None], axis=0) / jnp.where(weight > 0.0, weight, 1.0)
        store_at(out_ref, out.astype(out_ref.dtype), row, d, mask=d < dim)

    parts, best, total = call(
        partial,
        name="full_attention",
        grid=(scans, stretches),
        outputs=[
            jax.ShapeDtypeStruct((rows, stretches, dim), jnp.float32),
            jax.ShapeDtypeStruct((rows, stretches), jnp.float32),
            jax.ShapeDtypeStruct((rows, stretches), jnp.float32),
        ],
        warps=4,
        stages=3,
    )(
        q.reshape(rows, dim),
        keys.reshape(scans, stored, dim),
        values.reshape(scans, stored, dim),
        lengths,
    )
    (out,) = call(
        combine,
        name="full_attention_combine",
        grid=(rows,),
        outputs=[jax.ShapeDtypeStruct((rows, dim), values.dtype)],
        warps=4,
    )(parts, best, total)
    return out.reshape(batch, heads, dim)
