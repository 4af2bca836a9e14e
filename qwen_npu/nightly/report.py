"""The report of a run, made from what lies on the disk: index.html, one page an item, report.json, junit.xml."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree as ET

from qwen_npu.errors import UsageError
from qwen_npu.nightly.baseline import short
from qwen_npu.nightly.files import read_json, write_json, write_text
from qwen_npu.nightly.history import History, Night, opened
from qwen_npu.nightly.page import PAGE_LIMIT_BYTES, render_page, shell
from qwen_npu.nightly.verdict import ItemResult, Verdict, count, read_verdict
from qwen_npu.records import DONE

SCHEMA = 1
_MARKS = {
    Verdict.PASS: ("✓", "good"),
    Verdict.FAIL: ("✗", "bad"),
    Verdict.ERROR: ("!", "bad"),
    Verdict.TIMEOUT: ("!", "bad"),
    Verdict.DEAD_KERNEL: ("!", "bad"),
    Verdict.INFRA: ("!", "bad"),
    Verdict.SKIPPED: ("–", "idle"),
    Verdict.INCOMPLETE: ("…", "bad"),
}
_LINKED = 50


def read_results(out: Path) -> tuple[dict[str, Any], list[ItemResult]]:
    """The run in `out` and the verdicts on its items, in the suite's order; an item without one is INCOMPLETE.

    Raises:
        UsageError: no run lies there.
    """
    run = read_json(out / "run.json")
    if run is None or not isinstance(run.get("items"), list):
        raise UsageError(f"there is no run in {out}", expected="the --out directory of a nightly run")
    results = []
    for name in run["items"]:
        result = read_verdict(out / "items" / name)
        if result is None:
            why = run.get("interrupted") or "the run was ended"
            result = ItemResult(
                name, "", Verdict.INCOMPLETE, f"not run to its end: {why}; `--resume` takes it up again"
            )
        results.append(result)
    return run, results


def write_report(
    out: Path, *, results: Sequence[ItemResult] | None = None, history: Path | None = None, again: bool = False
) -> Path:
    """Writes the report of the run in `out` and gives the path of index.html; with a history, adds this night to it.

    Args:
        results: the verdicts; what lies on the disk by default.
        again: write the items' pages anew, also those that exist.

    Raises:
        UsageError: no run lies there, or the history cannot be used.
    """
    run, found = read_results(out)
    results = list(found if results is None else results)
    with opened(history) as nights:
        if nights is not None:
            told = [result for result in results if result.started]
            nights.add(run["run"], run["suite"], run["started"], run["environment"], told)
        trends = {result.item: _trend(nights, result) for result in results}
    for result in results:
        if again or not (out / page_name(result.item)).exists():
            write_page(out, result)
    facts = _facts(run, results, trends)
    write_json(out / "report.json", facts)
    write_text(out / "junit.xml", _junit(run, results))
    index = out / "index.html"
    write_text(index, _index(run, results, trends))
    return index


def page_name(item: str) -> str:
    return f"{item}.html" if item.casefold() != "index" else "item-index.html"


def write_page(out: Path, result: ItemResult) -> Path:
    """Writes the page of one item; a notebook that cannot be shown still gets one that says why."""
    folder = out / "items" / result.item
    head, foot = _head(result), _foot(out, result)
    notebook = read_json(folder / "notebook.ipynb")
    title = f"{result.verdict.value} {result.item}"
    try:
        if notebook is None:
            text = shell(title, f"{head}<p>No notebook was written.</p>{foot}")
        else:
            text = render_page(notebook, title=title, head=head, foot=foot)
    except OSError:
        raise
    except Exception as error:  # a damaged notebook must not cost the verdict its page
        text = shell(title, f"{head}<p>The notebook cannot be shown: {html.escape(repr(error))}</p>{foot}")
    if len(text.encode()) > PAGE_LIMIT_BYTES:
        size = len(text.encode()) / 10**6
        note = (
            f"<p>With its outputs this page would be {size:.1f} MB; they are in the notebook file. "
            "Draw fewer points, or save pictures smaller.</p>"
        )
        text = shell(title, f"{head}{note}{foot}")
    path = out / page_name(result.item)
    write_text(path, text, durable=False)
    return path


# ---- one item ----


def _badge(verdict: Verdict) -> str:
    mark, kind = _MARKS[verdict]
    return f'<span class="badge {kind}"><span aria-hidden="true">{mark}</span> {verdict.value}</span>'


def _head(result: ItemResult) -> str:
    environment = result.environment
    parameters = ", ".join(f"{name} = {value!r}" for name, value in result.parameters.items()) or "as in the notebook"
    lines = [
        '<p><a href="index.html">← all items</a></p>',
        f"<h1>{html.escape(result.item)}</h1>",
        f"<p>{_badge(result.verdict)} {html.escape(result.reason)}</p>",
        f'<p class="facts">{html.escape(result.started)} · {result.wall_s:.1f} s of {result.budget_s:g} s · '
        f"{html.escape(_ran_on(environment))} · parameters: {html.escape(parameters)}</p>",
    ]
    lines += [f'<p class="facts">{html.escape(note)}</p>' for note in result.notes]
    if result.comparison:
        lines.append(_records_table(result))
    return "\n".join(lines)


def _records_table(result: ItemResult) -> str:
    order = {"changed": 0, "missing": 1, "new": 2, "same": 3, "info": 4}
    rows = []
    for row in sorted(result.comparison, key=lambda row: order.get(row["state"], 5)):
        kind = "bad" if row["state"] in {"changed", "missing"} else "good" if row["state"] == "same" else "idle"
        rows.append(
            f"<tr><td>{html.escape(row['name'])}</td>"
            f'<td class="number">{html.escape(short(row["value"], 40))} {html.escape(str(row["unit"]))}</td>'
            f'<td class="number">{"" if row["baseline"] is None else html.escape(short(row["baseline"], 40))}</td>'
            f'<td><span class="badge {kind}">{row["state"]}</span> {html.escape(row["text"])}</td></tr>'
        )
    opened_ = " open" if any(row["state"] in {"changed", "missing"} for row in result.comparison) else ""
    return (
        f'<details{opened_}><summary>{len(rows)} records</summary><div class="scroll"><table><thead><tr><th>record</th>'
        '<th class="number">value</th><th class="number">baseline</th><th>state</th></tr></thead><tbody>'
        + "".join(rows)
        + "</tbody></table></div></details>"
    )


def _foot(out: Path, result: ItemResult) -> str:
    folder = out / "items" / result.item
    lines = []
    if result.log_tail.strip():
        lines.append(
            f'<h2>Last lines of the native log</h2><div class="log"><pre>{html.escape(result.log_tail)}</pre></div>'
        )
    kept = ("notebook.ipynb", "native.log", "records.jsonl", "verdict.json")
    links = [folder / name for name in kept if (folder / name).exists()]
    files = folder / "files"
    links += sorted(path for path in files.rglob("*") if path.is_file())[:_LINKED] if files.is_dir() else []
    if links:
        entries = "".join(
            f'<li><a href="{quote(path.relative_to(out).as_posix())}">'
            f"{html.escape(path.relative_to(folder).as_posix())}</a> "
            f'<span class="soft">{path.stat().st_size:,} bytes</span></li>'
            for path in links
        )
        lines.append(f"<h2>Files</h2><ul>{entries}</ul>")
    facts = html.escape(json.dumps(result.environment, ensure_ascii=False, indent=1))
    lines.append(f"<details><summary>Environment</summary><pre>{facts}</pre></details>")
    return "\n".join(lines)


def _ran_on(environment: dict[str, Any]) -> str:
    commit = str(environment.get("commit", ""))[:10]
    parts = [
        f"commit {commit}{' + changes' if environment.get('dirty') else ''}" if commit else "",
        f"driver {environment.get('driver', '')}",
        str(environment.get("machine", "")),
    ]
    return " · ".join(part for part in parts if part)


# ---- the index ----


def _trend(nights: History | None, result: ItemResult) -> dict[str, Any]:
    """What the history adds to a row: the last nights, where it went bad, what changed since the last good night."""
    if nights is None:
        return {"nights": [], "since": "", "changes": [], "unusual": []}
    last = nights.nights(result.item)
    since, changes = "", []
    turn = nights.turn(result.item) if not result.verdict.fine else None
    if turn is not None:
        good = turn.last_good
        since = f"last good {_night(good)}; " if good else "never good; "
        since += f"first bad {_night(turn.first_bad)}"
        if good is not None:
            before = nights.records(good.run, result.item)
            after = {record["name"]: record.get("value") for record in result.records if record["kind"] != "info"}
            changes = [
                f"{name}: {short(before[name], 24) if name in before else 'absent'} → "
                f"{short(after[name], 24) if name in after else 'absent'}"
                for name in sorted((before.keys() | after.keys()) - {DONE})
                if before.get(name) != after.get(name) or (name in before) != (name in after)
            ]
    unusual = []
    for record in result.records:
        value = record.get("value")
        if record.get("kind") != "info" or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        band = nights.band(result.item, record["name"])
        if band is not None and not band[0] <= value <= band[1]:
            usual = f"{short(band[0])} to {short(band[1])}"
            unusual.append(f"{record['name']} {short(value)} {record.get('unit', '')}, usually {usual}")
    return {"nights": last, "since": since, "changes": changes, "unusual": unusual}


def _night(night: Night) -> str:
    return f"{night.started[:10]}" + (f" ({night.commit[:10]})" if night.commit else "")


def _sparkline(nights: Sequence[Night]) -> str:
    """One bar a night, as high as the night took long; what was not fine also has a mark below its bar."""
    if len(nights) < 2:
        return ""
    longest = max(night.wall_s for night in nights) or 1.0
    bars = []
    for index, night in enumerate(nights):
        verdict = Verdict(night.verdict)
        height = 4 + 14 * night.wall_s / longest
        kind = _MARKS[verdict][1]
        bars.append(f'<rect class="{kind}" x="{index * 5}" y="{18 - height:.1f}" width="4" height="{height:.1f}"/>')
        if not verdict.fine:
            bars.append(f'<rect class="bad" x="{index * 5}" y="20" width="4" height="4"/>')
    fine = sum(Verdict(night.verdict).fine for night in nights)
    label = f"{fine} of the last {len(nights)} nights fine; newest {nights[-1].wall_s:.1f} s"
    return (
        f'<svg class="trend" viewBox="0 0 150 24" preserveAspectRatio="xMinYMid meet" role="img" '
        f'aria-label="{label}"><title>{label}</title>{"".join(bars)}</svg>'
    )


def _index(run: dict[str, Any], results: Sequence[ItemResult], trends: dict[str, dict[str, Any]]) -> str:
    bad = [result for result in results if not result.verdict.fine]
    order = sorted(results, key=lambda result: result.verdict.fine)
    past = any(trend["nights"] for trend in trends.values())
    rows = []
    for result in order:
        trend = trends[result.item]
        since = [trend["since"], *trend["changes"][:5], *trend["unusual"][:3]]
        more = len(trend["changes"]) - 5
        if more > 0:
            since.append(f"and {more} more")
        rows.append(
            f"<tr><td>{_badge(result.verdict)}</td>"
            f'<td><a href="{quote(page_name(result.item))}">{html.escape(result.item)}</a></td>'
            f"<td>{html.escape(result.reason)}{_notes(result)}</td>"
            f'<td class="number" data-name="took">{result.wall_s:.1f} s</td>'
            + (
                f"<td>{_sparkline(trend['nights'])}</td>"
                f'<td class="soft">{"<br>".join(html.escape(line) for line in since if line)}</td>'
                if past
                else ""
            )
            + "</tr>"
        )
    environment = run.get("environment", {})
    body = [
        f"<h1>{html.escape(run['suite'])}: {len(results)} notebook run{'s' if len(results) != 1 else ''}</h1>",
        _summary(run, results, bad),
        f'<p class="facts">{html.escape(run["started"])} · {html.escape(_ran_on(environment))} · '
        f"{html.escape(str(environment.get('host', '')))}</p>",
        '<div class="scroll"><table class="index"><thead><tr><th>verdict</th><th>item</th><th>why</th>'
        '<th class="number">took</th>'
        + ("<th>last nights</th><th>since the last good night</th>" if past else "")
        + "</tr></thead><tbody>",
        *rows,
        "</tbody></table></div>",
        '<p class="facts">Also: <a href="report.json">report.json</a>, <a href="junit.xml">junit.xml</a>.</p>',
    ]
    if environment.get("driver") == "emulator":
        body.append(
            '<p class="facts">Run on the emulated device: bytes and counts are exact, times are this machine\'s CPU, '
            "not an NPU's.</p>"
        )
    title = f"{'fine' if not bad else f'{len(bad)} not fine'}: {run['suite']}"
    return shell(title, "\n".join(body))


def _notes(result: ItemResult) -> str:
    return "".join(f'<br><span class="soft">{html.escape(note)}</span>' for note in result.notes)


def _summary(run: dict[str, Any], results: Sequence[ItemResult], bad: Sequence[ItemResult]) -> str:
    counts = ", ".join(f"{number} {verdict}" for verdict, number in count(results).items())
    if not bad and not run.get("interrupted"):
        return f'<div class="summary good"><strong>All fine.</strong> <span>{counts}</span></div>'
    listed = "".join(
        f'<li><a href="{quote(page_name(result.item))}">{html.escape(result.item)}</a>: {result.verdict.value}, '
        f"{html.escape(result.reason)}</li>"
        for result in bad[:8]
    )
    if len(bad) > 8:
        listed += f"<li>and {len(bad) - 8} more</li>"
    interrupted = f" <span>This run was {html.escape(run['interrupted'])}.</span>" if run.get("interrupted") else ""
    return (
        f'<div class="summary bad"><strong>{len(bad)} of {len(results)} not fine.</strong> <span>{counts}</span>'
        f"{interrupted}<ul>{listed}</ul></div>"
    )


# ---- for machines ----


def _facts(run: dict[str, Any], results: Sequence[ItemResult], trends: dict[str, dict[str, Any]]) -> dict[str, Any]:
    items = []
    for result in results:
        trend = trends[result.item]
        items.append(
            {
                **result.to_json(),
                "page": page_name(result.item),
                "since": trend["since"],
                "changes": trend["changes"],
                "unusual": trend["unusual"],
            }
        )
    return {
        "schema": SCHEMA,
        "run": run["run"],
        "suite": run["suite"],
        "started": run["started"],
        "interrupted": run.get("interrupted", ""),
        "fine": not run.get("interrupted") and all(result.verdict.fine for result in results),
        "counts": count(results),
        "environment": run.get("environment", {}),
        "items": items,
    }


def _junit(run: dict[str, Any], results: Sequence[ItemResult]) -> str:
    failures = sum(result.verdict is Verdict.FAIL for result in results)
    skipped = sum(result.verdict is Verdict.SKIPPED for result in results)
    errors = sum(not result.verdict.fine for result in results) - failures
    suite = ET.Element(
        "testsuite",
        name=_xml(run["suite"]),
        tests=str(len(results)),
        failures=str(failures),
        errors=str(errors),
        skipped=str(skipped),
        time=f"{sum(result.wall_s for result in results):.3f}",
        timestamp=run["started"],
    )
    for result in results:
        case = ET.SubElement(
            suite, "testcase", classname=_xml(run["suite"]), name=_xml(result.item), time=f"{result.wall_s:.3f}"
        )
        if result.verdict is Verdict.SKIPPED:
            ET.SubElement(case, "skipped", message=_xml(result.reason))
        elif not result.verdict.fine:
            kind = "failure" if result.verdict is Verdict.FAIL else "error"
            entry = ET.SubElement(case, kind, type=result.verdict.value, message=_xml(result.reason))
            entry.text = _xml(result.log_tail)
    ET.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(suite, encoding="unicode") + "\n"


def _xml(text: str) -> str:
    """Text without the characters that XML 1.0 cannot hold."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "�", text)
