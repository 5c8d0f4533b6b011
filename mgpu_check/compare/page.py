"""Write the outcome for people, as one self-contained HTML file."""

from __future__ import annotations

from pathlib import Path

from mgpu_check import pages
from mgpu_check.compare.comparison import ScriptComparison
from mgpu_check.compare.heat import heat_pictures
from mgpu_check.compare.picture import Curve, draw
from mgpu_check.compare.result import curves
from mgpu_check.diagnosis.registry import known_mistake
from mgpu_check.diagnosis.report import Report
from mgpu_check.version import __version__

_TEMPLATE = Path(__file__).with_name("page.html")
_RANKS = 16  # more curves of single ranks would not be readable


def write_page(path: Path, done: ScriptComparison, reference: str = "one device") -> None:
    """Write the verdict, its likely causes, the curves, where the runs differ, and the compared tensors.

    Requires the extra, see `pages.require`.

    Args:
        reference: name of the run that the other run is compared with.
    """
    report = done.verdict.report
    mark = done.verdict.step
    page = pages.render(
        _TEMPLATE,
        version=__version__,
        plan=done.plan,
        verdict=done.verdict,
        report=report,
        findings=[(finding, known_mistake(finding.mistake)) for finding in report.findings],
        reference=reference,
        pictures=_pictures(done, reference),
        heat=[] if done.aligned is None else heat_pictures(done.aligned, done.rounding, mark),
        steps=0 if done.aligned is None else done.aligned.steps,
        rounding=done.rounding,
        columns=_columns(report),
        observables=sorted(report.observables, key=lambda entry: entry.right),
        runs=_runs(done),
    )
    path.write_text(page, encoding="utf-8")


def _columns(report: Report) -> list[str]:
    return list(report.observables[0].relations) if report.observables else []


def _pictures(done: ScriptComparison, reference: str) -> list[dict[str, str]]:
    found = curves(done)
    if not found["one"]:
        return []
    mark = done.verdict.step
    each = [
        Curve("each rank", [losses[rank] for losses in found["each"]], "each")
        for rank in range(min(len(found["each"][0]), _RANKS))
    ]
    one, ranks = Curve(reference, found["one"], "one"), Curve("mean over the ranks", found["ranks"], "ranks")
    loss = draw(f"Loss: {reference}, and the ranks", "loss", [*each, one, ranks], mark=mark)
    pictures = [{"heading": "Loss", "svg": loss, "note": ""}]
    if any(value is not None for value in found["excess"]):
        limit = Curve("1: a larger value is not rounding", [1.0] * len(found["excess"]), "limit")
        largest = Curve(
            "largest deviation of a gradient or parameter, relative to its tolerance", found["excess"], "ranks"
        )
        by = "deviation relative to tolerance"
        note = done.rounding and (
            f"The tolerance is the measured effect of rounding in this script, times λ = {done.rounding.margin:.1f}."
        )
        deviation = draw(by.capitalize(), by, [largest, limit], logarithmic=True, mark=mark)
        pictures.append({"heading": "Deviation", "svg": deviation, "note": note or ""})
    return pictures


def _runs(done: ScriptComparison) -> list[dict[str, object]]:
    rows = []
    for run in done.runs:
        steps = sorted({ended.steps for ended in run.ranks})
        said = str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
        ends = "; ".join(dict.fromkeys(ended.how for ended in run.ranks))
        rows.append({"label": run.label, "steps": said, "ends": ends, "seconds": run.seconds})
    return rows
