"""What the TPU kernels share: the call itself, row copies, and exact selection.

Scores are selected as order-preserving int32 keys. The keys of query head h of a block lie in rows
``h * rows … (h + 1) * rows − 1`` of an int32 ``[heads * rows, 128]`` array, one key a lane, in the
order of the tokens. Letters beside the project's: ``g`` query heads of a key-value head, ``Kp`` the
budget rounded up to whole lanes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import platform
from pallas_kernels.numerics import PAD
from pallas_kernels.packed import LANES, PackedRows

Array = jax.Array
Ref = Any

SUBLANES = 8
NOTHING = -(2**31) + 0x7FFFFF
"""`order_key` of minus infinity; every finite score has a larger key."""
_ABOVE = 0x7F800001
"""Above the `order_key` of plus infinity."""
_BLOCK = 128
"""Rows of keys handled at a time."""
_USUAL_VMEM_BYTES = 128 * 2**20
"""Of a v5e or v6e core; what the interpreter goes by."""

HBM = pl.BlockSpec(memory_space=pl.ANY)


def check(condition: bool, what: str) -> None:
    """Raises NotImplementedError, on which `dispatch` tries the next implementation."""
    if not condition:
        raise NotImplementedError(f"the TPU kernels: {what}")


def packed_cache(rows: Any, part: int) -> Array:
    """The packed cache ``[B * G, S, 2, lanes]`` behind keys or values.

    In the kernels, D is these lanes.

    Raises:
        NotImplementedError: they are not packed, or not in a dtype of the TPU.
    """
    check(isinstance(rows, PackedRows) and rows.part == part, "a packed cache")
    check(rows.dtype in (jnp.bfloat16, jnp.float32), "bfloat16 or float32")
    return rows.both.reshape(-1, *rows.both.shape[2:])


def call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: int,
    inputs: Sequence[pl.BlockSpec],
    outputs: Sequence[tuple[pl.BlockSpec, jax.ShapeDtypeStruct]],
    cost: pl.CostEstimate,
    scratch: Sequence[Any] = (),
    scalars: int = 0,
) -> Callable[..., Any]:
    """A TPU kernel over a grid of one axis; interpreted where there is no TPU.

    Args:
        kernel: takes the refs of the scalars, the inputs, the outputs and the scratch.
        name: shown by profilers.
        grid: programs.
        inputs: block of every input after the scalars.
        outputs: block and shape of every output.
        cost: what XLA may reckon with: as much as there can be to do.
        scratch: memory that a program keeps to itself.
        scalars: leading inputs that are read by the scalar core, int32.

    Raises:
        NotImplementedError: the scratch does not fit the chip.
    """
    info = pltpu.get_tpu_info() if platform() == "tpu" else None
    memory = info.vmem_capacity_bytes if info is not None else _USUAL_VMEM_BYTES
    held = sum(_bytes_held(x.shape, x.dtype) for x in scratch if x.memory_space == pltpu.VMEM)
    check(held <= memory * 7 // 8, f"{held} bytes of scratch in {memory} of VMEM")
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=scalars,
            grid=(grid,),
            in_specs=list(inputs),
            out_specs=[block for block, _ in outputs],
            scratch_shapes=list(scratch),
        ),
        out_shape=[shape for _, shape in outputs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=memory
        ),
        cost_estimate=cost,
        interpret=platform() != "tpu",
        name=name,
    )


def _bytes_held(shape: tuple[int, ...], dtype: Any) -> int:
    *rows, lanes = shape
    return math.prod(rows) * round_up(lanes, LANES) * jnp.dtype(dtype).itemsize


def estimate(*, products: int, read: int, exponentials: int = 0) -> pl.CostEstimate:
    """Cost of a kernel.

    Args:
        products: multiplications and additions of pairs.
        read: bytes from HBM.
        exponentials: number of them.
    """
    return pl.CostEstimate(flops=2 * products, bytes_accessed=read, transcendentals=exponentials)


def row_cost(heads: int, rows: int, cache: Array, *, products: int) -> pl.CostEstimate:
    """Cost of a kernel that fetches a row for every slot of all heads.

    Args:
        heads: B * H.
        rows: of 128 slots, of a head.
        cache: ``[BG, S, 2, lanes]``.
        products: with every row, of length D.
    """
    slots, (_, _, _, lanes) = heads * rows * LANES, cache.shape
    read = slots * 2 * lanes * cache.dtype.itemsize
    return estimate(products=products * slots * lanes, read=read, exponentials=slots)


def block(*shape: int, memory: Any = None) -> pl.BlockSpec:
    """Program i's block ``[1, *shape]`` of an array ``[grid, *shape]``."""
    index = lambda i, *_: (i, *[0] * len(shape))  # noqa: E731
    return pl.BlockSpec((1, *shape), index, memory_space=memory)


def output(grid: int, *shape: int, dtype: Any) -> tuple[pl.BlockSpec, jax.ShapeDtypeStruct]:
    """An output ``[grid, *shape]`` of which every program writes its own block."""
    return block(*shape), jax.ShapeDtypeStruct((grid, *shape), dtype)


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is at least ``n`` and not 0."""
    return max(-(-n // multiple), 1) * multiple


def key_rows(slots: int) -> int:
    """Rows of 128 keys that hold ``slots`` of a head, in whole blocks."""
    rows = round_up(-(-slots // LANES), SUBLANES)
    return rows if rows <= _BLOCK else round_up(rows, _BLOCK)


def order_key(scores: Array) -> Array:
    """Int32 keys in the order of float32 scores (no NaN, no negative zero)."""
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def key_score(key: Array) -> Array:
    """Inverse of `order_key`."""
    return lax.bitcast_convert_type(jnp.where(key < 0, key ^ 0x7FFFFFFF, key), jnp.float32)


def score_keys(dots: Array, scale: float, valid: Array) -> Array:
    """Keys of scaled scores, cleaned as `pallas_kernels.numerics.clean_scores` does."""
    scores = dots * scale
    scores = jnp.where(scores == 0.0, 0.0, scores)
    return jnp.where(valid & (jnp.abs(scores) < float("inf")), order_key(scores), NOTHING)


def dot_rows(queries: Array, rows: Array) -> Array:
    """``queries [m, D] · rows [n, D]`` with float32 accumulation, float32 ``[m, n]``.

    Args:
        queries: float32, exact in the dtype of ``rows``.
        rows: bfloat16 or float32.
    """
    return lax.dot_general(
        queries.astype(rows.dtype),
        rows,
        (((1,), (1,)), ((), ())),
        precision=None if rows.dtype == jnp.bfloat16 else lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _iota(shape: tuple[int, ...], dimension: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, shape, dimension)


def _up_to(size: int) -> Array:
    """bfloat16 ``[size, size]`` that turns a row of numbers into its running sums."""
    return jnp.where(_iota((size, size), 0) <= _iota((size, size), 1), 1.0, 0.0).astype(
        jnp.bfloat16
    )


def as_row(column: Array) -> Array:
    """``[n, 1]`` as ``[1, n]``, n a multiple of 128."""
    eye = _iota((LANES, LANES), 0) == _iota((LANES, LANES), 1)
    parts = [
        jnp.sum(
            jnp.where(eye, column[i : i + LANES], jnp.zeros((), column.dtype)),
            axis=0,
            keepdims=True,
        )
        for i in range(0, column.shape[0], LANES)
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def as_column(row: Array) -> Array:
    """``[1, 128]`` as ``[128, 1]``."""
    eye = _iota((LANES, LANES), 0) == _iota((LANES, LANES), 1)
    return jnp.sum(jnp.where(eye, row, jnp.zeros((), row.dtype)), axis=1, keepdims=True)


# ---- exact selection ------------------------------------------------------------------------


class Keys(NamedTuple):
    """Keys of all query heads of a program; see the module.

    Attributes:
        ref: int32 ``[heads * rows, 128]``.
        heads: g.
        rows: of a head, as `key_rows` counts them.
        blocks: int32 scalar, blocks of a head that are filled.
    """

    ref: Ref
    heads: int
    rows: int
    blocks: Array

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return min(self.rows, _BLOCK)

    def block(self, head: int | Array, index: Array) -> Array:
        """int32 ``[block_rows, 128]``."""
        start = pl.multiple_of(head * self.rows + index * self.block_rows, SUBLANES)
        return self.ref[pl.ds(start, self.block_rows), :]

    def positions(self, index: Array) -> Array:
        """Position of every key of a block among those of its head."""
        shape = (self.block_rows, LANES)
        return (index * self.block_rows + _iota(shape, 0)) * LANES + _iota(shape, 1)

    def tally(self, hit: Callable[[int, Array, Array], Array]) -> Array:
        """Number of keys for which ``hit(head, keys, block index)`` holds, int32 ``[heads, 1]``."""

        def body(i: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
            counted = []
            for head, total in enumerate(totals):
                hits = jnp.where(hit(head, self.block(head, i), i), 1, 0)
                counted.append(total + jnp.sum(hits.reshape(-1, SUBLANES, LANES), axis=0))
            return tuple(counted)

        zeros = tuple(jnp.zeros((SUBLANES, LANES), jnp.int32) for _ in range(self.heads))
        totals = lax.fori_loop(0, self.blocks, body, zeros)
        sums = [jnp.sum(total, axis=(0, 1), keepdims=True) for total in totals]
        return sums[0] if self.heads == 1 else jnp.concatenate(sums, axis=0)


class Chosen(NamedTuple):
    """The K best keys of every head: those above ``key``, and those equal to it before ``end``.

    Attributes:
        key: int32 ``[heads, 1]``.
        end: int32 ``[heads, 1]``, a position.
    """

    key: Array
    end: Array

    def mask(self, keys: Array, positions: Array) -> Array:
        """Which keys are chosen, of the one head that this is of."""
        best = (keys > self.key) | ((keys == self.key) & (positions < self.end))
        return best & (keys > NOTHING)


def choose(keys: Keys, budget: int) -> Chosen:
    """Exact top-K of the keys above `NOTHING` of every head; ties to the lower position."""
    shape = (keys.heads, 1)

    def narrow(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        low, reached, high = carry
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        number = keys.tally(lambda head, k, _: k >= middle[head : head + 1])
        up = number >= budget
        return (
            jnp.where(up, middle, low),
            jnp.where(up, number, reached),
            jnp.where(up, high, middle),
        )

    def unfinished(carry: tuple[Array, Array, Array]) -> Array:
        low, reached, high = carry
        return jnp.max(jnp.where((reached > budget) & (low + 1 < high), 1, 0)) > 0

    lowest = jnp.full(shape, NOTHING + 1, jnp.int32)
    valid = keys.tally(lambda head, k, _: k > NOTHING)
    # A head with at most K keys needs no bracket.
    high = jnp.where(valid > budget, _ABOVE, NOTHING + 2)
    key, reached, _ = lax.while_loop(unfinished, narrow, (lowest, valid, high))

    above = keys.tally(lambda head, k, _: k > key[head : head + 1])
    everything = jnp.int32(keys.rows * LANES)

    def shrink(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        few, enough = carry  # positions before which too few, and enough, of the equal keys lie
        middle = (few + enough) >> 1
        number = keys.tally(
            lambda head, k, i: (
                (k == key[head : head + 1]) & (keys.positions(i) < middle[head : head + 1])
            )
        )
        up = above + number >= budget
        return jnp.where(up, few, middle), jnp.where(up, middle, enough)

    def tied(carry: tuple[Array, Array]) -> Array:
        few, enough = carry
        return jnp.max(jnp.where((reached > budget) & (few + 1 < enough), 1, 0)) > 0

    start = (jnp.zeros(shape, jnp.int32), jnp.full(shape, everything, jnp.int32))
    _, end = lax.while_loop(tied, shrink, start)
    return Chosen(key, jnp.where(reached > budget, end, everything))


def list_scratch(rows: int, budget: int, payloads: int) -> list[Any]:
    """Scratch of `list_chosen`."""
    slots = round_up(budget, LANES)
    return [
        pltpu.VMEM((slots, LANES * (1 + 4 * payloads)), jnp.float32),
        pltpu.VMEM((slots, min(rows, _BLOCK)), jnp.int32),
    ]


def list_chosen(
    keys: Keys,
    chosen: Chosen,
    head: int | Array,
    gathered_ref: Ref,  # [Kp, 128 * (1 + 4 * payloads)]
    origin_ref: Ref,  # [Kp, block_rows]
    payloads: Sequence[Callable[[Array], Array]] = (),
) -> tuple[Array, list[Array]]:
    """Lists the chosen of one head in the order of their positions.

    The k-th is found by counting: first its row, from the running sums of the rows' counts, then
    its lane, from the running sums in that row, which a product with a one-hot matrix fetches.

    Args:
        keys: of all heads.
        chosen: of this head, ``[1, 1]``.
        head: which.
        gathered_ref: scratch.
        origin_ref: scratch.
        payloads: each gives int32 ``[block_rows, 128]`` of a block, to be listed along.

    Returns:
        Positions int32 ``[1, Kp]``, `PAD` last, and every payload int32 ``[1, Kp]``, 0 last.
    """
    slots, rows = gathered_ref.shape[0], keys.block_rows
    k = _iota((slots, 1), 0)
    gathered_ref[...] = jnp.zeros_like(gathered_ref)
    origin_ref[...] = jnp.zeros_like(origin_ref)

    def gather(i: Array, total: Array) -> Array:
        mask = chosen.mask(keys.block(head, i), keys.positions(i))
        bits = jnp.where(mask, 1.0, 0.0).astype(jnp.bfloat16)
        running = jnp.dot(bits, _up_to(LANES), preferred_element_type=jnp.float32)
        counts = lax.dot_general(
            jnp.ones((SUBLANES, LANES), jnp.bfloat16),
            bits,
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )  # [8, rows], all the same
        upto = jnp.dot(
            counts.astype(jnp.bfloat16), _up_to(rows), preferred_element_type=jnp.float32
        )
        after = total + upto[:1].astype(jnp.int32)
        before = after - counts[:1].astype(jnp.int32)
        mine = (before <= k) & (k < after)  # [Kp, rows]
        origin = (before << 16) + i * rows + _iota((1, rows), 1)
        origin_ref[...] += jnp.where(mine, origin, 0)
        data = [jnp.where(mask, running, 0.0).astype(jnp.bfloat16)]
        for payload in payloads:
            value = payload(i)
            data += [
                ((value >> shift) & 0xFF).astype(jnp.float32).astype(jnp.bfloat16)
                for shift in (0, 8, 16, 24)
            ]
        gathered_ref[...] += jnp.dot(
            jnp.where(mine, 1.0, 0.0).astype(jnp.bfloat16),
            jnp.concatenate(data, axis=1) if payloads else data[0],
            preferred_element_type=jnp.float32,
        )
        return jnp.max(after, axis=1, keepdims=True)

    total = lax.fori_loop(0, keys.blocks, gather, jnp.zeros((1, 1), jnp.int32))
    origin = jnp.sum(origin_ref[...], axis=1, keepdims=True)
    nth = k - (origin >> 16) + 1  # among the chosen of its row
    hit = gathered_ref[:, :LANES].astype(jnp.int32) == nth
    lane = jnp.sum(jnp.where(hit, _iota((slots, LANES), 1), 0), axis=1, keepdims=True)
    positions = as_row(jnp.where(k < total, (origin & 0xFFFF) * LANES + lane, PAD))
    listed = []
    for p in range(len(payloads)):
        value = jnp.zeros((slots, LANES), jnp.int32)
        for part in range(4):
            start = LANES * (1 + 4 * p + part)
            value += gathered_ref[:, start : start + LANES].astype(jnp.int32) << (8 * part)
        listed.append(as_row(jnp.sum(jnp.where(hit, value, 0), axis=1, keepdims=True)))
    return positions, listed


# ---- row copies -----------------------------------------------------------------------------


class Rows(NamedTuple):
    """Rows of a packed cache in VMEM, one slot for every key of a program.

    Attributes:
        ref: ``[heads * rows * 128, 2, D]``; only the slots that have a token are filled.
        heads: g.
        rows: of 128 slots, of a head.
    """

    ref: Ref
    heads: int
    rows: int

    def chunk(self, head: int | Array, row: Array, part: int) -> Array:
        """Keys or values ``[128, D]`` of the slots of one row of keys."""
        start = pl.multiple_of((head * self.rows + row) * LANES, LANES)
        return self.ref[pl.ds(start, LANES), part, :]


def rows_scratch(heads: int, rows: int, dim: int, dtype: Any) -> list[Any]:
    """Scratch of `fetch_rows`."""
    return [pltpu.VMEM((heads * rows * LANES, 2, dim), dtype), pltpu.SemaphoreType.DMA(())]


def grouped_queries(q: Array, cache: Array, *, heads: int | None = None) -> Array:
    """Queries ``[B, H, D]`` by key-value head in whole lanes, float32 ``[BG, heads, lanes]``.

    Args:
        q: in the dtype of the cache.
        cache: ``[BG, S, 2, lanes]``.
        heads: rows of zeros are added up to this number; None for g.
    """
    check(q.dtype == cache.dtype, "queries in the dtype of the keys")
    queries = q.reshape(cache.shape[0], -1, q.shape[2]).astype(jnp.float32)
    more = (heads or queries.shape[1]) - queries.shape[1]
    return jnp.pad(queries, ((0, 0), (0, more), (0, cache.shape[3] - q.shape[2])))


def in_rows(values: Array, groups: int, fill: int) -> Array:
    """What every head has by slot, ``[B, H, N]``, as rows of 128 a group, ``[BG, g * rows, 128]``.

    Args:
        values: int32.
        groups: G.
        fill: of the slots beyond N.
    """
    batch, heads, slots = values.shape
    rows = key_rows(slots)
    padded = jnp.pad(values, ((0, 0), (0, 0), (0, rows * LANES - slots)), constant_values=fill)
    return padded.reshape(batch * groups, heads // groups * rows, LANES)


def out_of_rows(values: Array, heads: int, slots: int) -> Array:
    """Inverse of `in_rows`: ``[BG, g * rows, 128]`` as ``[B, H, N]``."""
    rows = key_rows(slots)
    return values.reshape(-1, heads, rows * LANES)[:, :, :slots]


def ends_of(tokens: Array) -> Array:
    """Slots up to which every head has tokens, int32 ``[B * H]`` of ``[B, H, N]``."""
    slot = jnp.arange(1, tokens.shape[2] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(tokens >= 0, slot, 0), axis=2).reshape(-1)


def fetch_rows(
    rows: Rows,
    semaphore: Ref,
    cache_ref: Ref,  # [BG, S, 2, D]
    tokens_ref: Ref,  # [1, g * rows, 128] in SMEM, -1 for none
    end_of: Callable[[Array], Array],
    group: Array,
) -> None:
    """Copies the rows of all tokens of a program into VMEM, all in flight at once.

    Args:
        rows: where to.
        semaphore: of the copies.
        cache_ref: the packed cache.
        tokens_ref: token of every slot.
        end_of: slots of a head up to which there may be tokens, int32 scalar.
        group: which key-value head of the cache.
    """
    stored = cache_ref.shape[1]
    many = min(stored, 64)

    def issue(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        started, head = carry
        for j in range(SUBLANES):
            slot = i * SUBLANES + j
            row = head * rows.rows + lax.shift_right_logical(slot, 7)
            token = tokens_ref[0, row, slot & (LANES - 1)]

            @pl.when(token >= 0)
            def _(token: Array = token, slot: Array = slot) -> None:
                pltpu.make_async_copy(
                    cache_ref.at[group, token],
                    rows.ref.at[head * rows.rows * LANES + slot],
                    semaphore,
                ).start()

            started += (token >= 0).astype(jnp.int32)
        return started, head

    def of_head(head: Array, started: Array) -> Array:
        return lax.fori_loop(0, pl.cdiv(end_of(head), SUBLANES), issue, (started, head))[0]

    started = lax.fori_loop(0, rows.heads, of_head, jnp.int32(0))

    def await_copies(count: int) -> Callable[[Array, None], None]:
        def wait(_: Array, carry: None) -> None:
            place = rows.ref.at[pl.ds(0, count)]
            pltpu.make_async_copy(cache_ref.at[0, pl.ds(0, count)], place, semaphore).wait()
            return carry

        return wait

    lax.fori_loop(0, started // many, await_copies(many), None)
    lax.fori_loop(0, started % many, await_copies(1), None)


def score_rows(
    rows: Rows,
    keys_ref: Ref,  # [g * rows, 128]
    queries_ref: Ref,  # [1, g, D] float32
    tokens_ref: Ref,  # [1, g * rows, 128] in VMEM
    end_of: Callable[[Array], Array],
    scale: float,
) -> Keys:
    """Keys of the scores of all rows that were fetched; `NOTHING` in the other slots."""

    def of_head(head: Array, carry: None) -> None:
        query = queries_ref[0, pl.ds(head, 1), :]
        first, filled = head * rows.rows, pl.cdiv(end_of(head), LANES)

        def score(row: Array, carry: None) -> None:
            valid = tokens_ref[0, pl.ds(row, 1), :] >= 0
            dots = dot_rows(query, rows.chunk(0, row, 0))
            keys_ref[pl.ds(row, 1), :] = score_keys(dots, scale, valid)
            return carry

        def clear(row: Array, carry: None) -> None:
            keys_ref[pl.ds(row, 1), :] = jnp.full((1, LANES), NOTHING, jnp.int32)
            return carry

        lax.fori_loop(first, first + filled, score, None)
        lax.fori_loop(first + filled, first + rows.rows, clear, None)
        return carry

    lax.fori_loop(0, rows.heads, of_head, None)
    blocks = rows.rows // min(rows.rows, _BLOCK)
    return Keys(keys_ref, rows.heads, rows.rows, jnp.int32(blocks))


def attend_rows(
    rows: Rows,
    head: int | Array,
    end: Array,
    mask: Callable[[Array], Array],
    scores: Callable[[Array], Array],
) -> Array:
    """Softmax over the chosen slots of one head and the weighted sum of their values.

    Args:
        rows: fetched.
        head: which.
        end: int32 scalar, slots up to which there may be tokens.
        mask: chosen slots of a row of 128, bool ``[1, 128]``.
        scores: of the slots of a row, float32 ``[1, 128]``, finite where chosen.

    Returns:
        float32 ``[1, D]``; zeros if nothing is chosen.
    """
    filled = pl.cdiv(end, LANES)

    def largest(i: Array, best: Array) -> Array:
        return jnp.maximum(best, jnp.where(mask(i), scores(i), -float("inf")))

    lowest = jnp.full((1, LANES), -float("inf"), jnp.float32)
    best = jnp.max(lax.fori_loop(0, filled, largest, lowest), axis=1, keepdims=True)
    best = jnp.where(best > -float("inf"), best, 0.0)

    def weight(i: Array) -> Array:
        return jnp.where(mask(i), jnp.exp(scores(i) - best), 0.0)

    total = lax.fori_loop(0, filled, lambda i, t: t + weight(i), jnp.zeros((1, LANES), jnp.float32))
    total = jnp.sum(total, axis=1, keepdims=True)
    total = jnp.where(total > 0.0, total, 1.0)

    def add(i: Array, out: Array) -> Array:
        weights = weight(i) / total
        v = rows.chunk(head, i, 1).astype(jnp.float32)
        # What was never fetched, or not chosen, may be anything.
        v = jnp.where(as_column(jnp.where(mask(i), 1.0, 0.0)) > 0.0, v, 0.0)
        return out + _weighted_sum(weights, v, rows.ref.dtype)

    return lax.fori_loop(0, filled, add, jnp.zeros((1, rows.ref.shape[2]), jnp.float32))


def _weighted_sum(weights: Array, values: Array, dtype: Any) -> Array:
    """``weights [1, 128] · values [128, D]`` in float32; ``values`` are exact in ``dtype``."""
    if dtype != jnp.bfloat16:
        return jnp.dot(
            weights,
            values,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
    parts = []  # three bfloat16 hold a float32; the matrix unit takes eight rows as one
    for _ in range(3):
        part = weights.astype(jnp.bfloat16)
        parts.append(part.astype(jnp.float32))
        weights = weights - parts[-1]
    shape = (SUBLANES, LANES)
    row = _iota(shape, 0)
    stacked = jnp.zeros(shape, jnp.float32)
    for i, part in enumerate(parts):
        stacked = jnp.where(row == i, part, stacked)
    product = jnp.dot(
        stacked.astype(jnp.bfloat16),
        values.astype(jnp.bfloat16),
        preferred_element_type=jnp.float32,
    )
    return jnp.sum(product, axis=0, keepdims=True)
