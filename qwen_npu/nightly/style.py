"""The look of the report: one style sheet, light and dark, from phone to wide screen; nothing from outside."""

STYLE = """
:root {
  --ground: #ffffff; --card: #f6f7f9; --ink: #1b1f24; --soft: #57606a; --line: #d0d7de; --link: #0a58b5;
  --good: #00654b; --bad: #a62b00; --idle: #5a5f66;
  --good-ground: #dff3ec; --bad-ground: #fde8dd; --idle-ground: #e9ebee;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14171b; --card: #1d2127; --ink: #e6e9ed; --soft: #a3adb8; --line: #39414b; --link: #79b8ff;
    --good: #5fd3ac; --bad: #ff9b6b; --idle: #b4bcc6;
  --good-ground: #12352a; --bad-ground: #42210f; --idle-ground: #2b3138;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem 1.25rem 4rem; max-width: 75rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; overflow-wrap: break-word; }
a { color: var(--link); }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 1.5rem 0 .5rem; }
pre, code, .number { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: .875em; }
pre { overflow: auto; max-height: 36rem; margin: 0; white-space: pre-wrap; }
.soft { color: var(--soft); }
.facts { color: var(--soft); margin: .25rem 0; }
.badge { display: inline-block; padding: .05rem .55rem; border-radius: .4rem; font-weight: 650; font-size: .875rem;
  white-space: nowrap; border: 1px solid currentColor; }
.good { color: var(--good); background: var(--good-ground); }
.bad { color: var(--bad); background: var(--bad-ground); }
.idle { color: var(--idle); background: var(--idle-ground); }
.summary { border-left: .35rem solid currentColor; padding: .6rem .9rem; border-radius: .3rem; margin: .75rem 0; }
.summary > * { color: var(--ink); }
.summary .badge.good { color: var(--good); } .summary .badge.bad { color: var(--bad); }
.summary ul { margin: .4rem 0 0; padding-left: 1.2rem; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0; }
th, td { text-align: left; vertical-align: top; padding: .4rem .6rem; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; font-size: .875rem; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.scroll { overflow-x: auto; }
details { margin: .6rem 0; } summary { cursor: pointer; }
svg.trend { display: block; height: 1.6rem; width: 9.5rem; }
svg.trend .good { fill: var(--good); } svg.trend .bad { fill: var(--bad); } svg.trend .idle { fill: var(--idle); }
.index td:nth-child(2) { min-width: 9rem; } .index td:nth-child(3) { min-width: 14rem; }
#code, label[for=code] { font-size: .875rem; color: var(--soft); }
#code { margin: 1rem .4rem 0 0; }
#code:not(:checked) ~ main .input { display: none; }
.notebook { margin-top: .5rem; }
.notebook .cell { margin: .9rem 0; }
.notebook .prompt, .notebook .anchor-link { display: none; }
.notebook .input_area { background: var(--card); border: 1px solid var(--line); border-radius: .35rem;
  padding: .5rem .75rem; }
.notebook .output_area { margin: .4rem 0; overflow-x: auto; }
.notebook .output_subarea { max-width: 100%; }
.notebook .output_stderr, .notebook .output_error { background: var(--bad-ground); border-radius: .35rem;
  padding: .4rem .75rem; }
.notebook img, .notebook svg { max-width: 100%; height: auto; }
.notebook .text_cell_render { max-width: 52rem; }
.notebook table { width: auto; font-size: .9rem; }
.widget { color: var(--soft); font-style: italic; }
/* figures carry their own colours, made for a light ground */
.plot { background: #ffffff; border-radius: .35rem; min-height: 20rem; width: 100%; color: #1b1f24; }
.plot .main-svg { max-width: none !important; }
.log { background: var(--card); border: 1px solid var(--line); border-radius: .35rem; padding: .5rem .75rem; }
@media (max-width: 45rem) {
  /* a figure keeps a width at which it can be read, and is moved sideways in its frame */
  .notebook .plot { width: 44rem; }
  body { padding: .75rem .75rem 3rem; }
  .index thead { display: none; }
  .index, .index tbody, .index tr, .index td { display: block; width: 100%; }
  .index tr { border: 1px solid var(--line); border-radius: .4rem; margin: .6rem 0; padding: .4rem .2rem; }
  .index td { border: 0; padding: .15rem .6rem; text-align: left; }
  .index td.number { text-align: left; }
  .index td.number::before { content: attr(data-name) " "; color: var(--soft); }
}
@media print { body { max-width: none; } pre { max-height: none; } }
"""
