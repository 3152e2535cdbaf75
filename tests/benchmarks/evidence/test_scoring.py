"""Scoring of suffixes: against transformers, whatever the batch, and with few programs."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from benchmarks.evidence.documents import Documents
from benchmarks.evidence.measured import METRICS, Measured, correlation, measure, sums_of
from benchmarks.evidence.methods import Variant, make_variants, method_settings, short_labels
from benchmarks.evidence.programs import Programs
from benchmarks.evidence.resume import Store
from benchmarks.evidence.suffix import Plan, score_documents, summary
from models import load_model
from retopk_jax import ExactTopK, ReTopK
from retopk_jax.errors import ConfigError
from tests.models.checkpoints import write_random

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    return write_random(directory), load_model(directory)


@pytest.fixture(scope="module")
def documents():
    return Documents(["a@0", "b@0", "c@0"], RNG.integers(3, 61, (3, 70)), "0" * 64, "random")


def score(model, documents, variants, plan, directory):
    return score_documents(model, documents, variants, plan, Store(directory, "run", {}), threads=1)


def test_full_attention_scores_as_transformers_does(checkpoint, documents, tmp_path):
    theirs, model = checkpoint
    plan = Plan([48, 64], 9, 2)
    found = score(model, documents, make_variants(["full"], [], None), plan, tmp_path)
    for length in plan.lengths:
        tokens = torch.tensor(documents.ending(length), dtype=torch.long)
        with torch.inference_mode():
            logp = torch.log_softmax(theirs(tokens).logits.double(), dim=-1)
        labels = tokens[:, -plan.scored :]
        each = -logp[:, -plan.scored - 1 : -1].gather(2, labels[..., None])[..., 0]
        entries = found.documents[length, "full"]
        np.testing.assert_allclose(
            [entry["nll"] / plan.scored for entry in entries], each.mean(dim=1), atol=1e-3
        )


def test_losses_do_not_depend_on_the_batch_or_the_capacity(checkpoint, documents, tmp_path):
    _, model = checkpoint
    variants = make_variants(["retopk:capacity=4,recall=2,window=4"], [12], None)
    label = variants[0].label
    one = score(model, documents, variants, Plan([64], 9, 1), tmp_path / "a")
    two = score(model, documents, variants, Plan([64], 9, 2, 4, capacity=512), tmp_path / "b")
    for a, b in zip(one.documents[64, label], two.documents[64, label], strict=True):
        assert a["nll"] == pytest.approx(b["nll"], abs=1e-3)
        assert sum(b["nll_by_bucket"]) == pytest.approx(b["nll"])
        assert b["tokens_by_bucket"] == [2, 2, 2, 2]
        assert a["paths"] == b["paths"]
        assert sum(a["paths"]) == 8 * 2 * 4  # steps, layers, heads
    shares = summary(one.documents[64, label])["path_shares"]
    assert sum(shares.values()) == pytest.approx(1.0)


def test_tau_and_refresh_do_not_recompile(checkpoint, documents):
    _, model = checkpoint
    programs = Programs(model, 1, 256, 32)
    for settings in ("tau=0.5", "tau=0.9", "refresh=0", "refresh=16,tau=-1.0"):
        (variant,) = make_variants([f"retopk:{settings}"], [16], None)
        programs.prepare_score(variant.method, 5)
    assert len(programs._jobs) == 2  # one to start, one to score
    (variant,) = make_variants(["retopk:recall=2"], [16], None)
    programs.prepare_score(variant.method, 5)
    assert len(programs._jobs) == 4
    programs.cancel()


def test_a_suffix_as_long_as_the_document_is_refused(checkpoint, documents, tmp_path):
    _, model = checkpoint
    with pytest.raises(ConfigError, match="suffix of 64 tokens, documents of 64"):
        score(model, documents, make_variants(["full"], [], None), Plan([64], 64, 1), tmp_path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none", "expected one of full, exact"),
        ("retopk:taw=1", "retopk has no taw"),
        ("retopk:tau", "expected field=value"),
        ("retopk:recall=99", "recall=99"),
    ],
)
def test_unknown_methods_and_settings_are_named(name, reason):
    with pytest.raises(ConfigError, match=reason):
        make_variants([name], [64], None)


def test_labels_in_pictures_are_short():
    long = {
        "full": "full",
        "exact K=64": "exact K=64",
        "retopk | T_r=8 K=64": "retopk | T_r=8 K=64",
        "retopk:share_scan=true K=64": "share_scan K=64",
        "retopk:risk=a/maps-{K}.npz,share=0.1 K=64": "risk, share 0.1 K=64",
        "retopk:tau=0.9,risk=a/maps-{K}.npz | T_r=8 K=64": "tau 0.9, risk | T_r=8 K=64",
    }
    assert short_labels(long) == long
    two = ["retopk:risk=a,share=0.1 K=64", "retopk:risk=b,share=0.1 K=64"]
    assert list(short_labels(two).values()) == [
        *("risk a, share 0.1 K=64", "risk b, share 0.1 K=64")
    ]


def test_budgets_are_split_as_the_source_splits_512():
    names = ["streaming", "tokenselect", "sparq"]
    named = {v.name: method_settings(v.method) for v in make_variants(names, [512], None)}
    assert (named["streaming"]["sinks"], named["streaming"]["recent"]) == (64, 448)
    select = named["tokenselect"]
    assert (select["initial"], select["selected"], select["local"]) == (64, 416, 32)
    assert named["sparq"]["local"] == 128
    for budget in (64, 100, 128):
        variants = make_variants(names, [budget], None)
        assert all(getattr(variant.method, "budget") == budget for variant in variants)  # noqa: B009


def test_measures_equal_those_worked_out_one_by_one():
    batch, heads, groups, slots, dim, budget = 2, 4, 2, 20, 8, 5
    q, keys, values = (
        RNG.normal(size=shape).astype(np.float32)
        for shape in ((batch, heads, dim), *[(batch, groups, slots, dim)] * 2)
    )
    lengths = np.array([20, 13], np.int32)
    out = RNG.normal(size=(batch, heads, dim)).astype(np.float32)
    support = np.full((batch, heads, 6), -1, np.int32)
    for b in range(batch):
        for h in range(heads):
            support[b, h, :4] = np.sort(RNG.choice(lengths[b], 4, replace=False))
    given = map(jnp.asarray, (q, keys, values, lengths, support, out))
    found = measure(*given, budget=budget)
    for b in range(batch):
        for h in range(heads):
            scores = keys[b, h // 2, : lengths[b]].astype(np.float64) @ q[b, h] / np.sqrt(dim)
            p = np.exp(scores) / np.exp(scores).sum()
            exact = set(np.argsort(-scores)[:budget].tolist())
            mine = {int(i) for i in support[b, h] if i >= 0}
            weights = np.array([p[i] for i in sorted(exact)])
            best = weights @ values[b, h // 2, sorted(exact)] / weights.sum()
            two = [np.where(np.isin(np.arange(len(p)), list(s)), p, 0) for s in (mine, exact)]

            def cosine(x, y):
                return x @ y / np.linalg.norm(x) / np.linalg.norm(y)

            expected = {
                "support_recall": len(exact & mine) / budget,
                "retained_mass": two[0].sum(),
                "exact_mass": two[1].sum(),
                "relative_mass": two[0].sum() / two[1].sum(),
                "distribution_cosine": cosine(*two),
                "output_cosine": cosine(out[b, h].astype(np.float64), best),
                "relative_error": np.linalg.norm(out[b, h] - best) / np.linalg.norm(best),
            }
            for name, value in expected.items():
                assert float(found[name][b, h]) == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_an_exact_method_is_measured_as_exact(checkpoint, documents, tmp_path):
    _, model = checkpoint
    inner = ReTopK(budget=12, capacity=4, recall=2, window=4)
    variants = [
        Variant("exact", "exact", 12, Measured(ExactTopK(12), 12)),
        Variant("retopk", "retopk", 12, Measured(inner, 12)),
    ]
    kept = {}

    def extra(state, count):
        kept[len(kept)] = [
            np.asarray(layer.sums)[:count].sum(axis=(0, 3)) for layer in state.layers
        ]
        return {"groups": [np.asarray(layer.groups)[:count].tolist() for layer in state.layers]}

    found = score_documents(
        model,
        documents,
        variants,
        Plan([64], 9, 3),
        Store(tmp_path, "run", {}),
        threads=1,
        extra=extra,
    )
    metric = dict(zip(METRICS, np.sum(kept[0], axis=(0, 1, 2)), strict=True))
    assert metric["count"] == 8 * 3 * 2 * 4  # steps, documents, layers, heads
    for name in ("support_recall", "relative_mass", "distribution_cosine", "output_cosine"):
        assert metric[name] == pytest.approx(metric["count"], rel=1e-4)
    assert metric["relative_error"] == pytest.approx(0, abs=1e-2)
    # Each head-step is counted once, on its own path; the exact ones are exact.
    paths = np.sum([entry["paths"] for entry in found.documents[64, "retopk"]], axis=0)
    by_path = np.sum(kept[1], axis=(0, 1))  # [paths, metrics]
    np.testing.assert_array_equal(by_path[:, 0], paths)
    assert by_path[1, METRICS.index("support_recall")] == pytest.approx(paths[1], rel=1e-4)
    groups = np.asarray(found.batches[64, "retopk"][0]["groups"])  # [layers, B, G, 2]
    assert groups[..., 1].sum() == 8 * 3 * 2 * 2
    assert paths[1] / 2 <= groups[..., 0].sum() <= paths[1]


def test_true_errors_are_those_of_a_row_whatever_the_batch(checkpoint, documents, tmp_path):
    _, model = checkpoint
    method = Measured(ReTopK(budget=12, capacity=4, recall=2, window=4, tau=-1.0), 12)
    variants = [Variant("retopk", "retopk", 12, method)]
    errors = {}
    for rows in (1, 2, 3):
        found = score_documents(
            model,
            documents,
            variants,
            Plan([64], 9, rows),
            Store(tmp_path / str(rows), "run", {}),
            threads=1,
            extra=lambda state, count: sums_of(state.layers, count),
        )
        batches = found.batches[64, "retopk"]
        errors[rows] = [one for batch in batches for one in batch["errors"]]
        count, error = np.sum([batch["sums"] for batch in batches], axis=(0, 1, 2, 3, 4))[
            [METRICS.index("count"), METRICS.index("relative_error")]
        ]
        assert np.mean(errors[rows]) == pytest.approx(error / count, rel=1e-4)
    assert len(set(errors[1])) == 3
    assert errors[2] == pytest.approx(errors[1], rel=1e-2)
    assert errors[3] == pytest.approx(errors[1], rel=1e-2)


def test_correlation_of_sums_is_pearsons():
    x, y = RNG.normal(size=50), RNG.normal(size=50)
    y += x
    sums = np.zeros(len(METRICS))
    for name, values in {
        "count": np.ones(50),
        "similarity": x,
        "relative_error": y,
        "similarity_squared": x * x,
        "error_squared": y * y,
        "similarity_times_error": x * y,
    }.items():
        sums[METRICS.index(name)] = values.sum()
    assert correlation(sums) == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert correlation(np.zeros(len(METRICS))) is None
