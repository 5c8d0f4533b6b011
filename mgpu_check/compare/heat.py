"""Show where two runs differ, for a page: steps to the right, modules down, and the number of tolerances as colour."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mgpu_check.compare.alignment import KINDS, Aligned, Kind, deviation
from mgpu_check.compare.first_difference import ratio_of
from mgpu_check.compare.rounding import Rounding
from mgpu_check.compare.telling import TENSORS
from mgpu_check.compare.trace import State
from mgpu_check.processes.rank_lists import grouped, named

_COLUMNS = 24  # more steps would not fit the page
_ROWS = 40  # more modules would make the picture unreadable; then they are joined
_LISTED = 6  # tensors of a cell
_DARKEST = 60  # percent: text stays readable
_BITS = 1e-300  # some bits differ, and the numbers of the summary do not
_PASSES: dict[Kind, str] = {
    "before": "start: parameters",
    "gradient": "backward: gradients",
    "parameter": "update: parameters",
    "state": "update: states and buffers",
}


@dataclass(frozen=True)
class DifferenceCell:
    """The tensors of a module at a step.

    Attributes:
        text: how many tolerances the most different tensor deviates; "" for equal bits, "·" for rounding, "?" without a
            tolerance, "-" for tensors that were not compared.
        shade: percent of colour, which grows with the deviation beyond the tolerance.
        lines: the tensors with their values, the most different first.
    """

    text: str
    shade: int = 0
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeatPicture:
    """The cells of ranks that differ alike from the first run.

    Attributes:
        steps: the shown steps, counted from 1.
        rows: pass -> module -> its cells.
    """

    ranks: str
    steps: list[int]
    rows: Mapping[str, Mapping[str, Sequence[DifferenceCell]]]

    @property
    def differs(self) -> bool:
        """True if some cell is beyond its tolerance, or lacks a tolerance."""
        return any(cell.shade for modules in self.rows.values() for cells in modules.values() for cell in cells)


def heat_pictures(aligned: Aligned, rounding: Rounding | None, mark: int | None) -> list[HeatPicture]:
    """Return a picture for each group of ranks that differ alike.

    Args:
        rounding: None if there are no tolerances.
        mark: the first step that differs, counted from 1.
    """
    steps = shown_steps(min(aligned.steps, max(aligned.compared, mark or 0)), mark)
    by_rank = []
    for trace in aligned.ranks:
        losses = [_cell(_loss(aligned, rounding, step - 1), rounding is not None) for step in steps]
        rows: dict[str, dict[str, list[DifferenceCell]]] = {"forward": {"mean loss of the ranks": losses}}
        for kind in KINDS:
            modules = joined_modules(aligned, kind)
            for module, names in modules.items():
                cells = [
                    _cell(_tensors(aligned, rounding, step - 1, kind, names, trace.rank), rounding is not None)
                    for step in steps
                ]
                if kind != "before" or any(cell.shade for cell in cells):
                    rows.setdefault(_PASSES[kind], {})[module] = cells
        by_rank.append((rows, trace.rank))
    groups = grouped((repr(rows), rank) for rows, rank in by_rank)
    known = {rank: rows for rows, rank in by_rank}
    return [HeatPicture(named(ranks), steps, known[ranks[0]]) for _, ranks in groups]


def shown_steps(count: int, mark: int | None) -> list[int]:
    """Return the steps to show, from 1: all, or half of them around the first difference, and the others spread."""
    if count <= _COLUMNS:
        return list(range(1, count + 1))
    half = _COLUMNS // 2
    first = min(max((mark or 1) - 4, 1), count - half + 1)
    near = set(range(first, first + half))
    spread = {1 + index * (count - 1) // (half - 1) for index in range(half)}
    return sorted(near | spread)


def joined_modules(aligned: Aligned, kind: Kind) -> dict[str, list[str]]:
    """Return the tensors of each module, in the order of the model. Deep modules are joined if there are too many."""
    owners = {}
    for name in aligned.named(kind):
        entry = aligned.parameter(name)
        owners[name] = (entry.of if isinstance(entry, State) else name).split(".")[:-1]
    depth = max((len(path) for path in owners.values()), default=0)
    while True:
        found: dict[str, list[str]] = {}
        for name, path in owners.items():
            found.setdefault(".".join(path[:depth]) or "the model", []).append(name)
        if len(found) <= _ROWS or depth <= 1:
            return found
        depth -= 1


def _cell(values: Iterable[tuple[float, str]], measured: bool) -> DifferenceCell:
    """Return the cell of some values: how many tolerances each deviates, and the value in words.

    Args:
        measured: there are tolerances.
    """
    found = sorted(values, key=lambda one: -one[0])
    if not found:
        return DifferenceCell("-")
    worst = found[0][0]
    lines = [line for _, line in found[:_LISTED]] + [f"and {len(found) - _LISTED} more"] * (len(found) > _LISTED)
    if not worst:
        return DifferenceCell("")
    if not measured:
        return DifferenceCell("?", 30, tuple(lines))
    if worst <= 1:
        return DifferenceCell("·", 0, tuple(lines))
    size = math.log10(worst) if math.isfinite(worst) else math.inf
    text = "∞" if math.isinf(size) else f"{worst:.0f}" if worst < 9.5 else f"1e{round(size)}"
    return DifferenceCell(text, int(min(20 + 10 * size, _DARKEST)), tuple(lines))


def _loss(aligned: Aligned, rounding: Rounding | None, step: int) -> Iterator[tuple[float, str]]:
    one, mean, _ = aligned.losses(step)
    tolerance = 1.0 if rounding is None else rounding.of_loss(step)
    if one is None or mean is None or not math.isfinite(tolerance):
        return
    excess = abs(mean - one) / (abs(one) or 1.0) / tolerance
    counted = f"; {excess:.3g} tolerances of {tolerance:.2g}" if rounding is not None and excess else ""
    yield excess, f"the mean loss: {mean:.7g} instead of {one:.7g}{counted}"


def _tensors(
    aligned: Aligned, rounding: Rounding | None, step: int, kind: Kind, names: Sequence[str], rank: int
) -> Iterator[tuple[float, str]]:
    """Yield how many tolerances each tensor of a rank deviates, and its values in words."""
    for name in names:
        expected, here = aligned.found(step, kind, name)
        got = here.get(rank)
        if rank not in here or (expected is None and got is None):
            continue
        apart = deviation(got, expected, aligned.parameter(name).shape)
        tolerance = 1.0 if rounding is None else rounding.tolerance(step, kind, name)
        if not math.isfinite(tolerance):
            continue  # rounding hides everything
        same = got is not None and expected is not None and got.bits == expected.bits
        excess = apart.size / tolerance or (0.0 if same else _BITS)
        ratio = ratio_of(got, expected)
        words = [f"{TENSORS[kind].format(name)}: {apart}" if str(apart) else f"{TENSORS[kind].format(name)}: equal"]
        if rounding is not None and apart.size:
            words.append(f"{excess:.3g} tolerances of {tolerance:.2g}")
        if ratio is not None and abs(ratio - 1) > 1e-3:
            words.append(f"norm x {ratio:.5g}")
        yield excess, "; ".join(words)
