"""Every implementation of every op beside its plain XLA form, on the same named arguments.

Kernels run in interpret mode here, compiled where there is a GPU.
"""

import functools
import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import specs, triton_lib
from pallas_kernels.retopk_step.types import SIGNALS, WORDS

CASES = [(op, name) for op in specs.OPS for name in specs.names(op)]


@functools.cache
def compiled(op: str, variant: str = "", **kwargs):
    """The op under `jax.jit`, one for all cases, so that those of equal shapes compile once.

    A ``variant`` is traced with sizes that its tests set.
    """
    function = getattr(importlib.import_module(f"pallas_kernels.{op}"), op)
    return jax.jit(functools.partial(function, **kwargs))


def run(spec: specs.Spec, implementation: str, variant: str = ""):
    return compiled(spec.op, variant, implementation=implementation, **spec.kwargs)(*spec.args)


def assert_same(expected, got) -> None:
    """Integers equal; floats within the rounding of a sum of as many terms in their dtype."""
    for (path, want), have in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(got), strict=True
    ):
        label = jax.tree_util.keystr(path)
        assert want.dtype == have.dtype, label
        assert want.shape == have.shape, label
        want64, have64 = np.asarray(want, np.float64), np.asarray(have, np.float64)
        if jnp.issubdtype(want.dtype, jnp.integer):
            np.testing.assert_array_equal(have64, want64, err_msg=label)
            continue
        # Float32 sums may differ in order; narrower results round such sums once more.
        bound = (64 if want.dtype == jnp.float32 else 2) * float(jnp.finfo(want.dtype).eps)
        np.testing.assert_allclose(have64, want64, rtol=bound, atol=4 * bound, err_msg=label)


@pytest.mark.parametrize(("op", "name"), CASES, ids=[f"{op}-{name}" for op, name in CASES])
def test_triton_is_reference(op: str, name: str) -> None:
    assert_reference(op, name)


def assert_reference(op: str, name: str, variant: str = "") -> None:
    """The kernels give what plain XLA does, where that is defined."""
    spec = specs.spec(op, name)
    expected = run(spec, "reference")
    got = run(spec, "triton", variant)
    if op == "candidates":  # unused slots hold any token
        keep = np.isfinite(np.asarray(expected.scores))
        for want, have in ((expected.ids, got.ids), (expected.scores, got.scores)):
            for row in np.ndindex(want.shape[:2]):
                np.testing.assert_array_equal(
                    np.asarray(have)[row][np.isfinite(np.asarray(got.scores))[row]],
                    np.asarray(want)[row][keep[row]],
                )
        np.testing.assert_array_equal(got.unique, expected.unique)
        return
    if op == "retopk_step":  # rows that have ended have no defined output or report
        active = spec.args[6]
        mask = lambda x: jnp.where(active.reshape(-1, *[1] * (x.ndim - 1)), x, 0)  # noqa: E731
        expected = expected._replace(
            **{f: mask(getattr(expected, f)) for f in ("out", "support", "unique")}
        )
        got = got._replace(**{f: mask(getattr(got, f)) for f in ("out", "support", "unique")})
    assert_same(expected, got)


FULL_GPU = [
    ("retopk_step", "ragged"),
    ("retopk_step", "ended"),
    ("retopk_step", "refresh"),
    ("retopk_step", "no_window"),
    ("retopk_step", "seven_heads_each"),
    ("retopk_step", "bad_keys"),
    ("candidates", "ragged"),
    ("candidates", "long_supports"),
    ("exact_attention", "ragged"),
]


@pytest.mark.parametrize(("op", "name"), FULL_GPU, ids=[f"{op}-{name}" for op, name in FULL_GPU])
def test_programs_that_take_turns(op: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pallas_kernels.candidates import triton as candidates
    from pallas_kernels.sparse_attend import triton as sparse_attend

    monkeypatch.setattr(candidates, "_ALL_AT_ONCE", 0)
    monkeypatch.setattr(sparse_attend, "_PROGRAMS", 0)
    assert_reference(op, name, "in turn")


@pytest.mark.parametrize("op", ["retopk_step", "exact_attention"])
@pytest.mark.parametrize(("at_once", "expected"), [(256, 8), (0, 4)])
def test_a_selection_is_laid_out_for_the_warps_of_its_program(
    op: str, at_once: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pallas_kernels.exact_attention import triton as exact_attention
    from pallas_kernels.retopk_step import triton as retopk_step
    from pallas_kernels.select import triton as select
    from pallas_kernels.sparse_attend import triton as sparse_attend

    laid_out, programs = [], []
    pick, call = select.pick, triton_lib.call

    def noted_pick(*args: Any, warps: int, **kwargs: Any) -> Any:
        laid_out.append(warps)
        return pick(*args, warps=warps, **kwargs)

    def noted_call(*args: Any, warps: int, **kwargs: Any) -> Any:
        programs.append(warps)
        return call(*args, warps=warps, **kwargs)

    monkeypatch.setattr(sparse_attend, "_PROGRAMS", at_once)
    monkeypatch.setattr(select, "pick", noted_pick)
    for module in (exact_attention, retopk_step):
        monkeypatch.setattr(module, "call", noted_call)
    run(specs.spec(op, "ragged"), "triton", f"noted {at_once}")
    assert programs == [expected]  # the other kernels are called in modules of their own
    assert set(laid_out) == {expected}


def test_steps_with_more_programs_of_a_group_than_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from pallas_kernels.retopk_step import triton_search

    monkeypatch.setattr(triton_search, "_BITS", 0)
    monkeypatch.setattr(triton_search, "_search_at_once", None)  # not taken
    assert_reference("retopk_step", "ragged", "more than bits")


def test_support_is_the_same_every_time_and_in_any_row() -> None:
    shape = specs.Shape(b=3)
    p = specs.problem(shape, (70, 70, 70), keys="equal")
    same = {k: jnp.broadcast_to(v[:1], v.shape) for k, v in p.items() if k in ("q", "keys")}
    from pallas_kernels.exact_support import exact_support

    call = jax.jit(functools.partial(exact_support, budget=16, implementation="triton"))
    wanted = jnp.ones((3, shape.h), jnp.bool_)
    first = np.asarray(call(same["q"], same["keys"], p["lengths"], wanted)[0])
    np.testing.assert_array_equal(first, np.broadcast_to(first[:1], first.shape))
    for _ in range(100):
        again = call(same["q"], same["keys"], p["lengths"], wanted)[0]
        np.testing.assert_array_equal(np.asarray(again), first)


def test_steps_are_the_same_every_time_and_in_any_row() -> None:
    shape = specs.Shape(b=3)
    p = specs.problem(shape, (70, 41, 23))
    step = compiled("retopk_step", entries=shape.r, window=shape.w, implementation="triton")
    names = ("q", "keys", "values", "remembered", "lengths")
    no = jnp.zeros((3,), jnp.bool_)

    def take(rows: list[int]):
        picked = jax.tree.map(lambda x: x[jnp.array(rows)], [p[name] for name in names])
        return jax.tree.map(np.asarray, step(*picked, no, ~no, jnp.float32(0.85)))

    def assert_rows(rows: list[int]) -> None:
        for want, have in zip(jax.tree.leaves(first), jax.tree.leaves(take(rows)), strict=True):
            np.testing.assert_array_equal(have, want[rows])

    first = take([0, 1, 2])
    assert_rows([2, 0, 1])
    assert_rows([1, 1, 1])
    for _ in range(100):
        assert_rows([0, 1, 2])


def test_cases_are_what_they_say() -> None:
    names = (
        *("ragged", "twin_keys", "same_supports", "disjoint_supports", "empty_supports"),
        *("window_covers_all", "bad_queries", "bad_values"),
    )
    steps = ((name, run(specs.spec("retopk_step", name), "reference")) for name in names)
    done = {name: jax.tree.map(np.asarray, step) for name, step in steps}
    reused = {name: step.path == 0 for name, step in done.items()}
    groups = reused["ragged"].reshape(2, 2, 2)
    assert np.any(groups.any(-1) & ~groups.all(-1)), "one group, several paths"
    k, c, w = 16, 4, 5
    support = done["twin_keys"].support[~reused["twin_keys"]]
    cut = [row for row in support if row[-1] >= 0 and sum(row % 2 == 0) > sum(row % 2)]
    assert cut, "a tie at the K-th score"
    same, disjoint = (done[f"{kind}_supports"].unique.max() for kind in ("same", "disjoint"))
    assert same <= k + w < disjoint
    empty = done["empty_supports"].unique[reused["empty_supports"]]
    np.testing.assert_array_equal(empty, w)
    everything = done["window_covers_all"].unique[reused["window_covers_all"]]
    assert set(everything) <= {30, 23}
    assert not reused["bad_queries"][0, :2].any()
    assert (done["bad_queries"].support[0, 1] == -1).all()
    assert np.isnan(done["bad_values"].out).any()
    assert np.isfinite(done["bad_values"].out).any()
    newest = (specs.spec("recall", "same_queries").args[2] - 1) % c
    slots = run(specs.spec("recall", "same_queries"), "reference").slots
    np.testing.assert_array_equal(slots[..., 0], np.broadcast_to(newest[:, None], (2, 4)))


def test_many_survivors_take_the_general_path(monkeypatch: pytest.MonkeyPatch) -> None:
    from pallas_kernels.exact_support import reference, triton

    monkeypatch.setattr(triton, "_SURVIVORS", 16)
    monkeypatch.setattr(triton, "_FILTERED", 32)
    for keys in ("grid", "equal", "close"):
        p = specs.problem(specs.Shape(), (90, 23), keys=keys)
        args = (p["q"], p["keys"], p["lengths"], p["wanted"])
        expected = reference.exact_support(*args, budget=16)
        general = compiled("exact_support", "general path", budget=16, implementation="triton")
        assert_same(expected, general(*args))


@pytest.mark.parametrize("tiles", [1, 4, 5])
@pytest.mark.parametrize("sets", [1024, 64])
def test_bounds_from_several_tiles(tiles: int, sets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from pallas_kernels.exact_support import reference, triton

    of = triton.Scan.of

    def several(*args, **kwargs) -> triton.Scan:
        split = of(*args, **kwargs)
        programs = -(-args[2] // (split.tile * tiles))
        return split._replace(tiles=tiles, programs=programs, sets=sets)

    monkeypatch.setattr(triton.Scan, "of", several)
    monkeypatch.setattr(triton, "_BOUNDED", 64)
    shape = specs.Shape(h=3, g=1, s=1100, k=6)
    for lengths in ((1100, 900), (641, 5)):
        p = specs.problem(shape, lengths)
        args = (p["q"], p["keys"], p["lengths"], jnp.ones((2, 3), jnp.bool_))
        variant = f"{tiles} tiles, {sets} sets"
        several_tiles = compiled("exact_support", variant, budget=6, implementation="triton")
        assert_same(reference.exact_support(*args, budget=6), several_tiles(*args))


@pytest.mark.parametrize("budget", [16, 200])
def test_steps_whose_programs_scan_several_tiles(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pallas_kernels.exact_support import triton

    of = triton.Scan.of
    tiles = 6

    def several(*args, **kwargs) -> triton.Scan:
        split = of(*args, **kwargs)
        return split._replace(tiles=tiles, programs=-(-args[2] // (split.tile * tiles)))

    monkeypatch.setattr(triton.Scan, "of", several)
    shape = specs.Shape(h=6, g=2, s=1900, k=budget)
    kwargs = {"entries": shape.r, "window": shape.w}
    variant = f"{tiles} tiles"
    for lengths in ((1900, 1280), (1279, 320), (257, 1)):
        p = specs.problem(shape, lengths, keys="close")
        names = ("q", "keys", "values", "remembered", "lengths")
        due = jnp.array([False, True])
        args = (*(p[name] for name in names), due, ~jnp.zeros_like(due), jnp.float32(0.85))
        expected = compiled("retopk_step", implementation="reference", **kwargs)(*args)
        got = compiled("retopk_step", variant, implementation="triton", **kwargs)(*args)
        assert_same(expected, got)


@pytest.mark.parametrize("length", [8192, 5000])
def test_bound_from_half_of_the_scans_though_the_best_keys_are_recent(length: int) -> None:
    from jax.experimental import pallas as pl

    from pallas_kernels.exact_support import triton

    rows, stored, dim, budget = 2, 8192, 16, 64
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((1, stored, dim))
    keys[:, length - 512 :] *= 40
    q = jnp.asarray(rng.standard_normal((rows, dim)), jnp.float32)
    split = triton.Scan.of(1, rows, stored, dim, jnp.dtype(jnp.float32), budget)
    lengths = jnp.full((rows,), length, jnp.int32)
    scores, highest = triton.run_scan(q, jnp.asarray(keys, jnp.float32), lengths, split)
    ended = rng.permutation(split.programs) < split.programs // 2
    program_of = np.arange(length) // split.tile % split.programs
    scanned_keys = ended[program_of]

    def kernel(highest_ref, ended_ref, bounds_ref) -> None:
        row = pl.program_id(0)
        bounds_ref[row] = triton.find_bound(
            highest_ref,
            row,
            jnp.int32(length),
            split,
            budget,
            warps=4,
            scanned=lambda program: triton_lib.load_at(ended_ref, program) > 0,
        )

    (bounds,) = triton_lib.call(
        kernel,
        name="bound",
        grid=(rows,),
        outputs=[jax.ShapeDtypeStruct((rows,), jnp.float32)],
        warps=4,
    )(highest, jnp.asarray(ended, jnp.int32))
    scores = np.asarray(scores)[:, :length]
    exact = np.sort(scores, axis=1)[:, -budget]
    assert (np.asarray(bounds) <= exact).all()
    reaching = scores >= np.asarray(bounds)[:, None]
    assert (reaching[:, scanned_keys].sum(axis=1) >= budget).all()
    assert (reaching.sum(axis=1) <= 4 * budget).all(), reaching.sum(axis=1)


@pytest.mark.parametrize("length", [8192, 5000, 2500])
def test_a_step_lists_few_keys_of_heads_that_scan(length: int) -> None:
    from pallas_kernels.candidates.triton import Split
    from pallas_kernels.exact_support.triton import Scan
    from pallas_kernels.retopk_step.triton_search import Inputs, search

    rows, stored, dim, capacity, budget = 2, 8192, 16, 4, 64
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((1, stored, dim))
    keys[:, length - 512 :] *= 40
    ones = jnp.ones(1, jnp.int32)
    q = jnp.asarray(rng.standard_normal((rows, dim)), jnp.float32)
    inputs = Inputs(
        q,
        jnp.asarray(keys, jnp.float32),
        jnp.asarray(rng.standard_normal((rows, capacity, dim)), jnp.float32),
        supports=jnp.zeros((rows, capacity, budget), jnp.int32),
        tau=jnp.full((rows,), 2.0),
        lengths=ones * length,
        due=ones * 0,
        active=ones,
        pushed=ones,
    )
    scan = Scan.of(1, rows, stored, dim, jnp.dtype(jnp.float32), budget)
    assert scan.used(jnp.int32(length)) > WORDS  # so that words have several bits
    split = Split.of(rows, budget, 1, 0)
    run = functools.partial(search, split=split, scan=scan, entries=1, window=0)
    found = jax.jit(run)(inputs, jnp.zeros((rows, *SIGNALS), jnp.int32))
    scores = np.asarray(q @ inputs.keys[0, :length].T) * dim**-0.5
    exact = np.sort(scores, axis=1)[:, -budget]
    assert (np.asarray(found.bounds) <= exact + 1e-5 * np.abs(exact)).all()
    listed = np.asarray(found.counts).sum(axis=1)
    assert (listed >= budget).all()
    # On a GPU the programs of the last keys may be the ones that end after the bound is found.
    most = 2 * budget if triton_lib.interpreted() else scan.kept
    assert (listed <= most).all(), listed


def test_few_keys_reach_the_bound_though_neighbours_are_alike() -> None:
    from pallas_kernels.exact_support import triton

    rng = np.random.default_rng(0)
    stored, budget = 2**15, 512
    smooth = np.cumsum(rng.standard_normal((2, stored)), axis=1).astype(np.float32)
    split = triton.Scan.of(2, 1, stored, 128, jnp.dtype(jnp.bfloat16), budget)
    turns = -(-stored // split.reach)
    apart = np.pad(smooth, ((0, 0), (0, turns * split.reach - stored)), constant_values=-np.inf)
    highest = jnp.asarray(apart.reshape(2, turns, split.reach).max(axis=1))
    lengths = jnp.full((2,), stored, jnp.int32)
    bounds = triton.run_bound(highest, lengths, split, budget)
    reaching = np.sum(smooth >= np.asarray(bounds)[:, None], axis=1)
    assert np.all(reaching >= budget)
    assert np.all(reaching <= split.kept)


@pytest.mark.parametrize("groups", [1, 4, 64, 512])
@pytest.mark.parametrize("stored", [600, 4096, 131072, 195000, 5242880])
@pytest.mark.parametrize("budget", [64, 512, 2048])
def test_scan_is_split_for_a_tight_bound_and_a_full_gpu(
    groups: int, stored: int, budget: int
) -> None:
    from pallas_kernels.exact_support import triton
    from pallas_kernels.retopk_step.triton_search import SEARCH_SCAN_PROGRAMS

    dtype = jnp.dtype(jnp.bfloat16)
    for programs in (triton.SCAN_PROGRAMS, SEARCH_SCAN_PROGRAMS):
        split = triton.Scan.of(groups, 7, stored, 128, dtype, budget, programs=programs)
        assert split.reach * split.tiles >= stored
        assert split.stretches * split.stretch >= stored
        assert split.reach >= min(stored, triton.sets_of(budget))
        assert split.tiles <= 2 or groups * split.programs >= 3 * programs // 4
        assert split.programs <= triton.MOST_PROGRAMS  # a step has a bit for each
        most = max(1 + 2 * 2048 // groups, 2 * triton.sets_of(budget) // split.tile)
        assert split.programs <= most


@pytest.mark.parametrize("name", specs.names("top_k"))
def test_top_k_of_many_scores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pallas_kernels.exact_support import triton as exact
    from pallas_kernels.top_k import triton

    monkeypatch.setattr(triton, "_HELD", 0)
    monkeypatch.setattr(triton, "_TILE", 32)
    monkeypatch.setattr(exact, "_FILTERED", 32)
    spec = specs.spec("top_k", name)
    expected = run(spec, "reference")
    assert_same(expected, run(spec, "triton", "many"))
    monkeypatch.setattr(exact, "_SURVIVORS", 16)
    assert_same(expected, run(spec, "triton", "many, and many survive"))


def test_top_k_of_a_long_row() -> None:
    from pallas_kernels.top_k import top_k

    rng = np.random.default_rng(0)
    scores = jnp.asarray(rng.standard_normal((1, 2, 20000)), jnp.float32)
    scores = scores.at[:, 0, 15000:].set(-jnp.inf).at[:, 1, 19900:].set(jnp.inf)
    expected = top_k(scores, budget=512, implementation="reference")
    assert_same(expected, top_k(scores, budget=512, implementation="triton"))


@pytest.mark.parametrize("sizes", [(1024,), (256, 64), (2048, 2048)])
@pytest.mark.parametrize("warps", [4, 16])
def test_threshold_of_hard_scores(sizes: tuple[int, ...], warps: int) -> None:
    rng = np.random.default_rng(0)
    n = sum(sizes)
    most = float(np.finfo(np.float32).max)
    place = rng.permutation(n)
    steps = (np.float32(0.3).view(np.int32) + place.astype(np.int32)).view(np.float32)
    some, normal = place % 3 == 0, rng.standard_normal(n)
    cases = {
        "a span above the largest number": np.where(some, most, -most * rng.random(n)),
        "neighbours between far scores": np.where(place < 2, most * (1 - 2 * place), steps),
        "one infinite": np.where(place == 0, math.inf, steps),
        "many infinite": np.where(some, math.inf, -most * rng.random(n)),
        "ties at zero": np.maximum(normal, 0.0),
        "all tied": np.full(n, -2.5),
        "every exponent": np.where(some, -1.0, 1.0) * 2.0 ** rng.uniform(-125, 127, n),
    }
    for budget in (1, n // 3, n // 2 + 1, n - 1):

        @jax.jit
        def places(scores: jax.Array, budget: int = budget) -> jax.Array:
            pieces = [scores[n - sum(sizes[i:]) :][:size] for i, size in enumerate(sizes)]
            return jnp.concatenate(triton_lib.pick(pieces, budget, warps=warps).places)

        for name, case in cases.items():
            scores = case.astype(np.float32)
            best = np.sort(np.argsort(-scores, stable=True)[:budget])
            got = np.asarray(places(scores))
            np.testing.assert_array_equal(np.flatnonzero(got >= 0), best, err_msg=name)
            np.testing.assert_array_equal(got[best], np.arange(budget), err_msg=name)


@pytest.mark.parametrize("budget", [1, 2, 7, 40])
@pytest.mark.parametrize("spread", [1e-6, 1.0, 1e30])
def test_threshold_of_any_scores(budget: int, spread: float) -> None:
    rng = np.random.default_rng(budget)
    scores = (rng.standard_normal(64) ** 3 * spread).astype(np.float32)
    scores[rng.integers(0, 64, 8)] = -math.inf
    scores[10:14] = scores[20]
    picked = jax.jit(lambda s: triton_lib.pick([s], budget, warps=4))(scores)
    order = np.lexsort((np.arange(64), -scores))
    best = sorted(i for i in order[:budget] if scores[i] > -math.inf)
    assert np.flatnonzero(np.asarray(picked.places[0]) >= 0).tolist() == best
    assert int(picked.number) == len(best)


@pytest.mark.parametrize("scores", [[], [2.0], [-1.5] * 4, [3.0, 1.0, 2.0]])
def test_threshold_of_too_few_scores_is_the_lowest(scores: list[float]) -> None:
    padded = jnp.asarray(scores + [-math.inf] * (64 - len(scores)), jnp.float32)
    bracket = jax.jit(lambda s: triton_lib.narrow_among([s], 5, warps=4, spare=1))(padded)
    assert int(bracket.number) == len(scores)
    assert float(bracket.threshold) == min(scores, default=math.inf)


@pytest.mark.parametrize("spare", [0, 1, 8, 64])
@pytest.mark.parametrize("ties", [0, 3, 30, 200])
@pytest.mark.parametrize("number", [0, 1, 63, 64, 65, 72, 73, 500])
def test_a_search_goes_on_among_what_it_has_picked(number: int, ties: int, spare: int) -> None:
    rng = np.random.default_rng(number + ties)
    scores = np.full(1024, -math.inf, np.float32)
    scores[rng.permutation(1024)[:number]] = rng.standard_normal(number)
    order = np.lexsort((np.arange(1024), -scores))
    scores[order[max(0, min(60, number) - 1) : min(60 + ties, number)]] = scores[
        order[min(60, number) - 1]
    ]
    budget = 64

    @jax.jit
    def search(scores: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        first = triton_lib.pick([scores], budget, warps=4, spare=spare)
        kept = jnp.where(first.places[0] >= 0, scores, -math.inf)
        last = triton_lib.pick([kept], budget, warps=4, bracket=first.bracket)
        return first.number, first.places[0], last.places[0]

    first_number, first, last = (np.asarray(x) for x in search(jnp.asarray(scores)))
    order = np.lexsort((np.arange(1024), -scores))
    best = np.sort(order[: min(budget, number)])
    assert np.flatnonzero(last >= 0).tolist() == best.tolist()
    assert last[best].tolist() == list(range(len(best)))
    assert (first[best] >= 0).all()
    assert min(budget, number) <= first_number == (first >= 0).sum() <= budget + spare
