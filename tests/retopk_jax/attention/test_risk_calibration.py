"""Maps of a reuse's expected error: how they are fitted, kept, refused and used."""

import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.evidence.methods import check_policies, make_variants
from retopk_jax import ReTopK, cli, generate
from retopk_jax.attention.retopk import FALLBACK, REFRESH, REUSE
from retopk_jax.calibration import (
    RiskPolicy,
    Target,
    calibrate_retopk,
    load_policy,
    save_policy,
)
from retopk_jax.calibration.isotonic import BIN_SAMPLES, descending_knots
from retopk_jax.calibration.retopk import Curve, fit_maps, observed, threshold_error
from retopk_jax.calibration.shadow import Samples, collect
from retopk_jax.errors import ConfigError, PromptError
from retopk_jax.prefill import prefill
from retopk_jax.teacher_forcing import score_continuation
from tests.retopk_jax.toy import ToyModel, toy_model
from tests.retopk_jax_cli.checkpoint import write_tiny

WORDS = "It is a truth universally acknowledged, that a single man in possession of a good fortune "
SMALL = ReTopK(budget=8, capacity=6, recall=2, window=4, tau=0.8, refresh=7)
PLAN: dict[str, Any] = {
    "context": 40,
    "steps": 16,
    "windows": 2,
    "rows": 2,
    "rounds": 1,
    "knots": 6,
}


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Programs here run for milliseconds: optimising them takes longer than it saves."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


# ---- the fit -------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 3000), ties=st.booleans())
@settings(max_examples=40, deadline=None)
def test_maps_are_monotone_and_finite_for_any_data(seed: int, count: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, count)
    x = np.round(x, 1) if ties else x
    y = np.abs(rng.normal(size=count)) * rng.choice([0, 1, 1e6], count)
    knots, fit = descending_knots(x, y, 16)
    assert knots.shape == fit.shape == (16,)
    assert knots.dtype == fit.dtype == np.float32
    assert np.isfinite(knots).all()
    assert np.isfinite(fit).all()
    assert (np.diff(knots) >= 0).all()
    assert (np.diff(fit) <= 0).all()
    assert fit.min() >= y.min() * (1 - 1e-6)
    assert fit.max() <= y.max() * (1 + 1e-6)


def test_constant_errors_and_one_sample() -> None:
    knots, fit = descending_knots(np.linspace(0, 1, 500), np.full(500, 0.25), 8)
    np.testing.assert_array_equal(fit, np.full(8, 0.25, np.float32))
    knots, fit = descending_knots(np.array([0.5]), np.array([0.125]), 8)
    np.testing.assert_array_equal(knots, np.full(8, 0.5, np.float32))
    np.testing.assert_array_equal(fit, np.full(8, 0.125, np.float32))


def test_few_knots_follow_the_pooled_averages() -> None:
    """Pool-adjacent-violators worked out by hand, on bins of equal samples."""
    centres = np.array([0.1, 0.2, 0.3, 0.4, 0.5])
    means = np.array([4.0, 1.0, 3.0, 0.5, 0.75])
    x, y = np.repeat(centres, BIN_SAMPLES), np.repeat(means, BIN_SAMPLES)
    knots, fit = descending_knots(x, y, 8)
    np.testing.assert_allclose(
        np.interp(centres, knots, fit), [4.0, 2.0, 2.0, 0.625, 0.625], rtol=1e-6
    )
    # Three knots: the ends, and where the line between them errs most.
    knots, fit = descending_knots(x, y, 3)
    np.testing.assert_allclose(knots, [0.1, 0.2, 0.5], rtol=1e-6)
    np.testing.assert_allclose(fit, [4.0, 2.0, 0.625], rtol=1e-6)


def test_a_smooth_curve_is_found_again() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 1, 20_000)
    knots, fit = descending_knots(x, (1 - x) ** 2 + 0.05 * rng.normal(size=x.size), 16)
    at = np.linspace(0.02, 0.98, 50)
    np.testing.assert_allclose(np.interp(at, knots, fit), (1 - at) ** 2, atol=0.03)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_samples_that_are_not_finite_are_refused(bad) -> None:
    with pytest.raises(ConfigError, match="1 of 3 samples are not finite"):
        descending_knots(np.array([0.1, 0.2, 0.3]), np.array([1.0, bad, 1.0]), 4)
    with pytest.raises(ConfigError, match="expected one or more"):
        descending_knots(np.zeros(0), np.zeros(0), 4)
    error = np.full((3, 1, 2), 0.5, np.float32)
    error[1, 0, 1] = bad
    samples = Samples(np.full_like(error, 0.3), error, np.zeros(error.shape, np.int32))
    with pytest.raises(ConfigError, match="layer 0, head 1: 1 of 3 samples are not finite"):
        fit_maps(samples, 4)


# ---- theta ---------------------------------------------------------------------------------


def drawn_samples(count: int = 400) -> Samples:
    rng = np.random.default_rng(1)
    rho = rng.uniform(0, 1, (count, 2, 4)).astype(np.float32)
    error = ((1 - rho) * rng.uniform(0.5, 1.5, rho.shape)).astype(np.float32)
    path = np.where(rho < 0.3, FALLBACK, REUSE).astype(np.int32)
    path[::10] = REFRESH
    rho[5, 1, 2] = -np.inf
    return Samples(rho, error, path)


def by_hand(samples: Samples, theta: float, x, y) -> tuple[float, float]:
    """Share of groups above theta and mean error of the others, step by step."""
    scanned = steps = 0
    errors = 0.0
    for n, layer in zip(*np.nonzero(samples.free), strict=True):
        for first in (0, 2):
            heads = range(first, first + 2)
            rho, error = samples.similarity[n, layer], samples.error[n, layer]
            risk = sum(np.interp(rho[h], x[layer, h], y[layer, h]) for h in heads)
            steps += 1
            scanned += risk > theta
            errors += 0 if risk > theta else sum(float(error[h]) for h in heads)
    return scanned / steps, errors / (2 * steps)


def test_theta_meets_its_target() -> None:
    samples = drawn_samples()
    x, y = fit_maps(samples, 8)
    curve = Curve.of(samples, x, y, groups=2)
    tenth = curve.theta_for(Target.parse("share=0.1"), samples)
    halfway = tenth + 1e-5  # no sum lies between: rounding of the sums cannot matter
    share, error = by_hand(samples, halfway, x, y)
    assert share == pytest.approx(0.1, abs=2 / len(curve.risks))
    assert curve.at(halfway) == pytest.approx((share, error), rel=1e-4)
    bounded = curve.theta_for(Target.parse("error=0.05"), samples)
    assert curve.at(bounded)[1] <= 0.05
    above = curve.risks[np.searchsorted(curve.risks, bounded, side="right")]
    assert curve.at(float(above))[1] > 0.05
    same = curve.theta_for(Target.parse("tau=0.6"), samples)
    free = samples.free
    heads = np.where(samples.similarity[free] >= 0.6, samples.error[free], 0).mean()
    assert threshold_error(samples, 0.6) == pytest.approx(heads, rel=1e-5)
    assert curve.at(same)[1] == pytest.approx(heads, rel=0.02)
    assert curve.theta_of_error(0.0) == -math.inf
    assert curve.theta_of_share(1.0) == -math.inf
    assert curve.at(curve.theta_of_share(0.0))[0] == 0
    points = curve.points()
    assert (np.diff(points[:, 0]) > 0).all()
    assert (np.diff(points[:, 1]) < 0).all()
    assert (np.diff(points[:, 2]) < 0).all()


def test_what_a_decode_did_is_counted_without_refreshes() -> None:
    samples = drawn_samples(40)
    seen = observed(samples, groups=2)
    known = samples.path[np.arange(40) % 10 > 0]
    assert seen["heads_exact"] == pytest.approx((known == FALLBACK).mean())
    grouped = known.reshape(-1, 2, 2, 2)
    assert seen["groups_scanned"] == pytest.approx((grouped == FALLBACK).any(axis=3).mean())


@pytest.mark.parametrize("text", ["tau", "share=2", "share=-1", "error=nan", "speed=1", "tau=x"])
def test_bad_targets_are_refused(text) -> None:
    with pytest.raises(ConfigError, match="target"):
        Target.parse(text)


# ---- the decode ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> ToyModel:
    return toy_model()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(WORDS * 4, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def policy(model, text) -> RiskPolicy:
    return calibrate_retopk(model, [text], SMALL, target=Target.parse("share=0.2"), **PLAN)


def test_the_shadow_leaves_the_decode_as_it_is(model) -> None:
    """Paths are those of the method alone."""
    tokens = model.tokenizer.encode(WORDS * 2)
    prompts, fed = [tokens[:40], tokens[7:60]], jnp.asarray([tokens[40:57], tokens[60:77]])

    def read():
        return prefill(model, prompts, new_tokens=17, tail_queries=6).context

    shared = dataclasses.replace(SMALL, share_scan=True)
    samples, again = collect(model, shared, read(), fed)
    assert again.cache.lengths.tolist() == [40, 53]
    assert samples.similarity.shape == (32, 2, 6)
    alone = score_continuation(model, read(), shared, fed)
    for row, paths in enumerate(alone.paths or []):
        mine = samples.path[16 * row : 16 * (row + 1)]
        for path in (REUSE, FALLBACK, REFRESH):
            counted = np.array(paths.by_head)[..., path]
            np.testing.assert_array_equal((mine == path).sum(axis=0), counted)
    assert (samples.path == FALLBACK).any()
    assert samples.error[samples.path == FALLBACK].max() > 0  # of the reuse that was not taken


def test_the_shadows_metric_is_a_quadratic_form(model) -> None:
    """Beside NumPy: of |d|² it makes |W d|², of its own identity the plain distance."""
    tokens = model.tokenizer.encode(WORDS * 2)

    def seen(metric) -> np.ndarray:
        context = prefill(model, [tokens[:40]], new_tokens=9, tail_queries=6).context
        return collect(model, SMALL, context, jnp.asarray([tokens[40:49]]), metric)[0].error

    rng = np.random.default_rng(0)
    eye = np.broadcast_to(np.eye(16, dtype=np.float32), (2, 6, 16, 16))
    distance = seen(jnp.asarray(eye))
    np.testing.assert_allclose(seen(jnp.asarray(9 * eye)), 3 * distance, rtol=1e-5, atol=1e-7)
    scaled = eye * np.array([4.0, 0.25], np.float32)[:, None, None, None]
    np.testing.assert_allclose(
        seen(jnp.asarray(scaled)), distance * np.array([2, 0.5])[:, None], rtol=1e-5, atol=1e-7
    )
    axes = []
    for axis in range(16):  # d² of every dimension, by its own metric
        one = np.zeros((16, 16), np.float32)
        one[axis, axis] = 1
        axes.append(seen(jnp.asarray(np.broadcast_to(one, eye.shape))))
    np.testing.assert_allclose(np.sqrt(np.square(axes).sum(0)), distance, rtol=1e-5, atol=1e-7)
    heads = rng.normal(size=(2, 6, 16, 5)).astype(np.float32)
    mixed = seen(jnp.asarray(np.einsum("lhde,lhfe->lhdf", heads, heads)))
    largest = np.linalg.svd(heads, compute_uv=False)[..., 0]
    assert (mixed <= largest * distance * (1 + 1e-4) + 1e-6).all()
    assert (mixed > 0).any()


def test_calibrates_under_its_own_feedback(model, policy, text) -> None:
    first, second = policy.provenance["rounds"]
    assert 0 < second["groups_scanned"] < first["groups_scanned"]
    assert policy.similarity.shape == policy.error.shape == (2, 6, 6)
    policy.risk().check(model.decoder.geometry)
    assert policy.provenance["sizes"] == {
        "budget": 8,
        "capacity": 6,
        "recall": 2,
        "window": 4,
        "refresh": 7,
    }
    assert policy.provenance["settings"]["windows"] == 2
    assert len(policy.provenance["texts"][0]["sha256"]) == 64
    place = np.searchsorted(-policy.points[:, 1], -policy.theta)
    assert policy.points[place, 0] == pytest.approx(0.2, abs=0.03)
    assert policy.theta_at(0.2) == pytest.approx(policy.theta, rel=0.1)
    with pytest.raises(ConfigError, match=r"share=0\.99"):
        policy.theta_at(0.99)


def test_windows_may_fill_a_models_positions(text) -> None:
    plan = {**PLAN, "windows": 1, "rounds": 0}
    full = calibrate_retopk(
        toy_model(max_positions=56), [text], SMALL, target=Target.parse("share=0.2"), **plan
    )
    assert full.provenance["settings"]["windows"] == 1


def test_generates_by_a_policy(model, policy) -> None:
    (loose,) = generate(
        model, WORDS, attention=policy.method(), max_new_tokens=20, ignore_eos=True
    ).completions
    assert loose.paths is not None
    assert loose.paths.mean_predicted_error is not None
    assert 0 < loose.paths.mean_predicted_error < 1
    always = policy.method(risk=policy.risk(-math.inf))
    (exact,) = generate(
        model, WORDS, attention=always, max_new_tokens=20, ignore_eos=True
    ).completions
    assert exact.paths is not None
    assert exact.paths.group_share == 1
    assert loose.paths.group_share is not None
    assert 0 < loose.paths.group_share < 1


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"context": 4090}, ConfigError, "the model has 4096 positions"),
        ({"context": 500}, PromptError, "a window of context, steps and a label takes 517"),
        ({"knots": 1}, ConfigError, "knots=1"),
        ({"rounds": -1}, ConfigError, "rounds=-1"),
        ({"error": "output"}, ConfigError, "error='output': expected one of head, residual"),
        ({"error": "residual"}, ConfigError, "ToyModel does not tell its projections"),
    ],
)
def test_bad_plans_are_refused(model, text, changes, error, words) -> None:
    with pytest.raises(error, match=words):
        calibrate_retopk(
            model, [text], SMALL, target=Target.parse("tau=0.8"), **{**PLAN, **changes}
        )


# ---- the file ------------------------------------------------------------------------------


def test_what_is_read_is_what_was_written(policy, tmp_path) -> None:
    path = tmp_path / "toy.policy"
    save_policy(path, policy)
    assert [p.name for p in tmp_path.iterdir()] == ["toy.policy"]
    read = load_policy(path)
    assert (read.theta, read.provenance) == (policy.theta, policy.provenance)
    for name in ("similarity", "error", "points"):
        np.testing.assert_array_equal(getattr(read, name), getattr(policy, name))


@pytest.mark.parametrize("kept", [0, 10, 0.5, 0.999])
def test_a_truncated_file_is_refused(policy, tmp_path, kept) -> None:
    path = tmp_path / "toy.policy"
    save_policy(path, policy)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    with pytest.raises(ConfigError, match="truncated, or not a policy"):
        load_policy(path)


@pytest.mark.parametrize("what", ["similarity", "error", "theta", "points", "provenance"])
def test_an_edited_file_is_refused(policy, tmp_path, what) -> None:
    """Written anew by NumPy, so that the archive itself is sound."""
    path = tmp_path / "toy.policy"
    save_policy(path, policy)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    if what == "provenance":
        edited = json.loads(str(arrays[what]))
        arrays[what] = np.array(json.dumps({**edited, "model": "another"}, sort_keys=True))
    else:
        arrays[what] = arrays[what] * 1.01
    with path.open("wb") as file:
        np.savez(file, **arrays)
    with pytest.raises(ConfigError, match="changed after it was written"):
        load_policy(path)


def test_another_model_or_size_is_refused(model, policy) -> None:
    policy.check_model(model)
    with pytest.raises(ConfigError, match="policy fitted on ToyModel: the weights of ToyModel"):
        policy.check_model(toy_model(seed=1))
    policy.check_sizes(policy.method(refresh=3, recall_by="recency"))
    for name, value in {"budget": 9, "capacity": 7, "recall": 1, "window": 3}.items():
        with pytest.raises(ConfigError, match=f"{name}={value}: the policy was fitted with"):
            policy.check_sizes(policy.method(**{name: value}))


# ---- commands ------------------------------------------------------------------------------


def test_experiments_take_a_policy(model, policy, tmp_path) -> None:
    save_policy(tmp_path / "toy-8", policy)
    file = tmp_path / "toy-{K}"
    names = [f"retopk:risk={file}", f"retopk:risk={file},share=0.1", f"retopk:risk={file},theta=2"]
    variants: list[Any] = make_variants(names, [8], None)
    assert [v.method.risk.theta for v in variants] == [policy.theta, policy.theta_at(0.1), 2.0]
    assert variants[0].label == "retopk:risk=toy-{K} K=8"
    assert [v.method.capacity for v in variants] == [6, 6, 6]
    described = [v.description()["settings"]["risk"] for v in variants]
    assert described[0]["maps"] == described[2]["maps"]
    json.dumps(described)
    check_policies(names, [8], model)
    with pytest.raises(ConfigError, match="the weights of"):
        check_policies(names, [8], toy_model(seed=1))
    check_policies([names[0] + ",unchecked=true"], [8], toy_model(seed=1))
    with pytest.raises(ConfigError, match="toy-9: No such file"):
        make_variants(names, [9], None)
    fixed = f"retopk:risk={tmp_path / 'toy-8'}"
    with pytest.raises(ConfigError, match="budget=9: the policy was fitted with 8"):
        make_variants([fixed], [9], None)
    (other,) = make_variants([fixed + ",unchecked=true"], [9], None)
    assert other.description()["settings"]["budget"] == 9
    with pytest.raises(ConfigError, match="under risk has no tau"):
        make_variants([fixed + ",tau=0.5"], [8], None)


def run(*args) -> int:
    return cli.main([*map(str, args), "--no-compilation-cache"])


def test_calibrate_then_generate(text, tmp_path, capsys) -> None:
    tiny, policy, out = write_tiny(tmp_path / "tiny"), tmp_path / "policy", tmp_path / "out.json"
    sizes = ["--budget", 8, "--capacity", 6, "--recall", 2, "--window", 4, "--refresh", 7]
    plan = ["--context", 40, "--steps", 12, "--windows", 2, "--rounds", 0, "--target", "share=0.3"]
    model = ["--method", "retopk", "--model", tiny, "--text", text]
    assert run("calibrate", *model, *sizes, *plan, "--out", policy) == 0
    assert "theta for the target" in capsys.readouterr().err
    decode = ["--prompt", WORDS, "--max-new-tokens", 12, "--ignore-eos", "--json", out]
    base = ["generate", "--model", tiny, *decode, "--risk", policy]
    assert run(*base) == 0
    report = json.loads(out.read_text())
    assert report["attention"]["budget"] == report["calibration"]["sizes"]["budget"] == 8
    assert report["attention"]["risk"]["theta"] == load_policy(policy).theta
    assert 0 < report["group_share"] < 1
    assert report["predicted_error"] > 0
    assert run(*base, "--risk-theta=-inf") == 0
    assert json.loads(out.read_text())["group_share"] == 1
    assert run(*base, "--budget", 9) == 2
    assert "budget=9: the policy was fitted with 8" in capsys.readouterr().err
    assert run(*base, "--tau", 0.5) == 2
    assert "--tau 0.5 has no effect under --risk" in capsys.readouterr().err
    head, residual = load_policy(policy), tmp_path / "residual"
    fitted = [*sizes, *plan, "--error", "residual", "--out", residual]
    assert run("calibrate", *model, *fitted) == 0
    assert load_policy(residual).provenance["error"].startswith("residual: ")
    assert head.provenance["error"].startswith("head: ")
    assert (load_policy(residual).error != head.error).any()
    other = write_tiny(tmp_path / "other", tie_word_embeddings=True)
    elsewhere = ["generate", "--model", other, *decode, "--risk", policy]
    assert run(*elsewhere) == 2
    assert "the weights of" in capsys.readouterr().err
    assert run(*elsewhere, "--budget", 9, "--risk-unchecked", "yes") == 0
    assert json.loads(out.read_text())["attention"]["budget"] == 9


def test_options_are_checked_before_a_model_is_loaded(text, tmp_path, capsys) -> None:
    base = ["calibrate", "--model", "/nowhere/model", "--text", text, "--out", tmp_path / "out"]
    for options, words in (
        (["--method", "loki", "--rounds", 1], "--rounds does not apply to --method loki"),
        (["--method", "loki", "--error", "head"], "--error does not apply to --method loki"),
        (["--method", "retopk", "--target", "fast"], "target 'fast'"),
        (["--method", "retopk", "--recall", 99], "recall=99"),
        (["--method", "retopk", "--steps", 0], "--steps=0"),
    ):
        assert run(*base, *options) == 2
        assert words in capsys.readouterr().err
    assert run("generate", "--model", "/nowhere/model", "--prompt", "x", "--risk-theta", 1) == 2
    assert "give --risk FILE" in capsys.readouterr().err
