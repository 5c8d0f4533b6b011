"""The outcome for people: one HTML file that needs nothing else."""

from __future__ import annotations

import html
from pathlib import Path

from mgpu_check.compare.comparison import Comparison
from mgpu_check.compare.picture import Curve, draw
from mgpu_check.compare.result import curves
from mgpu_check.mistakes.catalogue import CLASSES
from mgpu_check.mistakes.report import Report
from mgpu_check.version import __version__

__all__ = ["write_page"]

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --text: #1b1f24; --weak: #59636e; --grid: #d8dee4;
  --one: #0550ae; --ranks: #9a3412; --wrong: #b3261e; --right: #1a7f37; --panel: #f6f8fa; }
@media (prefers-color-scheme: dark) { :root { --ground: #0d1117; --text: #e6edf3; --weak: #9aa4af; --grid: #30363d;
  --one: #79b8ff; --ranks: #ffb077; --wrong: #ff8f85; --right: #6fdd8b; --panel: #161b22; } }
body { background: var(--ground); color: var(--text); font: 16px/1.5 system-ui, sans-serif; max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
code, pre { font-family: ui-monospace, monospace; font-size: .9em; }
.verdict { border-left: .4rem solid var(--weak); background: var(--panel); padding: .7rem 1rem; overflow-wrap: anywhere; }
.verdict.equal { border-color: var(--right); } .verdict.differs { border-color: var(--wrong); }
table { border-collapse: collapse; } th, td { text-align: left; padding: .2rem .9rem .2rem 0; vertical-align: top;
  border-bottom: 1px solid var(--grid); overflow-wrap: anywhere; }
td.no { color: var(--wrong); font-weight: 600; }
.scroll { overflow-x: auto; } .weak { color: var(--weak); } a { color: var(--one); }
svg { width: 100%; height: auto; background: var(--ground); }
svg text { fill: var(--text); font: 13px system-ui, sans-serif; }
svg path, svg line { fill: none; } svg .grid { stroke: var(--grid); } svg .axis { stroke: var(--weak); }
svg .one { stroke: var(--one); stroke-width: 5; stroke-opacity: .55; } svg .dot { fill: none; stroke-width: 1.5; stroke-opacity: 1; }
svg .ranks { stroke: var(--ranks); stroke-width: 2; stroke-dasharray: 7 4; } svg .cross { stroke-dasharray: none; }
svg .each { stroke: var(--weak); stroke-width: 1; stroke-dasharray: 1 3; }
svg .limit { stroke: var(--text); stroke-width: 1.5; stroke-dasharray: 12 3 2 3; }
svg .mark { stroke: var(--wrong); stroke-width: 1.5; } svg .marked { fill: var(--wrong); font-weight: 600; }
"""


def write_page(path: Path, done: Comparison) -> None:
    """Write the verdict, its likely causes, the curves, and what was looked at."""
    plan, verdict = done.plan, done.verdict
    simulated = f" {plan.simulated} GPUs: this proves code, never hardware." if plan.simulated else ""
    body = [
        f"<h1>mgpu-check compare: <code>{html.escape(plan.shown)}</code></h1>",
        f'<p class="weak">One device, and {plan.world} ranks.{html.escape(simulated)}</p>',
        f'<p class="verdict {verdict.kind.split()[0]}"><strong>{html.escape(verdict.report.headline)}</strong></p>',
        *_findings(verdict.report),
        *_pictures(done),
        *_observables(verdict.report),
        *_runs(done),
        f'<p class="weak">mgpu-check {__version__}</p>',
    ]
    head = (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(verdict.kind)}: {html.escape(plan.shown)}</title>\n<style>{_STYLE}</style>\n"
    )
    path.write_text(head + "\n".join(body) + "\n</html>\n", encoding="utf-8")


def _findings(report: Report) -> list[str]:
    parts = []
    for number, finding in enumerate(report.findings):
        known = CLASSES[finding.mistake]
        parts += [
            f'<h2>{"Or" if number else "Looks like"} <a href="{known.page}">{known.name}</a>: {html.escape(known.title)}</h2>',
            f"<p>Seen: {html.escape(finding.evidence)}.</p><p>Do: {html.escape(known.advice)}.</p>",
        ]
    if report.remarks:
        parts.append("<ul>" + "".join(f"<li>{html.escape(remark)}</li>" for remark in report.remarks) + "</ul>")
    return parts


def _pictures(done: Comparison) -> list[str]:
    found = curves(done)
    if not found["one"]:
        return []
    mark = done.verdict.step
    each = [
        Curve("each rank", [losses[rank] for losses in found["each"]], "each")
        for rank in range(min(len(found["each"][0]), 16))
    ]
    one, ranks = Curve("one device", found["one"], "one"), Curve("mean over the ranks", found["ranks"], "ranks")
    parts = ["<h2>Loss</h2>", draw("Loss on one device and on the ranks", "loss", [*each, one, ranks], mark=mark)]
    if any(value is not None for value in found["excess"]):
        limit = Curve("1: more is no rounding", [1.0] * len(found["excess"]), "limit")
        largest = Curve("largest deviation of a gradient or parameter, by its tolerance", found["excess"], "ranks")
        parts += [
            "<h2>Deviation</h2>",
            draw("Deviation by tolerance", "deviation by tolerance", [largest, limit], logarithmic=True, mark=mark),
            '<p class="weak">The tolerance is what rounding was seen to move in this script, times λ = '
            f"{done.rounding.margin:.1f}.</p>"
            if done.rounding
            else "",
        ]
    return parts


def _observables(report: Report) -> list[str]:
    if not report.observables:
        return []
    columns = list(report.observables[0].relations)
    rows = []
    for observable in sorted(report.observables, key=lambda entry: entry.right):
        cells = "".join(
            '<td class="no">NO</td>' if observable.relations[column] is False else "<td>yes</td>" for column in columns
        )
        rows.append(
            f"<tr><td><code>{html.escape(observable.name)}</code></td>{cells}<td>{html.escape(observable.detail)}</td></tr>"
        )
    heads = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    return [
        "<h2>At that step</h2>",
        f'<div class="scroll"><table><tr><th></th>{heads}<th></th></tr>{"".join(rows)}</table></div>',
    ]


def _runs(done: Comparison) -> list[str]:
    rows = []
    for run in done.runs:
        ends = "; ".join(dict.fromkeys(ended.how for ended in run.ranks))
        steps = sorted({ended.steps for ended in run.ranks})
        said = str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
        rows.append(
            f"<tr><td>{html.escape(run.label)}</td><td>{said}</td><td>{ends}</td><td>{run.seconds:.1f} s</td></tr>"
        )
    return [
        "<h2>Runs</h2>",
        '<div class="scroll"><table><tr><th></th><th>optimizer steps</th><th>end</th><th>time</th></tr>'
        f"{''.join(rows)}</table></div>",
    ]
