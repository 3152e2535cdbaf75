"""Every experiment as a command, at smoke size, and the report of their results."""

import base64
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import jax
import numpy as np
import pytest
from PIL import Image

from benchmarks import (
    ablation,
    evidence_plan,
    fidelity,
    long_horizon,
    longbench,
    niah,
    path_patterns,
    perplexity,
    policy,
    record_paths,
    report,
    sensitivity,
    transfer,
)
from benchmarks.evidence.arguments import SAMPLE_TEXT
from benchmarks.evidence.programs import forget_programs
from benchmarks.evidence.report_tables import policy_picture, policy_results, sections
from benchmarks.evidence.resume import Store
from benchmarks.evidence.shadow import by_bucket
from benchmarks.evidence.smoke_model import smoke_model
from retopk_jax import ReTopK
from retopk_jax.calibration import Target, calibrate_retopk, save_policy
from retopk_jax.errors import ConfigError

SMALL = ["--smoke", "--budgets", "48", "--capacity", "512", "--compile-threads", "1"]
TIMES = ("step_milliseconds", "speed_over_exact")


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Programs here run for milliseconds: optimising them takes longer than it saves."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    forget_programs()


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Results of every experiment, each run once."""
    directory = tmp_path_factory.mktemp("results")
    every = [*SMALL, "--out", str(directory)]
    perplexity.main(every)
    fidelity.main([*every, "--methods", "retopk"])
    ablation.main(every)
    sensitivity.main(every)
    files = [f"{name}={write_policies(directory / name)}" for name in ("smoke-{K}", "again-{K}")]
    policy.main([*every, "--risk", *(file.replace("-{K}=", "=") for file in files)])
    record_paths.main([*every, "--tag", "tau", "--methods", "retopk"])
    record_paths.main([*every, "--tag", "risk", "--methods", f"retopk:risk={directory}/smoke-48"])
    risk = f"retopk:risk={directory}/smoke-{{K}},share=0.1"
    fidelity.main([*every, "--tag", "risk", "--methods", risk])
    long_horizon.main(every)
    forced = ["--part", "forced", "--refresh", "8", "--tag", "risk"]
    long_horizon.main([*every, *forced, "--methods", "retopk", "retopk:share_scan=true", risk])
    transfer.main([*every, "--tag", "two"])
    niah.main([*SMALL[:3], "--out", str(directory), "--lengths", "1024", "--documents", "3"])
    tasks = ["--lengths", "1024", "--documents", "3", "--tasks", "niah_single_2", "--tag", "risk"]
    niah.main([*every[:3], *tasks, "--out", str(directory), "--methods", "exact", "retopk", risk])
    longbench.main([*SMALL[:3], "--out", str(directory)])
    report.main(["--results", str(directory)])
    return directory


def write_policies(path):
    """Maps of expected errors at the budget of `SMALL`."""
    fitted = calibrate_retopk(
        smoke_model(),
        [SAMPLE_TEXT],
        ReTopK(budget=48),
        target=Target("share", 0.2),
        context=200,
        steps=16,
        windows=2,
        rounds=0,
    )
    save_policy(str(path).replace("{K}", "48"), fitted)
    return path


def rows_of(path, **wanted):
    rows = json.loads(path.read_text())["rows"]
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def test_perplexity_compares_eight_methods_on_the_same_documents(out):
    result = json.loads((out / "perplexity.json").read_text())
    assert {row["method"] for row in result["rows"]} == {
        *("full", "exact", "retopk", "streaming", "quest", "sparq", "loki", "tokenselect")
    }
    for row in result["rows"]:
        assert len(row["nll_per_document"]) == 3
        total = np.sum(row["nll_per_document"])
        assert row["perplexity"] == pytest.approx(np.exp(total / row["scored_tokens"]))
        assert row["scored_tokens"] == 3 * 8
        assert ("against_exact" in row) == (row["method"] not in ("full", "exact"))
    settings = result["settings"]
    assert len(settings["documents"]["token_ids_sha256"]) == 64
    assert settings["loki_calibration"]["document"] not in settings["documents"]["names"]
    assert settings["model"]["rope"] == "as trained"
    assert {"machine", "commit", "date"} <= set(result)


def test_policies_are_set_against_the_groups_that_they_scan(out):
    result = json.loads((out / "policy.json").read_text())
    rows = {row["label"].rpartition(" K=")[0] or "full": row for row in result["rows"]}
    assert set(rows) == {
        *("full", "exact", "tau 0.6", "shared 0.6", "tau 0.85", "shared 0.85"),
        *("risk smoke 0.02", "risk smoke 0.2", "risk again 0.02", "risk again 0.2"),
    }
    (default,) = rows_of(out / "sensitivity.json", label="retopk | default K=48")
    assert rows["tau 0.85"]["nll_per_document"] == default["nll_per_document"]
    assert "against_tau" not in rows["tau 0.85"]
    assert "against_tau" not in rows["exact"]
    for name, row in rows.items():
        if name not in ("full", "exact"):
            assert 0 < row["exact_path_rate"] <= row["groups_scanned"] < 1
            assert row["against_exact"].keys() >= {"percent", "low", "high"}
        if name.startswith(("risk", "shared")):
            assert row["exact_path_rate"] == pytest.approx(row["groups_scanned"])
        assert ("predicted_error" in row) == name.startswith("risk")
    few, more = rows["risk smoke 0.02"], rows["risk smoke 0.2"]
    assert few["groups_scanned"] < more["groups_scanned"]
    assert few["predicted_error"] > more["predicted_error"] > 0
    assert few["nll_per_document"] == rows["risk again 0.02"]["nll_per_document"]
    assert [entry["policy"] for entry in result["equal"]] == ["shared", "risk smoke", "risk again"]
    fitted = result["settings"]["calibrations"]
    assert [one["policy"] for one in fitted] == ["risk smoke", "risk again"]
    assert fitted[0]["sizes"]["budget"] == 48
    assert fitted[0]["texts"][0]["file"] == SAMPLE_TEXT.name
    assert "Path policies" in (out / "report.md").read_text(encoding="utf-8")


def test_equal_perplexity_is_held_at_every_larger_share():
    def row(policy, value, groups, low, percent):
        paired = {"against_tau": {"low": low, "percent": percent, "high": 9.0}}
        both = {"length": 1, "budget": 2, "policy": policy, "value": value}
        return {**both, "groups_scanned": groups, **({} if policy == "tau" else paired)}

    rows = [
        row("tau", 0.85, 0.5, 0, 0),
        row("tau", 0.7, 0.1, 1, 2),
        row("risk a", 0.3, 0.31, -2, -1),
        row("risk a", 0.1, 0.11, -1, 1),
        row("risk a", 0.2, 0.21, -1, 0),
        row("risk a", 0.05, 0.06, 1, 2),
        row("risk a", 0.01, 0.02, -2, -1),  # less than one that is worse: chance
        row("risk b", 0.3, 0.3, 1, 2),
    ]
    rows = [
        r if r["policy"] != "tau" or r["value"] != 0.7 else {**r, "against_tau": {}} for r in rows
    ]
    common = {"length": 1, "budget": 2, "groups_by_tau": 0.5}
    assert policy.equal_perplexity(rows) == [
        {**common, "policy": "risk a", "groups": 0.11, "groups_no_worse": 0.21},
        {**common, "policy": "risk b", "groups": None, "groups_no_worse": None},
    ]


def test_files_of_maps_have_names():
    assert policy.named_files(["a/b-{K}"]) == {"risk": "a/b-{K}"}
    assert policy.named_files(["x=a/b", "a=b/c=d"]) == {"risk x": "a/b", "risk a": "b/c=d"}
    with pytest.raises(ConfigError, match="--risk x=c: expected another name than that of b"):
        policy.named_files(["x=b", "x=c"])


def test_paths_are_recorded_as_they_are_taken(out):
    scored = {row["label"]: row for row in rows_of(out / "policy.json")}
    pattern = path_patterns.recorded(out / "paths-tau.npz", 16, 2, 4, 2)
    assert pattern.scans.shape == (16, 2, 4)
    assert pattern.head_share == pytest.approx(scored["tau 0.85 K=48"]["exact_path_rate"])
    assert pattern.group_share == pytest.approx(scored["tau 0.85 K=48"]["groups_scanned"])
    with np.load(out / "paths-risk.npz") as file:
        whole, about = file["scans"], json.loads(str(file["about"]))
    assert (whole == whole[..., :1]).all()  # under risk, groups scan whole
    assert 0 < whole.mean() < 1
    assert about["settings"]["variants"][0]["settings"]["risk"]["theta"] > 0
    with pytest.raises(ConfigError, match="expected retopk"):
        record_paths.main([*SMALL, "--out", str(out), "--methods", "exact"])


def test_ablation_and_sensitivity_start_from_the_same_default(out):
    found = [
        rows_of(out / f"{name}.json", label="retopk | default K=48")[0]["nll_per_document"]
        for name in ("ablation", "sensitivity")
    ]
    assert found[0] == found[1]
    components = {row["component"] for row in rows_of(out / "ablation.json")}
    assert components == {"full", "exact", *ablation.COMPONENTS}
    (free,) = rows_of(out / "ablation.json", component="no fallback")
    assert free["exact_path_rate"] == 0.0
    assert {row["setting"] for row in rows_of(out / "sensitivity.json")} >= {"K", "tau", "T_r"}


def test_fidelity_counts_every_head_step(out):
    (row,) = rows_of(out / "fidelity.json")
    paths = row["by_path"]
    assert paths["all"]["count"] == 2 * 16 * 2 * 4  # documents, steps, layers, heads
    assert sum(paths[p]["count"] for p in ("reuse", "fallback", "refresh")) == paths["all"]["count"]
    assert sum(one["count"] for one in row["reuse_by_similarity"]) == paths["reuse"]["count"]
    assert np.asarray(row["maps"]["fallback_share"]).shape == (2, 4)
    assert 0 <= row["groups_with_fallback"] <= 1


def test_long_horizon_has_both_parts(out):
    forced = rows_of(out / "long_horizon.json", part="teacher-forced")
    free = rows_of(out / "long_horizon.json", part="autoregressive")
    assert len(forced) == 3
    assert {row["refresh"] for row in free} == {0, 8}
    for row in forced:
        last = row["by_position"][-1]
        (exact,) = [r for r in forced if r["method"] == "exact"]
        change = 100 * (row["perplexity"] / exact["perplexity"] - 1)
        assert last["percent_over_exact"] == pytest.approx(change, abs=1e-6)
    for row in free:
        assert [part["to"] for part in row["by_position"]] == [16, 33]
        assert row["by_position"][-1]["kl_up_to"] >= 0


def test_long_horizon_sets_path_policies_against_each_other(out):
    rows = json.loads((out / "long_horizon-risk.json").read_text())["rows"]
    label = "retopk:risk=smoke-{K},share=0.1 | T_r=8 K=48"
    assert [row["label"] for row in rows] == [
        "exact K=48",
        "retopk | T_r=8 K=48",
        "retopk:share_scan=true | T_r=8 K=48",
        label,
    ]
    (default,) = rows_of(out / "long_horizon.json", part="teacher-forced", refresh=8)
    assert rows[1]["nll_per_document"] == default["nll_per_document"]
    assert "against_exact" not in rows[0]
    for row in rows[1:]:
        change = row["by_position"][-1]["percent_over_exact"]
        assert row["against_exact"]["percent"] == pytest.approx(change)
        assert row["groups_scanned"] > 0
    with pytest.raises(ConfigError, match="long_horizon takes retopk"):
        long_horizon.main([*SMALL, "--out", str(out), "--methods", "retopk", "exact"])


def test_divergence_is_averaged_over_positions():
    divergence = np.array([[0.0, 1.0, 2.0, 5.0]])
    agree = np.array([[True, True, False, True]])
    first, last = by_bucket(divergence, agree, 2)
    assert (first["kl"], first["top1_agreement"]) == (0.5, 1.0)
    assert (last["kl"], last["kl_up_to"]) == (3.5, 2.0)
    assert last["top1_agreement_up_to"] == 0.75


def test_niah_reports_every_task_and_their_mean(out):
    result = json.loads((out / "niah.json").read_text())
    for row in result["rows"]:
        expected = 3 * (4 if row["task"] == "niah_multivalue" else 1)
        assert sum(total for _, total in row["found_by_depth"]) == expected
        assert 0 <= row["score"] <= 100
        assert row["score"] == pytest.approx(np.mean(row["score_per_sample"]), abs=0.01)
        assert ("groups_scanned" in row) == (row["method"] == "retopk")
    scores = {}
    for mean in result["headline"]:
        own = [r["score"] for r in result["rows"] if r["label"] == mean["label"]]
        scores[mean["label"]] = np.mean(own)
        assert mean["score"] == pytest.approx(np.mean(own), abs=0.01)
        assert ("against_exact" in mean) == (
            mean["budget"] is not None and mean["method"] != "exact"
        )
    last = result["headline"][-1]
    exact = scores[f"exact K={last['budget']}"]
    assert last["against_exact"]["points"] == pytest.approx(scores[last["label"]] - exact, abs=0.02)
    assert all(one["tokens"][1] <= 1024 - 12 for one in result["settings"]["prompts"].values())


def test_fidelity_sets_the_expected_error_beside_the_true_one(out):
    (row,) = rows_of(out / "fidelity-risk.json")
    assert row["groups_scanned"] == row["groups_with_fallback"] > 0
    assert row["predicted_error"] > 0
    assert row["by_path"]["all"]["relative_error"] > 0
    assert row["by_path"]["fallback"]["relative_error"] == pytest.approx(0, abs=1e-5)
    predicted, true = row["predicted_error_per_document"], row["true_error_per_document"]
    assert len(predicted) == len(true) == row["documents"] == 2
    assert np.mean(predicted) == pytest.approx(row["predicted_error"])
    assert np.mean(true) == pytest.approx(row["by_path"]["all"]["relative_error"], rel=1e-4)
    (default,) = rows_of(out / "fidelity.json")
    assert len(default["true_error_per_document"]) == 2
    assert "predicted_error_per_document" not in default


def test_niah_answers_under_risk(out):
    result = json.loads((out / "niah-risk.json").read_text())
    default, risk = result["headline"][1:]
    assert risk["method"] == "retopk:risk=smoke-{K},share=0.1"
    assert 0 <= risk["groups_scanned"] < default["groups_scanned"]
    assert risk["against_retopk"].keys() == {"points", "low", "high"}
    assert "against_retopk" not in default


def test_longbench_scores_data_sets_then_their_mean(out):
    result = json.loads((out / "longbench.json").read_text())
    assert result["settings"]["records"] == {"hotpotqa": 1, "2wikimqa": 1, "multifieldqa_en": 2}
    for row in result["rows"]:
        assert row["mean"] == pytest.approx(np.mean(list(row["scores"].values())), abs=0.01)


def strip(rows):
    return [{name: v for name, v in row.items() if name not in TIMES} for row in rows]


def test_a_killed_run_goes_on_and_gives_the_same_file(out, tmp_path, monkeypatch):
    few = [*SMALL, "--methods", "full", "exact", "retopk"]
    perplexity.main([*few, "--out", str(tmp_path / "whole")])
    saved, save = [], Store.save

    def killed(self, key, item):
        if len(saved) == 4:
            raise KeyboardInterrupt
        save(self, key, item)
        saved.append(key)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            perplexity.main([*few, "--out", str(tmp_path / "killed")])
    assert not (tmp_path / "killed" / "perplexity.json").exists()
    assert len(list((tmp_path / "killed" / "items").glob("*/*.json"))) == 4

    def counted(self, key, item):
        saved.append(key)
        save(self, key, item)

    monkeypatch.setattr(Store, "save", counted)
    perplexity.main([*few, "--out", str(tmp_path / "killed")])
    assert len(saved) == len(set(saved)) == 12  # nothing was done twice
    whole, resumed = (
        json.loads((tmp_path / name / "perplexity.json").read_text())
        for name in ("whole", "killed")
    )
    assert strip(whole["rows"]) == strip(resumed["rows"])
    assert whole["settings"] == resumed["settings"]


def test_a_plan_stops_in_time_and_goes_on_from_its_archive(tmp_path, capsys):
    archive = tmp_path / "all.tar.gz"
    given = ["--plan", "smoke", "--archive", str(archive), "--compile-threads", "1"]
    evidence_plan.main([*given, "--out", str(tmp_path / "a"), "--minutes", "0.001"])
    assert "goes on from" in capsys.readouterr().err
    evidence_plan.main([*given, "--out", str(tmp_path / "b"), "--steps", "perplexity-a"])
    assert "had been done" in capsys.readouterr().err
    assert (tmp_path / "b" / "perplexity-a.json").is_file()
    with pytest.raises(ConfigError, match="--steps none: expected some of perplexity-a"):
        evidence_plan.main([*given, "--out", str(tmp_path / "c"), "--steps", "none"])


def test_plans_name_maps_that_are_there():
    steps = [step for plan in evidence_plan.PLANS.values() for step in plan]
    named = [
        (file, budget)
        for step in steps
        for file in re.findall(r"\{maps\}/(\S+?\.npz)", step.arguments)
        for budget in re.findall(r"\d+", re.findall(r"--budgets([\d ]+)", step.arguments)[0])
    ]
    assert named
    assert all((evidence_plan.MAPS / file.replace("{K}", k)).is_file() for file, k in named)


def test_labels_of_one_method_share_an_item(tmp_path):
    store = Store(tmp_path, "x", {}, {"a": {"tau": 1}, "b": {"tau": 1}, "c": {"tau": 2}})
    assert store.key("8 tokens", "a") == store.key("8 tokens", "b") != store.key("8 tokens", "c")
    assert store.key("8 tokens", "a") != store.key("9 tokens", "a")


def test_lengths_past_the_models_positions_need_an_explicit_rope(tmp_path):
    given = [*SMALL[:3], "--out", str(tmp_path), "--lengths", "5000", "--methods", "full"]
    with pytest.raises(ConfigError, match=r"4096 positions.*--rope yarn:2"):
        perplexity.main(given)
    with pytest.raises(ConfigError, match="--rope yarn"):
        perplexity.main([*given, "--rope", "yarn"])


def test_texts_are_asked_for(tmp_path):
    given = ["--out", str(tmp_path), "--model", "random weights (smoke)", "--lengths", "1024"]
    with pytest.raises(ConfigError, match="fetch-texts"):
        perplexity.main(given)


class Page(HTMLParser):
    """Counts what a page opens and closes, and keeps its images and cells."""

    def __init__(self):
        super().__init__()
        self.open, self.images, self.tables, self.headings = [], [], [], []
        self.void = {"meta", "img", "br", "link"}

    def handle_starttag(self, tag, attrs):
        if tag == "img":
            self.images.append(dict(attrs)["src"])
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append(0)
        if tag in ("td", "th"):
            self.tables[-1][-1] += 1
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def colors_of(picture):
    return len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0))


def test_report_is_whole(out):
    page = Page()
    page.feed((out / "report.html").read_text(encoding="utf-8"))
    assert not page.open
    assert len(page.headings) == 10  # nine experiments and the settings
    assert len(page.images) >= 7
    for source in page.images:
        kind, _, data = source.partition(",")
        assert kind == "data:image/png;base64"
        with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as picture:
            picture.load()
            assert min(picture.size) > 100
            assert colors_of(picture) > 10  # something is drawn
    for table in page.tables:
        assert len(set(table)) == 1  # every row as wide as the head


def test_report_keeps_variants_of_retopk_apart(out):
    default, other = (json.loads((out / f"niah{tag}.json").read_text()) for tag in ("", "-risk"))
    (section,) = sections([default, other])
    shared, own = section.tables
    (mean,) = (one["score"] for one in default["headline"] if one["label"] == "retopk K=48")
    assert [row[2].split()[0] for row in shared.rows if row[0] == "ReTopK"] == [f"{mean:.1f}"]
    assert "3 samples a task" in own.caption
    assert [row[0] for row in own.rows] == [
        *("Exact Top-K", "ReTopK", "ReTopK (risk=smoke-{K},share=0.1)")
    ]
    assert all(own.rows[2][3:])  # groups, score, both differences
    assert own.rows[1][6] == ""


def test_report_tells_what_policies_scan_at_equal_perplexity(out):
    result = json.loads((out / "policy.json").read_text())
    (section,) = sections([result, result])
    assert len(section.tables) == 4
    costs, equal = section.tables[:2]
    assert len(costs.rows) == len(result["rows"])
    assert [row[0] for row in equal.rows] == [entry["policy"] for entry in result["equal"]]
    for row, entry in zip(equal.rows, result["equal"], strict=True):
        assert row[3] == f"{entry['groups_by_tau']:.1%}"


def test_policies_of_a_model_share_a_picture(out, tmp_path):
    def result(length, budget, kinds, dtype="float32"):
        paired = {"percent": 1.0, "low": 0.5, "high": 2.0}
        row = {"length": length, "budget": budget, "documents": 4, "against_exact": paired}
        return {
            "benchmark": "policy",
            "settings": {"model": {"source": "a/b.gguf", "dtype": dtype, "rope": "as trained"}},
            "rows": [
                {**row, "policy": None, "budget": None},
                *(
                    {**row, "policy": kind, "groups_scanned": n / 9}
                    for kind in kinds
                    for n in (1, 2)
                ),
            ],
        }

    plain, named = ("tau", "shared", "risk"), ("tau", "risk x", "risk y")
    results = [result(8, 2, plain), result(8, 4, plain[:2]), result(8, 2, named)]
    results += [result(16, 4, plain), result(8, 2, plain, "bfloat16"), {"benchmark": "other"}]
    found = policy_results(results)
    assert found == {
        "a/b.gguf, float32": [results[0], results[1], results[3]],
        "a/b.gguf, float32: x, y": [results[2]],
        "a/b.gguf, bfloat16": [results[4]],
    }
    names = [policy_picture(title) for title in found]
    assert names[1] == "policy_a-b.gguf-float32-x-y.png"
    figures = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "save", lambda figure, path: figures.append(figure))
        policy.draw(
            tmp_path / names[0], "title", [one["rows"] for one in found["a/b.gguf, float32"]]
        )
    shown = [axis for axis in figures[0].axes if axis.get_visible()]
    assert [axis.get_title() for axis in shown] == [
        "8 tokens, K=2, 4 documents",
        "8 tokens, K=4, 4 documents",
        "16 tokens, K=4, 4 documents",
    ]
    assert [len(axis.containers) for axis in shown] == [3, 2, 3]
    assert len({axis.get_ylim() for axis in shown}) == 1
    texts = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert texts == ["tau, a head", "tau, a group", "risk, a group"]
    (drawn,) = out.glob("policy_*.png")  # one model, one comparison
    assert drawn.name.endswith("-smoke-again.png")


def test_markdown_links_to_pictures_that_are_there(out):
    text = (out / "report.md").read_text(encoding="utf-8")
    links = re.findall(r"!\[[^]]*\]\(<([^>]+)>\)", text)
    assert len(links) >= 7
    assert all((out / link).is_file() for link in links)
    assert {link for link in links if link.startswith("policy_")}
    assert "Quest" in text
    assert "commit" in text


def test_pictures_are_drawn_from_the_results(out, tmp_path):
    for name in ("niah", "fidelity", "sensitivity", "long_horizon", "policy"):
        shutil.copy(out / f"{name}.json", tmp_path)
    report.main(["--results", str(tmp_path), "--out", str(tmp_path / "page")])
    page = Page()
    page.feed((tmp_path / "page" / "report.html").read_text(encoding="utf-8"))
    assert len(page.images) >= 7
    assert not list(tmp_path.glob("*.png"))


def test_a_directory_without_results_is_refused(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no results"):
        report.main(["--results", str(tmp_path)])


@pytest.mark.long
def test_report_renders_in_a_browser(out, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium here: the page is checked by its parts only")
    page = (out / "report.html").read_text(encoding="utf-8")
    count = (
        "<script>addEventListener('load', () => { document.body.dataset.broken = "
        "[...document.images].filter(i => !i.naturalWidth).length; });</script></body>"
    )
    (tmp_path / "page.html").write_text(page.replace("</body>", count), encoding="utf-8")
    common = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    address = (tmp_path / "page.html").as_uri()
    dump = subprocess.run(
        [*common, "--dump-dom", address], capture_output=True, text=True, timeout=120, check=True
    )
    assert 'data-broken="0"' in dump.stdout
    shot = tmp_path / "page.png"
    subprocess.run(
        [*common, f"--screenshot={shot}", "--window-size=1280,4000", address],
        capture_output=True,
        timeout=120,
        check=True,
    )
    with Image.open(shot) as picture:
        assert colors_of(picture) > 100
