"""Exact support as a TPU kernel: a pipelined scan whose keys stay in VMEM, then exact selection.

One program a key-value head. The packed rows stream through a few tiles, so the values come along;
the keys of the scores of all its query heads, 4 bytes a token and head, are kept until the end.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic_tpu_lib import (
    HBM,
    LANES,
    NOTHING,
    SUBLANES,
    Array,
    Chosen,
    Keys,
    Ref,
    block,
    call,
    check,
    choose,
    dot_rows,
    estimate,
    grouped_queries,
    key_rows,
    key_score,
    list_chosen,
    list_scratch,
    output,
    packed_cache,
    round_up,
    score_keys,
)
from pallas_kernels.numerics import PAD
from pallas_kernels.packed import KEY

_TILE = 1024
_TILES = 4
"""Tiles of tokens in flight: 2 MiB of bfloat16 rows of 128, more than an HBM latency's worth."""


def exact_support(
    q: jax.Array, keys: jax.Array, lengths: jax.Array, wanted: jax.Array, *, budget: int
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.exact_support.exact_support`."""
    cache = packed_cache(keys, KEY)
    batch, heads, dim = q.shape
    groups, stored, lanes = *keys.shape[1:3], cache.shape[3]
    programs, each, rows = batch * groups, heads // groups, key_rows(stored)
    check(each <= SUBLANES, "up to 8 query heads a key-value head")
    check(rows < 2**16, "up to 8 Mi tokens a row")
    check(budget <= 2**12, "budgets up to 4096")
    padded, scale = round_up(budget, LANES), dim**-0.5
    tile = min(_TILE, round_up(stored, LANES))
    whole, rest = divmod(stored, tile)
    tile_rows = tile // LANES

    def kernel(
        lengths_ref: Ref,  # [BG], 0 where no head is wanted
        wanted_ref: Ref,  # [BH]
        q_ref: Ref,  # [1, 8, D] float32
        cache_ref: Ref,  # [BG, S, 2, D]
        support_ref: Ref,  # [1, g, Kp]
        scores_ref: Ref,  # [1, g, Kp], keys of the scores
        tiles_ref: Ref,  # [tiles, tile, 2, D]
        keys_ref: Ref,  # [g * rows, 128]
        threshold_ref: Ref,  # [2, 8, 128]
        gathered_ref: Ref,
        origin_ref: Ref,
        semaphores: Ref,  # [tiles]
    ) -> None:
        group = pl.program_id(0)
        length = lengths_ref[group]
        tiles = pl.cdiv(length, tile)

        def copies(i: Array, run: str) -> None:
            place = lax.rem(i, _TILES)

            def copy(count: int) -> None:
                source = cache_ref.at[group, pl.ds(pl.multiple_of(i * tile, LANES), count)]
                target = tiles_ref.at[place, pl.ds(0, count)]
                getattr(pltpu.make_async_copy(source, target, semaphores.at[place]), run)()

            if whole:

                @pl.when(i < jnp.minimum(tiles, whole))
                def _() -> None:
                    copy(tile)

            if rest:

                @pl.when((i == whole) & (i < tiles))
                def _() -> None:
                    copy(rest)

        def scan(i: Array, carry: None) -> None:
            copies(i, "wait")
            place = lax.rem(i, _TILES)

            def score(row: Array, carry: None) -> None:
                start = pl.multiple_of(row * LANES, LANES)
                dots = dot_rows(q_ref[0], tiles_ref[place, pl.ds(start, LANES), 0, :])  # [8, 128]
                row += i * tile_rows
                token = row * LANES + lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
                scored = score_keys(dots, scale, token < length)
                keys_ref[pl.ds(row, each, stride=rows), :] = scored[:each]
                return carry

            lax.fori_loop(0, tile_rows, score, None)
            copies(i + _TILES, "start")
            return carry

        for i in range(_TILES):
            copies(jnp.int32(i), "start")
        lax.fori_loop(0, tiles, scan, None)
        per_block = min(rows, LANES)
        blocks = pl.cdiv(tiles * tile_rows, per_block)

        def clear(row: Array, carry: None) -> None:
            keys_ref[pl.ds(row, each, stride=rows), :] = jnp.full((each, LANES), NOTHING, jnp.int32)
            return carry

        lax.fori_loop(tiles * tile_rows, blocks * per_block, clear, None)
        found = Keys(keys_ref, each, rows, blocks)

        @pl.when(tiles > 0)
        def _() -> None:
            chosen = choose(found, budget)
            threshold_ref[0, 0:each, :] = jnp.broadcast_to(chosen.key, (each, LANES))
            threshold_ref[1, 0:each, :] = jnp.broadcast_to(chosen.end, (each, LANES))

        support_ref[0] = jnp.full((each, padded), PAD, jnp.int32)
        scores_ref[0] = jnp.full((each, padded), NOTHING, jnp.int32)

        def write(head: Array, carry: None) -> None:
            @pl.when((tiles > 0) & (wanted_ref[group * each + head] > 0))
            def _() -> None:
                key, end = (threshold_ref[part, pl.ds(head, 1), :1] for part in range(2))
                positions, (best,) = list_chosen(
                    found,
                    Chosen(key, end),
                    head,
                    gathered_ref,
                    origin_ref,
                    [lambda i: found.block(head, i)],
                )
                support_ref[0, pl.ds(head, 1), :] = positions
                scores_ref[0, pl.ds(head, 1), :] = best

            return carry

        lax.fori_loop(0, each, write, None)

    scanned = jnp.any(wanted.reshape(batch, groups, each), axis=2)
    support, scores = call(
        kernel,
        name="exact_support",
        grid=programs,
        inputs=[block(SUBLANES, lanes), HBM],
        outputs=[output(programs, each, padded, dtype=jnp.int32)] * 2,
        scratch=[
            pltpu.VMEM((_TILES, tile, 2, lanes), cache.dtype),
            pltpu.VMEM((each * rows, LANES), jnp.int32),
            pltpu.VMEM((2, SUBLANES, LANES), jnp.int32),
            *list_scratch(rows, budget, 1),
            pltpu.SemaphoreType.DMA((_TILES,)),
        ],
        cost=estimate(products=each * cache.size // 2, read=cache.nbytes),
        scalars=2,
    )(
        jnp.where(scanned, lengths[:, None], 0).reshape(-1),
        wanted.reshape(-1).astype(jnp.int32),
        grouped_queries(q, cache, heads=SUBLANES),
        cache,
    )
    support = support.reshape(batch, heads, padded)[..., :budget]
    scores = scores.reshape(batch, heads, padded)[..., :budget]
    return support, jnp.where(support >= 0, key_score(scores), -jnp.inf)
