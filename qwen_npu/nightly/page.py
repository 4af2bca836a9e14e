"""An executed notebook as one HTML page that needs no network: figures drawn by plotly.js inlined once, no widgets."""

from __future__ import annotations

import copy
import html
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from qwen_npu.nightly.processes import skip_slow_import
from qwen_npu.nightly.style import STYLE

PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
PAGE_LIMIT_BYTES = 8 * 10**6
TEXT_LIMIT_CHARACTERS = 100_000
"""Longest text one output shows; the notebook file keeps all of it."""

DRAW = """
(function () {
  var root = document.documentElement, drawn = 0, failed = 0;
  var nodes = document.querySelectorAll('script.figure');
  root.dataset.plots = nodes.length;
  root.dataset.plotsDrawn = 0;
  root.dataset.plotsFailed = 0;
  nodes.forEach(function (node) {
    var target = node.previousElementSibling;
    function broken(error) {
      failed += 1;
      root.dataset.plotsFailed = failed;
      target.textContent = 'This figure could not be drawn: ' + error;
    }
    try {
      var figure = JSON.parse(node.textContent);
      figure.layout = figure.layout || {};
      if (figure.layout.width > target.clientWidth) { delete figure.layout.width; }
      // on a phone a finger moves the page; it must not zoom the figure
      if (window.matchMedia('(max-width: 45rem)').matches) { figure.layout.dragmode = false; }
      figure.config = { responsive: true, displaylogo: false };
      Plotly.newPlot(target, figure).then(function () {
        drawn += 1;
        root.dataset.plotsDrawn = drawn;
      }, broken);
    } catch (error) { broken(error); }
  });
})();
"""


def render_page(notebook: dict[str, Any], *, title: str, head: str, foot: str = "") -> str:
    """The page of a notebook.

    Args:
        notebook: the executed document (nbformat 4 JSON).
        head, foot: HTML above and below it.
    """
    body, figures = render_body(notebook)
    return shell(
        title,
        f'{head}<input type="checkbox" id="code" checked><label for="code">show code</label>'
        f'<main class="notebook">{body}</main>{foot}',
        figures=figures,
    )


def shell(title: str, body: str, *, figures: int = 0, script: str = "") -> str:
    """A whole HTML document. plotly.js goes in once, and only where there are figures to draw."""
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<link rel="icon" href="data:,">',
        f"<title>{html.escape(title)}</title>",
        f"<style>\n{STYLE}\n{_code_style()}\n</style>",
        "</head>\n<body>",
        body,
    ]
    if figures:
        parts.append("<noscript><p>The figures need JavaScript, which is off in this browser.</p></noscript>")
        parts.append(f"<script>{_plotly_js()}</script>")
        parts.append(f"<script>{DRAW}</script>")
    if script:
        parts.append(f"<script>{script}</script>")
    parts.append("</body>\n</html>\n")
    return "\n".join(parts)


def render_body(notebook: dict[str, Any]) -> tuple[str, int]:
    """The cells as HTML, and how many figures they hold."""
    skip_slow_import()
    import nbformat
    from nbconvert import HTMLExporter
    from nbformat.v4.rwbase import rejoin_lines

    document = rejoin_lines(nbformat.from_dict(copy.deepcopy(notebook)))
    document.setdefault("metadata", {}).pop("widgets", None)
    figures = 0
    for cell in document.get("cells", []):
        if cell.get("cell_type") != "code":
            continue
        for output in cell.get("outputs", []):
            figures += _offline(output, figures)
    exporter = HTMLExporter(template_name="basic")
    for name in exporter.trait_names():
        if name.endswith("_url"):
            setattr(exporter, name, "")
    body, _ = exporter.from_notebook_node(document)
    return body, figures


def _offline(output: dict[str, Any], number: int) -> int:
    """Makes one output fit for a page without network, in place; gives the number of figures in it (0 or 1)."""
    if "text" in output:
        output["text"] = _cut(output["text"])
    data = output.get("data")
    if not isinstance(data, dict):
        return 0
    if PLOTLY in data:
        figure = data[PLOTLY]
        output["data"] = {"text/html": _figure(figure, number)}
        return 1
    if WIDGET in data:
        output["data"] = {
            "text/html": '<p class="widget">A live widget stood here; it needs a kernel. '
            "Its static twin shows the same data.</p>"
        }
        return 0
    # scripts of libraries that expect a loader from the network
    data.pop("application/javascript", None)
    data.pop("application/vnd.jupyter.widget-state+json", None)
    if "text/plain" in data:
        data["text/plain"] = _cut(data["text/plain"])
    if not data:
        output["data"] = {"text/plain": ""}
    return 0


def _figure(figure: dict[str, Any], number: int) -> str:
    height = figure.get("layout", {}).get("height")
    style = f' style="min-height:{int(height)}px"' if isinstance(height, (int, float)) else ""
    kept = {key: figure[key] for key in ("data", "layout", "frames") if key in figure}
    text = json.dumps(kept, ensure_ascii=False, separators=(",", ":"))
    # inside a script element only "</" and "<!--" mean something to the HTML parser
    text = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return (
        f'<div class="plot" id="figure-{number}"{style}></div>'
        f'<script type="application/json" class="figure">{text}</script>'
    )


def _cut(text: str) -> str:
    if len(text) <= TEXT_LIMIT_CHARACTERS:
        return text
    half = TEXT_LIMIT_CHARACTERS // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n... {left_out:,} characters left out; the notebook file has them ...\n{text[-half:]}"


@lru_cache(maxsize=1)
def _plotly_js() -> str:
    from plotly.offline import get_plotlyjs

    text: str = get_plotlyjs()
    return text.replace("</script", "<\\/script")


@lru_cache(maxsize=1)
def _code_style() -> str:
    from pygments.formatters import HtmlFormatter

    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n.highlight {{ background: none !important; }}"


def figure_count(path: Path) -> int:
    """How many figures the notebook in `path` holds."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
    return sum(
        PLOTLY in output.get("data", {}) for cell in document.get("cells", []) for output in cell.get("outputs", [])
    )
