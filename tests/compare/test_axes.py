"""Axes of the script's meshes: along which ranks agree, and along which they differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mgpu_check.compare.alignment import Aligned
from mgpu_check.compare.assembly import assembled
from mgpu_check.compare.diagnosis import axes_of
from mgpu_check.compare.in_script import script_calls
from mgpu_check.compare.rounding import Rounding
from mgpu_check.compare.trace import Trace
from mgpu_check.compare.verdict import ComparisonVerdict, verdict_of
from mgpu_check.diagnosis.report import Report
from tests.compare.test_assembly import GRADIENT, ONE, WEIGHT, part, trace


def with_mesh(made: Trace, sizes: dict[str, int]) -> Trace:
    """Give a rank its place in a mesh, whose last axis varies fastest."""
    axes, rest = [], made.rank
    for name, size in reversed(sizes.items()):
        rest, index = divmod(rest, size)
        axes.append([name, index, size])
    made.events.append({"event": "mesh", "after": 0, "axes": axes[::-1]})
    return made


def with_groups(made: Trace, *groups: list[int]) -> Trace:
    made.events += [{"event": "subgroup", "after": 0, "ranks": ranks} for ranks in groups]
    return made


def scaled(rank: int, scale: float, world: int = 4) -> Trace:
    values = None, WEIGHT, scale * GRADIENT, WEIGHT - 0.1 * scale * GRADIENT
    return trace(rank, world, {"net.weight": values})


def judged(ranks: list[Trace]) -> ComparisonVerdict:
    found = assembled(ONE, ranks)
    aligned = Aligned(ONE, found.ranks, **found.placed())
    return verdict_of(aligned, Rounding(ONE, [ONE]), None)


@pytest.mark.parametrize(
    ("scales", "told"),
    [
        ((1, 2, 1, 2), "ranks agree along dp, and differ along cp; it is wrong where the index along cp is 1"),
        ((1, 1, 3, 3), "ranks agree along cp, and differ along dp; it is wrong where the index along dp is 1"),
        ((1, 1, 1, 3), "ranks differ along dp and cp"),
        ((2, 2, 2, 2), "2, the size of dp or cp, is the factor"),
        ((4, 4, 4, 4), ""),  # the world size has a name of its own
        ((1.3, 1.3, 1.3, 1.3), ""),
    ],
)
def test_the_axis_is_named_along_which_ranks_differ(scales, told):
    ranks = [with_mesh(scaled(rank, scale), {"dp": 2, "cp": 2}) for rank, scale in enumerate(scales)]
    found = judged(ranks)
    assert (found.kind, found.report.axes) == ("differs", told)


def test_only_ranks_that_hold_the_same_slice_can_agree():
    def shard(rank: int, scale: float) -> Trace:
        rows = range(4) if rank % 2 == 0 else range(4, 8)
        return with_mesh(trace(rank, 4, {"shard": part(rows, scale)}), {"dp": 2, "tp": 2})

    found = judged([shard(rank, scale) for rank, scale in enumerate((1, 1, 1, 3))])
    assert found.report.axes == "ranks differ along dp"
    found = judged([shard(rank, scale) for rank, scale in enumerate((1, 3, 1, 3))])
    assert found.report.axes == "it is wrong where the index along tp is 1"


def test_groups_without_a_mesh_are_named_by_their_ranks():
    groups = [0, 1], [2, 3], [0, 2], [1, 3]
    found = judged([with_groups(scaled(rank, scale), *groups) for rank, scale in enumerate((1, 1, 2, 2))])
    assert found.report.axes == (
        "ranks agree along the groups of ranks 0-1 and of ranks 2-3, and differ along the groups of ranks 0, 2 and of "
        "ranks 1, 3"
    )


def test_axes_are_those_of_every_mesh_and_of_groups_once():
    ranks = [with_groups(with_mesh(scaled(rank, 1), {"pp": 1, "dp": 2, "tp": 2}), [0, 1], [2, 3]) for rank in range(4)]
    for made in ranks:
        with_groups(with_mesh(made, {"flat": 4}), [1, 2])
    assert [(axis.name, axis.lines) for axis in axes_of(ranks)] == [
        ("dp", ((0, 2), (1, 3))),
        ("tp", ((0, 1), (2, 3))),
        ("flat", ((0, 1, 2, 3),)),
    ]
    assert axes_of([scaled(rank, 1) for rank in range(4)]) == []


def test_a_mesh_is_noted_with_the_place_of_the_rank():
    class Mesh:
        mesh_dim_names = "dp", "tp"

        def get_coordinate(self):
            return [1, 0]

        def size(self, dim):
            return (2, 4)[dim]

    assert script_calls._axes(Mesh()) == [("dp", 1, 2), ("tp", 0, 4)]
    part_of_another: Any = Mesh()
    part_of_another._root_mesh = Mesh()
    assert script_calls._axes(part_of_another) == []


SUM, BACKWARD = "all_reduce (sum, 2 ranks) at train.py:7", "backward at train.py:5"
NORM = float(GRADIENT.norm())


SO, OTHERWISE = "leaves it so", f"{SUM} leaves the gradient of one device, and a later operation changes it"
BETWEEN = f"{SUM} runs between {BACKWARD} and the step of the optimizer"  # as of a flat buffer


def told_of(report: Report) -> str:
    (finding,) = report.findings
    assert finding.mistake == "world-size-factor"
    return finding.evidence.partition(": the world size")[2].removeprefix("; ")


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ([(BACKWARD, 0.7), (SUM, 2)], f"{SUM} {SO}"),
        ([(BACKWARD, 2)], f"{BACKWARD} {SO}"),  # a wrong loss, and hooks that reduce
        ([(SUM, 2), (BACKWARD, 2)], f"{SUM} {SO}"),  # a hook of the script
        ([(BACKWARD, 2), (BACKWARD, 1), (SUM, 2)], f"{SUM} {SO}"),
        ([(BACKWARD, 0.7), (SUM, 1)], OTHERWISE),
        ([(BACKWARD, 0.7), (SUM, None)], BETWEEN),
        ([(BACKWARD, 0.7)], ""),
        ([], ""),
    ],
)
def test_the_call_is_named_that_leaves_a_factor(calls, told):
    ranks = [scaled(rank, 2, 2) for rank in range(2)]
    for made in ranks:
        made.steps[0].calls = [(name, {} if n is None else {"net.weight": n * NORM}) for name, n in calls]
    assert told_of(judged(ranks).report) == told


def sliced(rank: int, scale: float, norms: Sequence[float | None]) -> Trace:
    """A rank with half of the rows, whose gradient has these norms after the calls, relative to that of one device."""
    rows = range(4 * rank, 4 * rank + 4)
    made = trace(rank, 2, {"shard": part(rows, scale)})
    own = float(GRADIENT[list(rows)].norm())
    told = zip((BACKWARD, SUM), norms, strict=True)
    made.steps[0].calls = [(name, {} if n is None else {"shard": n * own}) for name, n in told]
    return made


@pytest.mark.parametrize(
    ("norms", "told"), [((0.7, 2), f"{SUM} {SO}"), ((1, None), BETWEEN), ((0.7, 1), OTHERWISE), ((0.7, 0.6), "")]
)
def test_the_call_is_named_that_leaves_a_factor_in_all_slices(norms, told):
    report = judged([sliced(rank, 2, norms) for rank in range(2)]).report
    assert (told_of(report), report.known) == (told, [])


@pytest.mark.parametrize(
    ("norms", "where"), [((0.7, 3), f"; {SUM} {SO}"), ((0.7, 1), f"; {OTHERWISE}"), ((0.7, 0.6), "")]
)
def test_the_factor_of_one_slice_is_told_with_its_call(norms, where):
    told = "on rank 1 the slice of the gradient of net.weight is 3 times that of one device, and the other slices are"
    report = judged([sliced(0, 1, (1, 1)), sliced(1, 3, norms)]).report
    assert (report.mistakes, report.known) == ((), [f"{told} right{where}"])
    assert told in str(report)


def test_without_a_right_slice_or_one_factor_there_is_no_line():
    assert judged([sliced(0, 2, (1, 2)), sliced(1, 3, (1, 3))]).report.known == []
    cut, value, gradient, _ = part(range(4, 8))
    other = trace(1, 2, {"shard": (cut, value, gradient.roll(1), value)})
    other.steps[0].calls = sliced(1, 1, (1, 1)).steps[0].calls
    found = judged([sliced(0, 1, (1, 1)), other])
    assert (found.kind, found.report.known) == ("differs", [])
