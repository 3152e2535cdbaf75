"""Select as a TPU kernel: bisection for the threshold, then the chosen listed by counting."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.mosaic_tpu_lib import (
    LANES,
    NOTHING,
    Keys,
    Ref,
    block,
    call,
    check,
    choose,
    estimate,
    in_rows,
    key_rows,
    key_score,
    list_chosen,
    list_scratch,
    order_key,
    output,
    round_up,
)
from pallas_kernels.numerics import PAD


def select(ids: jax.Array | None, scores: jax.Array, *, budget: int) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.select.select`; without ``ids``, slot n is token n."""
    batch, heads, slots = scores.shape
    rows, programs = key_rows(slots), batch * heads
    check(slots <= 2**20 and budget <= 2**12, "up to 2**20 scores and budgets up to 4096")
    padded = round_up(budget, LANES)

    def kernel(*refs: Ref) -> None:
        *payload_refs, keys_ref, listed_ref, gathered_ref, origin_ref = refs
        per_block = min(rows, LANES)
        keys = Keys(keys_ref.at[0], 1, rows, jnp.int32(rows // per_block))
        chosen = choose(keys, budget)
        payloads = [lambda i: keys.block(0, i)]
        for ref in payload_refs:
            payloads.append(
                lambda i, ref=ref: ref[0, pl.ds(pl.multiple_of(i * per_block, 8), per_block), :]
            )
        positions, values = list_chosen(keys, chosen, 0, gathered_ref, origin_ref, payloads)
        tokens = values[1] if payload_refs else positions
        listed_ref[0, 0:1, :] = jnp.where(positions >= 0, tokens, PAD)
        listed_ref[0, 1:2, :] = values[0]

    arrays = [order_key(scores)] if ids is None else [ids, order_key(scores)]
    fills = [NOTHING] if ids is None else [PAD, NOTHING]
    (listed,) = call(
        kernel,
        name="select",
        grid=programs,
        inputs=[block(rows, LANES)] * len(arrays),
        outputs=[output(programs, 2, padded, dtype=jnp.int32)],
        cost=estimate(products=0, read=len(arrays) * scores.nbytes),
        scratch=list_scratch(rows, budget, len(arrays)),
    )(*(in_rows(a, heads, f) for a, f in zip(arrays, fills, strict=True)))
    listed = listed.reshape(batch, heads, 2, padded)[..., :budget]
    support = listed[:, :, 0]
    return support, jnp.where(support >= 0, key_score(listed[:, :, 1]), -jnp.inf)
