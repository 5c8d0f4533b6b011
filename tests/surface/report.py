"""Compare what a run has drawn with what it must draw, and print the difference as a table."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.surface.demands import CALLED, Call, Variant, demanded
from tests.surface.names import AREAS, area_of, tagged
from tests.surface.reasons import reason_for

RECORD = Path(__file__).parent / "drawn.json"
"""The record of runs at the level standard. `python -m tests.surface` writes it."""


class SurfaceRecord:
    """The drawn classes of values, by function and parameter.

    Attributes:
        torch: the version that they were drawn with.
    """

    def __init__(self, torch: str = "") -> None:
        self.torch = torch or tagged()
        self.drawn: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))

    def add(self, calls: Iterable[Call]) -> None:
        """Add classes that a process has reported."""
        for path, parameter, found in calls:
            self.drawn[path][parameter].add(found)

    def has(self, variant: Variant) -> bool:
        """Return whether a variant was drawn."""
        return variant.path in self.drawn and variant.value in self.drawn[variant.path].get(variant.parameter, ())

    @classmethod
    def read(cls, path: Path) -> SurfaceRecord:
        """Read a record.

        Raises:
            ValueError: the file holds no record.
        """
        try:
            content = json.loads(path.read_text())
            made = cls(content["torch"])
            for function, parameters in content["drawn"].items():
                made.add((function, name, one) for name, found in parameters.items() for one in found)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it holds no record of a surface ({type(error).__name__}: {error})") from error
        return made

    def write(self, path: Path) -> None:
        """Write the record, with a line for each function."""
        lines = [
            f"  {json.dumps(function)}: " + json.dumps({name: sorted(found) for name, found in sorted(many.items())})
            for function, many in sorted(self.drawn.items())
        ]
        head = f'{{"torch": {json.dumps(self.torch)}, "drawn": {{\n'
        path.write_text(head + ",\n".join(lines) + "\n}}\n")


@dataclass(frozen=True)
class Judged:
    """A variant that must be drawn.

    Attributes:
        state: "drawn", "left out" with a reason, or "undrawn".
        reason: why it is left out; "" in the other states.
    """

    variant: Variant
    state: str
    reason: str = ""


def judged(record: SurfaceRecord) -> Iterator[Judged]:
    """Yield each variant of the installed torch. Of a function that is never called, only the call is a variant."""
    for variants in demanded():
        for variant in variants if record.has(variants[0]) else variants[:1]:
            if record.has(variant):
                yield Judged(variant, "drawn")
            elif reason := reason_for(variant):
                yield Judged(variant, "left out", reason)
            else:
                yield Judged(variant, "undrawn")


def report(record: SurfaceRecord) -> tuple[str, int]:
    """Return the table, and the number of variants that are undrawn: not left out for a reason."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    undrawn: dict[tuple[str, str], list[str]] = {}
    left: Counter[str] = Counter()
    for one in judged(record):
        area = counts[area_of(one.variant.path)]
        area["functions"] += one.variant.value == CALLED
        area["called"] += one.variant.value == CALLED and one.state == "drawn"
        area["variants"] += 1
        area[one.state] += 1
        if one.state == "undrawn":
            undrawn.setdefault((one.variant.path, one.variant.parameter), []).append(one.variant.value)
        elif one.state == "left out":
            left[one.reason] += 1
    lines = [f"{'surface':<44}" + "".join(f"{column:>10}" for column in _COLUMNS)]
    lines += [_row(name, counts[name]) for name in AREAS]
    lines.append(_row("all", sum(counts.values(), Counter())))
    if left:
        lines += ["", "left out:", *(f"{count:>6}  {reason}" for reason, count in left.most_common())]
    if undrawn:
        lines += ["", "undrawn:", *(f"  {_line(*names, values)}" for names, values in sorted(undrawn.items()))]
    return "\n".join(lines), sum(area["undrawn"] for area in counts.values())


_COLUMNS = ("functions", "called", "variants", "drawn", "left out", "undrawn")


def _line(path: str, parameter: str, values: list[str]) -> str:
    return f"{path}  {parameter}: {' | '.join(values)}" if parameter else path


def _row(name: str, count: Counter[str]) -> str:
    return f"{name:<44}" + "".join(f"{count[column]:>10}" for column in _COLUMNS)
