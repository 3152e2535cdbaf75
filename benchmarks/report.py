"""One page, in HTML and in Markdown, from all results in a directory.

All pictures are drawn into --out; results of policies share one a model.
"""

import argparse
import base64
import html
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import fidelity, long_horizon, niah, policy, sensitivity
from benchmarks.evidence.report_tables import Section, policy_picture, policy_results, sections
from benchmarks.results_file import prepare_directory
from retopk_jax.cli_files import write_text
from retopk_jax.errors import ConfigError

Drawer = Callable[[Path, Sequence[dict[str, Any]]], object]

DRAWERS: dict[str, Drawer] = {
    "niah": niah.draw,
    "fidelity": fidelity.draw_all,
    "sensitivity": sensitivity.draw_all,
    "long_horizon": long_horizon.draw,
}
"""Draws the pictures of a result's rows beside the file named."""

TITLE = "What approximate attention costs: measured"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem;
  color: #1a1a1a; background: #fff; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0 1.2rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { border-bottom: 1px solid #ddd; padding: .2rem .7rem .2rem 0; text-align: left;
  white-space: nowrap; }
.source { background: #f3f6fa; border-left: 4px solid #0072b2; padding: .5rem .8rem; }
img { max-width: 100%; height: auto; display: block; margin: .8rem 0; }
pre { background: #f7f7f7; padding: .7rem; overflow-x: auto; font-size: 12px; }
"""


def main(argv: Sequence[str]) -> None:
    """Writes the report; see ``--help``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=__doc__)
    parser.add_argument("--results", type=Path, required=True, help="directory with result files")
    parser.add_argument("--out", type=Path, help="directory for report.html and report.md (there)")
    args = parser.parse_args(argv)
    results = read_results(args.results)
    out = prepare_directory(args.out or args.results)
    found = sections([result for _, result in results])
    if not found:
        raise ConfigError(f"--results {args.results}: holds no results of experiments")
    for name, result in results:
        if result["benchmark"] in DRAWERS:
            DRAWERS[result["benchmark"]](out / name, result["rows"])
    for title, those in policy_results([result for _, result in results]).items():
        policy.draw(out / policy_picture(title), title, [result["rows"] for result in those])
    write_text(out / "report.html", as_html(found, results, out))
    write_text(out / "report.md", as_markdown(found, results))
    print(f"{len(results)} results. Written to {out}: report.html, report.md")


def read_results(directory: Path) -> list[tuple[str, dict[str, Any]]]:
    """File name and contents of every result; what is none is said and left out."""
    if not directory.is_dir():
        raise ConfigError(f"--results {directory}: no such directory")
    found = []
    for path in sorted(directory.glob("*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, ValueError) as error:
            print(f"skipped {path.name}: not JSON ({error})", file=sys.stderr)
            continue
        if isinstance(result, dict) and "benchmark" in result and "settings" in result:
            found.append((path.name, result))
    return found


def as_html(
    found: Sequence[Section], results: Sequence[tuple[str, dict[str, Any]]], out: Path
) -> str:
    """The page, whole in one file, with the pictures in ``out``."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{TITLE}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{TITLE}</h1>",
    ]
    for section in found:
        parts.append(f"<h2>{html.escape(section.heading)}</h2>")
        parts.append(f'<p class="source">{html.escape(section.source)}</p>')
        for table in section.tables:
            head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.head)
            body = "".join(
                "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
                for row in table.rows
            )
            parts.append(
                f'<div class="scroll"><table><caption>{html.escape(table.caption)}</caption>'
                f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
            )
        if section.remarks:
            items = "".join(f"<li>{html.escape(remark)}</li>" for remark in section.remarks)
            parts.append(f"<ul>{items}</ul>")
        for name in section.images:
            data = base64.b64encode((out / name).read_bytes()).decode("ascii")
            alt = html.escape(Path(name).stem.replace("_", " "))
            parts.append(f'<img alt="{alt}" src="data:image/png;base64,{data}">')
    parts.append("<h2>Settings, machines, commits</h2>")
    for name, result in results:
        text = html.escape(json.dumps(about(result), indent=2, ensure_ascii=False))
        parts.append(f"<details><summary>{html.escape(name)}</summary><pre>{text}</pre></details>")
    parts.append("</body></html>")
    return "\n".join(parts) + "\n"


def as_markdown(found: Sequence[Section], results: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """The same as Markdown; pictures are linked beside it."""
    lines = [f"# {TITLE}", ""]
    for section in found:
        lines += [f"## {section.heading}", "", f"> {section.source}", ""]
        for table in section.tables:
            lines += [f"**{_cell(table.caption)}**", ""]
            lines.append("| " + " | ".join(map(_cell, table.head)) + " |")
            lines.append("|" + " --- |" * len(table.head))
            lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in table.rows]
            lines.append("")
        lines += [f"- {remark}" for remark in section.remarks]
        lines += [""] if section.remarks else []
        for name in section.images:
            lines += [f"![{Path(name).stem.replace('_', ' ')}](<{name}>)", ""]
    lines += ["## Machines and commits", "", "| result | commit | device | date |"]
    lines.append("| --- | --- | --- | --- |")
    for name, result in results:
        machine = result.get("machine", {})
        device = ", ".join(machine.get("devices", []))
        commit = str(result.get("commit"))[:12]
        lines.append(f"| {name} | {commit} | {_cell(device)} | {result.get('date')} |")
    return "\n".join(lines) + "\n"


def about(result: dict[str, Any]) -> dict[str, Any]:
    """What a result says of itself, without the rows."""
    return {name: value for name, value in result.items() if name not in ("rows", "headline")}


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
