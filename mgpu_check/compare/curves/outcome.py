"""Decide the verdict on two sides of curves, and write it: as a report, a table, JSON, and a page with the picture."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mgpu_check import pages
from mgpu_check.compare.curves.judging import ALARM, CurveComparison, Span
from mgpu_check.compare.picture import Curve, draw
from mgpu_check.compare.result import strict
from mgpu_check.compare.verdict import ComparisonVerdict, Kind
from mgpu_check.diagnosis.report import Report
from mgpu_check.version import __version__

_TEMPLATE = Path(__file__).with_name("page.html")
_DRAWN = 12  # more single runs would not be readable
_RULE = f"rule: right runs that are spread normally give a difference in at most {ALARM:.1%} of comparisons"
_REPEAT = "do: give several runs of each side, with other seeds; or let compare run the script, with --repeats=3"


def verdict_of(found: CurveComparison, remarks: Sequence[str] = ()) -> ComparisonVerdict:
    """Judge two sides.

    Args:
        remarks: what is known of their runs.
    """
    kind, what, own = _judged(found)
    own = [*own, *_left_out(found), *([_RULE] if found.freedom else []), *remarks]
    step = found.parted.first if found.parted is not None and kind == "differs" else None
    return ComparisonVerdict(kind, Report(f"{kind}: {what}", remarks=own), step=step, compared=len(found.steps))


def _judged(found: CurveComparison) -> tuple[Kind, str, list[str]]:
    """Return the kind of the verdict, the rest of its headline, and remarks."""
    one, other = found.sides
    if not found.steps:
        why = "some curve is not finite from the first step on" if found.infinite else "the curves share no step"
        return "not comparable", f"{why}: {one}, {other}", []
    if not found.freedom:
        what = f"no run was repeated, so nothing says how far two right runs part: {one}, {other}"
        return "undecided", what, [_REPEAT]
    if (span := found.parted) is not None:
        where = f"at {span}" if span.length == 1 else f"over {span}"
        what = (
            f"the curves part {where}: {_digits(span, 1)} in {other.name} and {_digits(span, 0)} in {one.name}, and "
            f"right runs part by at most {span.tolerance:.3g}"
        )
        single = min(_distinct(found)) < 2
        scale = [
            f"{other.name} is {found.factor:.6g} times {one.name} at every step, and equal otherwise: is the logged "
            "loss scaled differently?"
        ] if found.factor is not None else []  # fmt: skip
        if single:
            return "undecided", what, [*scale, "one run may be an outlier: a single run proves no difference", _REPEAT]
        return "differs", what, scale
    if (ended := _ended_apart(found)) is not None:
        return ended
    count = sum(span.length for span in found.telling)
    if 2 * count < len(found.steps):
        what = "repeated runs part so far that they would hide that half of the training has no effect"
        where = f" on {len(found.steps) - count} of {len(found.steps)} steps" if count else ""
        return "undecided", f"{what}{where}: {one}, {other}", ["do: give more runs of each side, or more steps"]
    if found.uncommon:
        return "undecided", f"the {len(found.steps)} common steps agree, and {found.uncommon} were not compared", [
            "not compared: steps that only some curves have; do: give curves with the same steps, or --curve=STEPS"
        ]  # fmt: skip
    hidden = [span for span in found.rows if span not in found.telling]
    finest = min(found.telling, key=lambda span: span.tolerance or 0.0)
    own = [
        f"it would have seen a difference of {finest.tolerance:.3g} over {finest}, where the loss is "
        f"{_digits(finest, 0)}"
    ]
    if hidden:
        own.append(f"repeated runs part too far to judge {', '.join(map(str, hidden))} by themselves")
    return "equal", f"{other} and {one} part by no more than right runs, on {count} of {len(found.steps)} steps", own


def _digits(span: Span, side: int) -> str:
    """Return a mean with the digits that the difference needs."""
    apart, value = span.apart or span.tolerance or 1.0, abs(span.means[side])
    digits = 3 + max(0, math.ceil(math.log10(value / apart))) if value else 3
    return f"{span.means[side]:.{min(digits, 17)}g}"


def _distinct(found: CurveComparison) -> list[int]:
    return [len(side.curves) - alike for side, alike in zip(found.sides, found.alike, strict=True)]


def _ended_apart(found: CurveComparison) -> tuple[Kind, str, list[str]] | None:
    """Judge curves that are not finite from some step on; else None."""
    if found.infinite is None:
        return None
    step, counts = found.infinite
    told = ", ".join(f"{n} of {side}" for n, side in zip(counts, found.sides, strict=True))
    what = f"from step {step} on the loss becomes not finite in {told}; before, the curves agree"
    sizes = [len(side.curves) for side in found.sides]
    one_side = counts in ((sizes[0], 0), (0, sizes[1]))
    chance = 2 / math.comb(sum(sizes), sum(counts))
    if one_side and chance <= ALARM:
        return "differs", what, []
    if one_side:
        return "undecided", what, [
            f"chance alone would spread these runs so with a probability of up to {min(chance, 1.0):.2g}; do: give "
            "more runs of each side"
        ]  # fmt: skip
    return "undecided", what, []


def _left_out(found: CurveComparison) -> Iterator[str]:
    for side, alike in zip(found.sides, found.alike, strict=True):
        if alike:
            yield (
                f"not counted: {alike} of the runs of {side.name}, equal to another in each digit, so that it shows "
                "no spread; do: give each run another seed"
            )
    if found.uncommon and not found.infinite:
        yield f"{found.uncommon} steps are in some curves only"


def table(found: CurveComparison) -> list[str]:
    """Return the lines of a table: spans that double in length, and the first span beyond its tolerance."""
    cells = [["steps", *(side.name for side in found.sides), "apart", "right runs", ""], *map(_cells, shown(found))]
    cells[0][1:3] = [name if len(name) <= 24 else f"…{name[-23:]}" for name in cells[0][1:3]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(f"{c:>{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]


def shown(found: CurveComparison) -> list[Span]:
    """Return the spans of the table."""
    parted = [found.parted] if found.parted is not None and found.parted not in found.rows else []
    return sorted([*found.rows, *parted], key=lambda span: (span.last, span.length)) if found.steps else []


def _cells(span: Span) -> list[str]:
    steps = str(span.first) if span.length == 1 else f"{span.first}-{span.last}"
    tolerance = "unknown" if span.tolerance is None else f"{span.tolerance:.2g}"
    return [steps, _digits(span, 0), _digits(span, 1), f"{span.apart:.2g}", tolerance, "PARTED" * (span.excess > 1)]


def write_json(path: Path, verdict: ComparisonVerdict, found: CurveComparison | None) -> None:
    """Write the verdict and the compared values for programs.

    Args:
        found: None if a run had no curve.
    """
    outcome: dict[str, Any] = {
        "format": "mgpu-check curves",
        "version": 1,
        "mgpu_check": __version__,
        "verdict": verdict.kind,
        "headline": verdict.report.headline,
        "remarks": verdict.report.remarks,
        "step": verdict.step,
    }
    if found is not None:
        outcome |= {
            "false_alarms": ALARM,
            "freedom": found.freedom,
            "sides": [
                {"name": side.name, "runs": [{"name": c.name, "values": list(c.values.items())} for c in side.curves]}
                for side in found.sides
            ],
            "spans": [_numbers(span) for spans in found.levels for span in spans],
        }
    path.write_text(json.dumps(strict(outcome), indent=1) + "\n", encoding="utf-8")


def _numbers(span: Span) -> dict[str, Any]:
    names = ("first", "last", "length", "means", "spread", "tolerance")
    return {name: getattr(span, name) for name in names} | {"parted": span.excess > 1}


def write_page(path: Path, title: str, verdict: ComparisonVerdict, found: CurveComparison) -> None:
    """Write the verdict, the curves, their distance, and the table. Requires the extra, see `pages.require`."""
    page = pages.render(
        _TEMPLATE,
        version=__version__,
        title=title,
        verdict=verdict,
        found=found,
        pictures=_pictures(found),
        rows=[(_cells(span), span.excess > 1) for span in shown(found)],
    )
    path.write_text(page, encoding="utf-8")


def _pictures(found: CurveComparison) -> list[tuple[str, str]]:
    if not found.steps:
        return []
    mark = found.parted.first if found.parted is not None else None
    single, steps = found.levels[0], found.steps
    curves = [
        Curve(f"each run of {side.name}", [curve.values[step] for step in steps], look)
        for side, look in zip(found.sides, ("each", "others"), strict=True)
        for curve in side.curves[:_DRAWN]
    ]
    means = [
        Curve(f"mean of {side}", [span.means[index] for span in single], look)
        for index, (side, look) in enumerate(zip(found.sides, ("one", "ranks"), strict=True))
    ]
    made = [("Curves", draw("The curves of both sides", "value", [*curves, *means], mark=mark, steps=steps))]
    if found.freedom:
        limit = Curve("1: right runs part no further", [1.0] * len(steps), "limit")
        each = Curve("of single steps", [span.excess for span in single], "each")
        whole = [span.excess for span in found.rows for _ in range(span.length)]
        excess = Curve("of the means over the steps of the table", whole, "ranks")
        title = "Distance, relative to what right runs may part"
        drawn = draw(title, title.lower(), [each, excess, limit], logarithmic=True, mark=mark, steps=steps)
        made.append(("Distance", drawn))
    return made
