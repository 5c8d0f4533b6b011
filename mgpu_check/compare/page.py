"""Write the outcome into files: for people as one self-contained HTML page, for programs as one JSON object.

The page has curves over optimizer steps as inline SVG, readable without colour and on dark and light backgrounds, and a
picture of where two runs differ: steps to the right, modules down, and the number of tolerances as colour.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu_check import pages
from mgpu_check.compare.alignment import QUANTITIES, Aligned, Deviation, Quantity, deviation
from mgpu_check.compare.comparison import ScriptComparison
from mgpu_check.compare.first_difference import compared_output, module_name, ratio_of
from mgpu_check.compare.reports import TENSORS
from mgpu_check.compare.rounding import COMPARED, Rounding
from mgpu_check.compare.trace import OutputSummary, State, TensorSummary
from mgpu_check.diagnosis.report import known_mistake
from mgpu_check.processes.rank_lists import grouped, named
from mgpu_check.version import __version__

_MARKED = 80  # with more steps, marks of points would overlap
_POINTS = 2000  # longer runs are thinned to about this number: more points would not be visible
_MARKS = {"one": "circle", "ranks": "cross"}


@dataclass(frozen=True)
class Curve:
    """A curve of a picture."""

    label: str
    values: Sequence[float | None]  # one for each step; None leaves a gap
    style: str  # "one" (broad and solid), "ranks" (narrow and dashed), "each" (dotted), "limit"; its class in the SVG


def draw(title: str, unit: str, curves: Sequence[Curve], *, logarithmic: bool = False, mark: int | None = None) -> str:
    """Return the picture of `curves` as an ``<svg>`` element, with a `title` for screen readers.
    The vertical axis has `unit` as its label. If it is `logarithmic`, values that are not positive are left out. `mark`
    is a step to mark."""
    steps = max((len(curve.values) for curve in curves), default=0)
    lines = []
    for curve in curves:
        every = max(1, len(curve.values) // _POINTS)
        at = [n for n in range(1, len(curve.values) + 1) if n % every == 0 or n == len(curve.values)]
        form = _MARKS.get(curve.style, "") if len(at) <= _MARKED else ""
        lines.append(pages.Line(curve.label, [(n, curve.values[n - 1]) for n in at], curve.style, form))
    marked = [(min(mark, steps), f"step {mark}: first difference")] if mark is not None and steps else []
    panel = pages.Panel(unit, lines, logarithmic=logarithmic)
    return pages.svg(
        pages.Chart(title, "optimizer step", (1, max(steps, 2)), [panel], marked=marked, whole=True, tall=230)
    )


_COLUMNS = 24  # more steps would not fit the page
_ROWS = 40  # more modules would make the picture unreadable; then they are joined
_LISTED = 6  # tensors of a cell
_DARKEST = 60  # percent: text stays readable
_BITS = 1e-300  # some bits differ, and the numbers of the summary do not
_MISSED = -1.0  # not compared
_Value = tuple[float, str] | None
"""How many tolerances a tensor deviates, and its numbers in words; None for a gradient that neither run has."""
_PASSES: dict[Quantity, str] = {
    "before": "start: parameters",
    "gradient": "backward: gradients",
    "parameter": "update: parameters",
    "state": "update: states and buffers",
}


@dataclass(frozen=True)
class DifferenceCell:
    """The tensors of a module at a step."""

    # how many tolerances the most different tensor deviates; "" for equal bits, "·" for rounding, "?" without a
    # tolerance, "-" if nothing differs and a tensor was not compared
    text: str
    shade: int = 0  # percent of colour, which grows with the deviation beyond the tolerance
    lines: tuple[str, ...] = ()  # the tensors with their values, the most different first


@dataclass(frozen=True)
class HeatPicture:
    """The cells of ranks that differ alike from the first run."""

    ranks: str
    steps: list[int]  # the shown steps, counted from 1
    rows: Mapping[str, Mapping[str, Sequence[DifferenceCell]]]  # pass -> module -> its cells

    @property
    def differs(self) -> bool:
        """True if some cell is beyond its tolerance, or lacks a tolerance."""
        return any(cell.shade for modules in self.rows.values() for cells in modules.values() for cell in cells)


def heat_pictures(aligned: Aligned, rounding: Rounding | None, mark: int | None) -> list[HeatPicture]:
    """Return a picture for each group of ranks that differ alike.
    `rounding`: None if there are no tolerances. `mark`: the first step that differs, counted from 1."""
    steps = shown_steps(min(aligned.steps, max(aligned.compared, mark or 0)), mark)
    measured = rounding is not None
    losses = [_cell([_loss(aligned, rounding, step - 1)], measured) for step in steps]
    by_rank: dict[int, dict[str, dict[str, list[DifferenceCell]]]] = {
        trace.rank: {"forward": {"mean loss of the ranks": losses}} for trace in aligned.ranks
    }

    def cells(by_step: Sequence[Sequence[Mapping[int, _Value]]], rank: int) -> list[DifferenceCell]:
        return [_cell([tensor[rank] for tensor in tensors], measured) for tensors in by_step]

    for module, names in joined({name: name.split(".") for name in aligned.reference.modules}).items():
        outputs = [[_output(aligned, rounding, step - 1, name) for name in names] for step in steps]
        for rank, rows in by_rank.items():
            rows["forward"][f"output of {module}"] = cells(outputs, rank)
    for quantity in QUANTITIES:
        for module, names in joined_modules(aligned, quantity).items():
            by_step = [[_tensor(aligned, rounding, step - 1, quantity, name) for name in names] for step in steps]
            for rank, rows in by_rank.items():
                row = cells(by_step, rank)
                if quantity != "before" or any(cell.shade for cell in row):
                    rows.setdefault(_PASSES[quantity], {})[module] = row
    groups = grouped((repr(rows), rank) for rank, rows in by_rank.items())
    return [HeatPicture(named(ranks), steps, by_rank[ranks[0]]) for _, ranks in groups]


def shown_steps(count: int, mark: int | None) -> list[int]:
    """Return the steps to show, from 1: all, or half of them around the first difference, and the others spread."""
    if count <= _COLUMNS:
        return list(range(1, count + 1))
    half = _COLUMNS // 2
    start = min(max((mark or 1) - 4, 1), count - half + 1)
    near = set(range(start, start + half))
    spread = {1 + index * (count - 1) // (half - 1) for index in range(half)}
    return sorted(near | spread)


def joined_modules(aligned: Aligned, quantity: Quantity) -> dict[str, list[str]]:
    """Return the tensors of each module, in the order of the model."""
    owners = {}
    for name in aligned.named(quantity):
        entry = aligned.parameter(name)
        owners[name] = (entry.of if isinstance(entry, State) else name).split(".")[:-1]
    return joined(owners)


def joined(owners: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the names of each module. Deep modules are joined if there are too many.
    `owners`: name -> the path of its module."""
    depth = max((len(path) for path in owners.values()), default=0)
    while True:
        modules: dict[str, list[str]] = {}
        for name, path in owners.items():
            modules.setdefault(".".join(path[:depth]) or "the model", []).append(name)
        if len(modules) <= _ROWS or depth <= 1:
            return modules
        depth -= 1


def _cell(values: Sequence[_Value], measured: bool) -> DifferenceCell:
    """Return the cell of some values. `measured`: there are tolerances."""
    ordered = sorted((value for value in values if value is not None), key=lambda value: -value[0])
    worst = ordered[0][0] if ordered else _MISSED
    lines = [line for _, line in ordered[:_LISTED]] + [f"and {len(ordered) - _LISTED} more"] * (len(ordered) > _LISTED)
    if worst <= 0 and (not ordered or ordered[-1][0] == _MISSED):
        return DifferenceCell("-", 0, tuple(lines))
    if not worst:
        return DifferenceCell("")
    if not measured:
        return DifferenceCell("?", 30, tuple(lines))
    if worst <= 1:
        return DifferenceCell("·", 0, tuple(lines))
    size = math.log10(worst) if math.isfinite(worst) else math.inf
    text = "∞" if math.isinf(size) else f"{worst:.0f}" if worst < 9.5 else f"1e{round(size)}"
    return DifferenceCell(text, int(min(20 + 10 * size, _DARKEST)), tuple(lines))


def _loss(aligned: Aligned, rounding: Rounding | None, step: int) -> _Value:
    expected, mean, _ = aligned.losses(step)
    tolerance = 1.0 if rounding is None else rounding.of_loss(step)
    if expected is None or mean is None or not math.isfinite(tolerance):
        return _MISSED, "the mean loss: not compared"
    excess = abs(mean - expected) / (abs(expected) or 1.0) / tolerance
    counted = f"; {excess:.3g} tolerances of {tolerance:.2g}" if rounding is not None and excess else ""
    return excess, f"the mean loss: {mean:.7g} instead of {expected:.7g}{counted}"


def _tensor(aligned: Aligned, rounding: Rounding | None, step: int, quantity: Quantity, name: str) -> dict[int, _Value]:
    expected, by_rank = aligned.values_of(step, quantity, name)
    tolerance = 1.0 if rounding is None else rounding.tolerance(step, quantity, name)
    shape, label = aligned.parameter(name).shape, TENSORS[quantity].format(name)
    values_by_summary: dict[TensorSummary | None, _Value] = {}  # most ranks hold the same values
    values: dict[int, _Value] = {}
    for rank in (trace.rank for trace in aligned.ranks):
        got = by_rank.get(rank)
        if rank not in by_rank or not math.isfinite(tolerance):
            reason = "rounding hides everything" if rank in by_rank else "not compared"
            values[rank] = _MISSED, f"{label}: {reason}"
        elif got is None and expected is None:
            values[rank] = None
        else:
            if got not in values_by_summary:
                off = deviation(got, expected, shape)
                excess, words = _excess(got, expected, off, tolerance, rounding is not None)
                values_by_summary[got] = excess, f"{label}: {words}"
            values[rank] = values_by_summary[got]
    return values


def _output(aligned: Aligned, rounding: Rounding | None, step: int, name: str) -> dict[int, _Value]:
    tolerance = 1.0 if rounding is None else rounding.of_output(step, name)
    compared = compared_output(aligned, step, name, tolerance)
    reason = compared.reason or ("rounding hides everything" if math.isinf(tolerance) else "the rank has no part of it")
    label = f"the output of {module_name(name)}"
    values: dict[int, _Value] = {trace.rank: (_MISSED, f"{label}: {reason}") for trace in aligned.ranks}
    for rank, got in compared.by_rank.items() if math.isfinite(tolerance) else ():
        difference = compared.deviation(rank)
        excess, words = _excess(got, compared.expected, difference, tolerance, rounding is not None)
        values[rank] = excess, f"{label}: {words}"
    return values


def _excess(
    got: TensorSummary | OutputSummary | None,
    expected: TensorSummary | OutputSummary | None,
    difference: Deviation,
    tolerance: float,
    measured: bool,
) -> tuple[float, str]:
    same = got is not None and expected is not None and got.bits == expected.bits
    excess = difference.size / tolerance or (0.0 if same else _BITS)
    words = [str(difference) or "equal"]
    if measured and difference.size:
        words.append(f"{excess:.3g} tolerances of {tolerance:.2g}")
    ratio = ratio_of(got, expected)
    if ratio is not None and abs(ratio - 1) > 1e-3:
        words.append(f"norm x {ratio:.5g}")
    return excess, "; ".join(words)


def curves(done: ScriptComparison) -> dict[str, list[Any]]:
    """Return losses and largest deviations of gradients and parameters, with one entry per step.

    "one" is the loss on one device, "ranks" the mean over the ranks, and "each" has the loss of each rank. "deviation"
    is relative to the tensor, and "excess" relative to its tolerance: above 1 it is not rounding. Unknown values are
    None; both deviations are None from the first step whose values on one device are not finite.
    """
    series: dict[str, list[Any]] = {"one": [], "ranks": [], "each": [], "deviation": [], "excess": []}
    aligned = done.aligned
    for step in range(aligned.steps if aligned is not None else 0):
        assert aligned is not None
        largest = _largest(done, aligned, step) if step < aligned.compared else (None, None)
        for values, value in zip(series.values(), (*aligned.losses(step), *largest), strict=True):
            values.append(value)
    return series


def _largest(done: ScriptComparison, aligned: Aligned, step: int) -> tuple[float, float | None]:
    largest, excess = 0.0, None if done.rounding is None else 0.0
    for quantity in COMPARED:
        for name in aligned.names:
            expected, by_rank = aligned.values_of(step, quantity, name)
            shape = aligned.parameter(name).shape
            size = max((deviation(value, expected, shape).size for value in by_rank.values()), default=0.0)
            largest = max(largest, size)
            if done.rounding is not None and excess is not None:
                excess = max(excess, size / done.rounding.tolerance(step, quantity, name))
    return largest, excess


def write_json(path: Path, done: ScriptComparison) -> None:
    """Write the outcome as JSON. Numbers that are not finite become null, because JSON cannot represent them."""
    verdict = done.verdict
    report = verdict.report
    outcome = {
        "format": "mgpu-check comparison",
        "version": 1,
        "mgpu_check": __version__,
        "script": done.plan.shown,
        "simulated": done.plan.simulated,
        "world_size": done.plan.world,
        "verdict": verdict.kind,
        "headline": report.headline,
        "step": verdict.step,
        "parameter": verdict.parameter,
        "tensor": verdict.tensor,
        "ranks": verdict.ranks,
        "ratio": verdict.ratio,
        "axes": report.axes,
        "known": [line for line in report.known if line],
        "steps_equal": verdict.compared,
        "not_compared": dict(verdict.not_compared),
        "replayed": verdict.replayed,
        "mistakes": report.mistakes,
        "findings": [{"mistake": own.mistake, "evidence": own.evidence, "site": own.site} for own in report.findings],
        "remarks": report.remarks,
        "observables": [{"name": o.name, "relations": o.relations, "detail": o.detail} for o in report.observables],
        "runs": [
            {
                "label": run.label,
                "seconds": round(run.seconds, 3),
                "ranks": [
                    {"rank": e.rank, "end": e.how, "exit_code": e.exit_code, "steps": e.steps} for e in run.ranks
                ],
            }
            for run in done.runs
        ],
        "curves": curves(done),
    }  # fmt: skip
    path.write_text(json.dumps(_strict(outcome), indent=1) + "\n", encoding="utf-8")


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _strict(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(entry) for entry in value]
    return value


_TEMPLATE = Path(__file__).with_name("page.html")
_RANKS = 16  # more curves of single ranks would not be readable


def write_page(path: Path, done: ScriptComparison, reference: str) -> None:
    """Write the verdict, its likely causes, the curves, where the runs differ, and the compared tensors.
    Requires the extra, see `pages.require`. `reference`: name of the run that the other run is compared with."""
    report, mark = done.verdict.report, done.verdict.step
    runs = []
    for run in done.runs:
        steps = sorted({ended.steps for ended in run.ranks})
        extent = str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
        ends = "; ".join(dict.fromkeys(ended.how for ended in run.ranks))
        runs.append({"label": run.label, "steps": extent, "ends": ends, "seconds": run.seconds})
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
        columns=list(report.observables[0].relations) if report.observables else [],
        observables=sorted(report.observables, key=lambda entry: entry.right),
        runs=runs,
    )
    path.write_text(page, encoding="utf-8")


def _pictures(done: ScriptComparison, reference: str) -> list[dict[str, str]]:
    series = curves(done)
    if not series["one"]:
        return []
    mark = done.verdict.step
    ranks = range(min(len(series["each"][0]), _RANKS))
    lines = [Curve("each rank", [losses[rank] for losses in series["each"]], "each") for rank in ranks]
    lines += [Curve(reference, series["one"], "one"), Curve("mean over the ranks", series["ranks"], "ranks")]
    loss = draw(f"Loss: {reference}, and the ranks", "loss", lines, mark=mark)
    pictures = [{"heading": "Loss", "svg": loss, "note": ""}]
    if any(value is not None for value in series["excess"]):
        limit = Curve("1: a larger value is not rounding", [1.0] * len(series["excess"]), "limit")
        label = "largest deviation of a gradient or parameter, relative to its tolerance"
        largest = Curve(label, series["excess"], "ranks")
        by = "deviation relative to tolerance"
        note = done.rounding and (
            f"The tolerance is the measured effect of rounding in this script, times λ = {done.rounding.margin:.1f}."
        )
        deviation = draw(by.capitalize(), by, [largest, limit], logarithmic=True, mark=mark)
        pictures.append({"heading": "Deviation", "svg": deviation, "note": note or ""})
    return pictures
