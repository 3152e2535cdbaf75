"""Tables of a report, made from result files: the source's form, beside the source's figures."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.evidence.methods import ALL, title

Result = Mapping[str, Any]

SPEED = "Speed is that of a whole decode step over Exact Top-K's, at this batch size."


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        caption: above it.
        head: of the columns.
        rows: of cells.
    """

    caption: str
    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Section:
    """Part of a report.

    Attributes:
        heading: above it.
        source: what the source reports.
        tables: ours.
        images: file names of pictures.
        remarks: sentences below.
    """

    heading: str
    source: str
    tables: list[Table]
    images: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def sections(results: Sequence[Result]) -> list[Section]:
    """A section a kind of experiment, those without a result left out."""
    makers = {
        "perplexity": perplexity_section,
        "niah": niah_section,
        "longbench": longbench_section,
        "fidelity": fidelity_section,
        "ablation": ablation_section,
        "sensitivity": sensitivity_section,
        "policy": policy_section,
        "long_horizon": long_horizon_section,
        "transfer": transfer_section,
    }
    found = []
    for name, make in makers.items():
        those = [result for result in results if result.get("benchmark") == name]
        if those:
            found.append(make(those))
    return found


def perplexity_section(results: Sequence[Result]) -> Section:
    """Table 1, PG19."""
    tables, remarks = [], []
    for key, rows in _grouped(results).items():
        lengths = sorted({row["length"] for row in rows})
        table_rows = []
        for name, budget in _ordered(rows):
            cells = []
            for length in lengths:
                row = _one(rows, length=length, method=name, budget=budget)
                cells.append("" if row is None else _perplexity_cell(row))
            table_rows.append([title(name), _number(budget), *cells])
        caption = f"{key}: perplexity, and change against Exact Top-K at the same K [95 %]"
        tables.append(Table(caption, ["method", "K", *(f"{n:,}" for n in lengths)], table_rows))
        tables.append(_path_table(rows, key))
        remarks += _lost_perplexity(rows)
    return Section(
        "Perplexity of a teacher-forced suffix (source: Table 1, PG19)",
        "Source, Qwen2.5-7B on PG19, K=512, 16K to 128K: ReTopK's two settings are first and "
        "second among approximate methods; +0.50 % over Exact Top-K at 128K with tau .85.",
        tables,
        [],
        remarks,
    )


def niah_section(results: Sequence[Result]) -> Section:
    """Table 1, NIAH; results that set variants of ReTopK against each other have their own."""
    tables, images, remarks = [], [], []
    variants = [result for result in results if _of_variants(result)]
    for key, rows in _grouped([one for one in results if not _of_variants(one)]).items():
        lengths = sorted({row["length"] for row in rows})
        tasks = list(dict.fromkeys(row["task"] for row in rows))
        table_rows, means = [], {}
        for name, budget in _ordered(rows):
            cells = []
            for length in lengths:
                here = [
                    row
                    for row in rows
                    if (row["length"], row["method"], row["budget"]) == (length, name, budget)
                ]
                if len({row["task"] for row in here}) < len(tasks):
                    cells.append("")
                    continue
                mean = sum(row["score"] for row in here) / len(here)
                means[name, budget, length] = mean
                parts = " / ".join(f"{row['score']:.0f}" for row in here)
                cells.append(f"{mean:.1f} ({parts})")
            table_rows.append([title(name), _number(budget), *cells])
        caption = f"{key}: mean of the tasks ({' / '.join(tasks)}), string_match_all"
        tables.append(Table(caption, ["method", "K", *(f"{n:,}" for n in lengths)], table_rows))
        for (name, budget, length), mean in means.items():
            ours = means.get(("retopk", budget, length))
            if ours is not None and name not in ("full", "exact", "retopk") and mean > ours:
                remarks.append(
                    f"{title(name)} finds more than ReTopK at K={budget}, {length:,} tokens: "
                    f"{mean:.1f} against {ours:.1f}."
                )
    tables += [_variants_table(result) for result in variants]
    for result in results:
        images += result.get("plots", [])
    return Section(
        "Facts hidden in long texts (source: Table 1, RULER NIAH)",
        "Source, Qwen2.5-7B-Instruct-1M, K=512, 16K to 128K: ReTopK first or second among "
        "approximate methods at every length; StreamingLLM 2.5 to 3.8.",
        tables,
        images,
        remarks,
    )


def longbench_section(results: Sequence[Result]) -> Section:
    """Table 1, LongBench."""
    tables = []
    for result in results:
        names = list(result["rows"][0]["scores"])
        counts = ", ".join(f"{n} {name}" for name, n in result["settings"]["records"].items())
        rows = [
            [
                title(row["method"]),
                _number(row["budget"]),
                *(f"{row['scores'][name]:.2f}" for name in names),
                f"{row['mean']:.2f}",
            ]
            for row in result["rows"]
        ]
        files = ", ".join(one["file"] for one in result["settings"]["data"])
        caption = f"{_key(result)}: qa_f1 on {files} ({counts} records)"
        tables.append(Table(caption, ["method", "K", *names, "mean"], rows))
    return Section(
        "Questions about long texts (source: Table 1, LongBench)",
        "Source, Qwen2.5-7B-Instruct-1M, 550 records: ReTopK with tau .90 52.7, Exact Top-K 52.5, "
        "TokenSelect 51.0.",
        tables,
    )


def fidelity_section(results: Sequence[Result]) -> Section:
    """Figures 5 and 6."""
    head = [
        "variant",
        "length",
        "path",
        "share",
        "support recall",
        "retained mass",
        "of Exact's mass",
        "distribution cosine",
        "output cosine",
        "relative error",
    ]
    metrics = (
        "support_recall",
        "retained_mass",
        "relative_mass",
        "distribution_cosine",
        "output_cosine",
        "relative_error",
    )
    tables, images, remarks = [], [], []
    for result in results:
        rows = []
        for row in result["rows"]:
            images += row.get("plots", [])
            total = row["by_path"]["all"]["count"]
            for path, one in row["by_path"].items():
                if one["count"]:
                    share = f"{one['count'] / total:.1%}"
                    numbers = [f"{one[metric]:.4f}" for metric in metrics]
                    rows.append([row["label"], f"{row['length']:,}", path, share, *numbers])
            remarks.append(
                f"{row['label']}, {row['length']:,} tokens: at least one head of a KV group falls "
                f"back in {row['groups_with_fallback']:.1%} of group-steps; similarity and error "
                f"on reuse correlate with {_spread(row)} (quartiles over heads); the layers that "
                f"fall back most are {_top_layers(row)}."
            )
        tables.append(Table(f"{_key(result)}: against exact supports of the same step", head, rows))
    return Section(
        "Fidelity (source: Figures 5 and 6)",
        "Source, Qwen2.5-7B: 92.4 % mass and 97.4 % output cosine over all head-steps; on reuse "
        "91.6 % and 97.2 % at 56.9 % support recall.",
        tables,
        images,
        remarks,
    )


def ablation_section(results: Sequence[Result]) -> Section:
    """Table 3."""
    tables = []
    for key, rows in _grouped(results).items():
        cells = [
            [
                row["component"],
                _number(row["budget"]),
                f"{row['length']:,}",
                f"{row['perplexity']:.3f}",
                _change(row.get("against_exact")),
                _percent(row.get("exact_path_rate")),
                _whole(row.get("mean_candidates")),
                _speed(row),
            ]
            for row in rows
        ]
        head = ["variant", "K", "length", "PPL", "over Exact", "exact path", "candidates", "speed"]
        tables.append(Table(f"{key}: components of ReTopK", head, cells))
    return Section(
        "Components (source: Table 3)",
        "Source, 64K: recent-R raises the exact-path rate from 11.6 % to 16.7 %; no window "
        "degrades severely; no fallback trades PPL for speed; refresh has little effect here.",
        tables,
        [],
        [SPEED, *_remarks(results)],
    )


def policy_section(results: Sequence[Result]) -> Section:
    """Groups that scan whole, beyond the source."""
    tables = []
    for result in results:
        documents = f"{_key(result)}, {result['rows'][0]['documents']} documents"
        cells = [
            [
                row["label"].rpartition(" K=")[0] or row["method"],
                _number(row["budget"]),
                f"{row['length']:,}",
                _percent(row.get("groups_scanned")),
                _percent(row.get("exact_path_rate")),
                f"{row['perplexity']:.3f}",
                _change(row.get("against_exact")),
                _change(row.get("against_tau")),
            ]
            for row in result["rows"]
        ]
        head = ["policy", "K", "length", "groups", "heads", "PPL", "over Exact", "over tau=.85"]
        tables.append(Table(f"{documents}: KV groups scanned, and what that costs", head, cells))
        cells = [
            [
                entry["policy"],
                _number(entry["budget"]),
                f"{entry['length']:,}",
                *(_percent(entry[name]) for name in ("groups_by_tau", "groups", "groups_no_worse")),
            ]
            for entry in result["equal"]
        ]
        head = ["policy", "K", "length", "tau=.85", "within the interval", "on average"]
        caption = f"{documents}: least share of KV groups tried that keeps tau=.85's perplexity"
        tables.append(Table(caption, head, cells))
    return Section(
        "Path policies (beyond the source)",
        "The source decides each head by tau=.85 alone; a scan reads the keys of its whole group.",
        tables,
        [policy_picture(title) for title in policy_results(results)],
        _remarks(results),
    )


def policy_results(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Results of policies by model, and apart those that compare named files of maps."""
    found: dict[str, list[Result]] = {}
    for result in results:
        if result["benchmark"] == "policy":
            kinds = dict.fromkeys(row["policy"] for row in result["rows"] if row["policy"])
            names = ", ".join(filter(None, (kind.partition(" ")[2] for kind in kinds)))
            found.setdefault(_key(result) + (f": {names}" if names else ""), []).append(result)
    return found


def policy_picture(title: str) -> str:
    """File name of the picture of results that `policy_results` put together."""
    return f"policy_{re.sub(r'[^\w.-]+', '-', title)}.png"


def sensitivity_section(results: Sequence[Result]) -> Section:
    """Figure 7."""
    tables, images = [], []
    for result in results:
        for row in result["rows"]:
            images += row.get("plots", [])
    for key, rows in _grouped(results).items():
        cells = []
        for row in rows:
            shares = row.get("path_shares") or {}
            cells.append(
                [
                    row["label"],
                    f"{row['length']:,}",
                    f"{row['perplexity']:.3f}",
                    _change(row.get("against_exact")),
                    *(_percent(shares.get(name)) for name in ("reuse", "fallback", "refresh")),
                    _whole(row.get("mean_candidates")),
                    _speed(row),
                ]
            )
        head = [
            "variant",
            "length",
            "PPL",
            "over Exact",
            "reuse",
            "fallback",
            "refresh",
            "candidates",
            "speed",
        ]
        tables.append(Table(f"{key}: one setting changed at a time", head, cells))
    return Section(
        "Sensitivity (source: Figure 7)",
        "Source, 64K: K=512 gives 2.03x and +1.60 %; 701 to 901 candidates for W/C from 1 to 16; "
        "gains of R diminish beyond 4; T_r from 128 on alike.",
        tables,
        list(dict.fromkeys(images)),
        [SPEED, *_remarks(results)],
    )


def long_horizon_section(results: Sequence[Result]) -> Section:
    """Figure 8."""
    tables, images = [], []
    for result in results:
        images += result.get("plots", [])
        forced, free = [], []
        for row in result["rows"]:
            parts = row["by_position"]
            if row["part"] == "teacher-forced":
                changes = [f"{part['percent_over_exact']:+.2f}" for part in parts]
                forced.append(
                    [
                        row["label"],
                        _percent(row.get("groups_scanned")),
                        f"{row['perplexity']:.3f}",
                        *changes,
                        _change(row.get("against_exact")),
                    ]
                )
            else:
                free.append(
                    [
                        row["label"],
                        f"{parts[-1]['kl_up_to']:.4f}",
                        f"{parts[-1]['kl']:.4f}",
                        _percent(parts[-1]["top1_agreement_up_to"]),
                        _percent(parts[-1]["top1_agreement"]),
                    ]
                )
        if forced:
            parts = result["rows"][0]["by_position"]
            places = [f"to {part['to']:,}" for part in parts]
            caption = f"{_key(result)}: teacher-forced, % over Exact Top-K so far"
            head = ["variant", "groups", "PPL", *places, "at the end"]
            tables.append(Table(caption, head, forced))
        if free:
            caption = f"{_key(result)}: autoregressive, with an Exact Top-K shadow"
            head = ["variant", "mean KL", "KL of the last part", "top-1 agreement", "of the last"]
            tables.append(Table(caption, head, free))
    return Section(
        "Long continuations (source: Figure 8)",
        "Source, 64K + 8K: within +2.08 % throughout; at the end +2.02 % without refresh, +1.73 % "
        "at T_r = 128, +1.33 % at 32; KL .010 to .013; top-1 agreement 97.2 to 97.6 %.",
        tables,
        images,
    )


def transfer_section(results: Sequence[Result]) -> Section:
    """Table 2."""
    tables = []
    for result in results:
        cells = [
            [
                row["model"],
                title(row["method"]),
                _number(row["budget"]),
                f"{row['length']:,}",
                f"{row['perplexity']:.3f}",
                _change(row.get("against_exact")),
                _percent((row.get("path_shares") or {}).get("reuse")),
                _speed(row),
            ]
            for row in result["rows"]
        ]
        head = ["model", "method", "K", "length", "PPL", "over Exact", "reuse", "speed"]
        tables.append(Table("The same settings on every model", head, cells))
    return Section(
        "Transfer (source: Table 2)",
        "Source, Llama-3.1-8B and Qwen2.5-14B: 82.5 to 89.6 % reuse, -0.46 to +2.76 % PPL, 1.26 to "
        "2.66x.",
        tables,
    )


def _remarks(results: Sequence[Result]) -> list[str]:
    """What result files say of themselves, each once."""
    return list(dict.fromkeys(one for result in results for one in result.get("remarks", ())))


def _key(result: Result) -> str:
    model = result["settings"]["model"]
    rope = "" if model["rope"] == "as trained" else f", RoPE {model['rope']}"
    return f"{model['source']}, {model['dtype']}{rope}"


def _grouped(results: Sequence[Result]) -> dict[str, list[dict[str, Any]]]:
    """Rows of all results by model; of equal rows of several results, the last."""
    groups: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}
    for result in results:
        rows = groups.setdefault(_key(result), {})
        for row in result["rows"]:
            rows[row.get("task"), row["length"], row["label"]] = row
    return {key: list(rows.values()) for key, rows in groups.items()}


def _ordered(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, int | None]]:
    """Methods and budgets: by budget, then in the usual order of methods."""
    order = {name: place for place, name in enumerate(ALL)}
    found = {(row["method"], row["budget"]) for row in rows}
    return sorted(
        found, key=lambda one: (one[1] or 0, order.get(one[0].partition(":")[0], 99), one[0])
    )


def _one(rows: Sequence[dict[str, Any]], **wanted: Any) -> dict[str, Any] | None:
    for row in rows:
        if all(row[name] == value for name, value in wanted.items()):
            return row
    return None


def _of_variants(result: Result) -> bool:
    """Whether a result sets ReTopK with other settings beside the default."""
    return any(row["method"].startswith("retopk:") for row in result["rows"])


def _variants_table(result: Result) -> Table:
    """Facts found under settings of ReTopK, with the KV groups scanned and paired differences."""
    settings = result["settings"]
    cells = []
    for mean in result["headline"]:
        here = [
            row
            for row in result["rows"]
            if (row["length"], row["label"]) == (mean["length"], mean["label"])
        ]
        parts = " / ".join(f"{row['score']:.0f}" for row in here)
        cells.append(
            [
                title(mean["method"]),
                _number(mean["budget"]),
                f"{mean['length']:,}",
                _percent(mean.get("groups_scanned")),
                f"{mean['score']:.1f} ({parts})",
                _points(mean.get("against_exact")),
                _points(mean.get("against_retopk")),
            ]
        )
    head = ["method", "K", "length", "groups", "score", "over Exact", "over ReTopK"]
    tasks = " / ".join(settings["tasks"])
    caption = f"{_key(result)}, {settings['samples']} samples a task: mean of the tasks ({tasks})"
    return Table(f"{caption}, and differences in points [95 %]", head, cells)


def _perplexity_cell(row: Mapping[str, Any]) -> str:
    change = _change(row.get("against_exact"))
    return f"{row['perplexity']:.2f}" + (f" ({change})" if change else "")


def _path_table(rows: Sequence[dict[str, Any]], key: str) -> Table:
    cells = []
    for row in rows:
        shares = row.get("path_shares")
        if shares is not None and row["method"].startswith("retopk"):
            cells.append(
                [
                    row["label"],
                    f"{row['length']:,}",
                    *(_percent(shares[name]) for name in ("reuse", "fallback", "refresh")),
                    _whole(row.get("mean_candidates")),
                    f"{row['tokens_attended']:.0f}",
                ]
            )
    head = ["variant", "length", "reuse", "fallback", "refresh", "candidates", "attended"]
    return Table(f"{key}: how ReTopK's head-steps were served", head, cells)


def _lost_perplexity(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Where another approximate method has a lower perplexity than ReTopK."""
    found = []
    for row in rows:
        if row["method"] in ("full", "exact") or row["method"].startswith("retopk"):
            continue
        ours = _one(rows, length=row["length"], method="retopk", budget=row["budget"])
        if ours is not None and row["perplexity"] < ours["perplexity"]:
            found.append(
                f"{title(row['method'])} has a lower perplexity than ReTopK at K={row['budget']}, "
                f"{row['length']:,} tokens: {row['perplexity']:.2f} against "
                f"{ours['perplexity']:.2f}."
            )
    return found


def _spread(row: Mapping[str, Any]) -> str:
    values = sorted(
        one
        for layer in row["maps"]["error_by_similarity_on_reuse"]
        for one in layer
        if one is not None
    )
    if not values:
        return "nothing measurable"
    places = [values[int(share * (len(values) - 1))] for share in (0.25, 0.5, 0.75)]
    return ", ".join(f"{place:+.2f}" for place in places)


def _top_layers(row: Mapping[str, Any]) -> str:
    shares = [sum(layer) / len(layer) for layer in row["maps"]["fallback_share"]]
    order = sorted(range(len(shares)), key=lambda layer: -shares[layer])[:3]
    return ", ".join(f"{layer} ({shares[layer]:.0%})" for layer in order)


def _change(difference: Mapping[str, float] | None) -> str:
    if difference is None:
        return ""
    return f"{difference['percent']:+.2f} % [{difference['low']:+.2f}, {difference['high']:+.2f}]"


def _points(difference: Mapping[str, float] | None) -> str:
    if difference is None:
        return ""
    return f"{difference['points']:+.1f} [{difference['low']:+.1f}, {difference['high']:+.1f}]"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _whole(value: float | None) -> str:
    return "" if not value else f"{value:.0f}"


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _speed(row: Mapping[str, Any]) -> str:
    speed = row.get("speed_over_exact")
    return "" if speed is None else f"{speed:.2f}x"
