"""Find the axes of a mesh that a failure needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mgpu_check.errors import CheckFailure, RankHang
from mgpu_check.gates.failure import Axes
from mgpu_check.gates.meshes import Mesh, size_of
from mgpu_check.gates.trial import Trial, Trials


def shrunk_to_axes(trials: Trials, failed: Trial) -> tuple[Trial, Axes | None]:
    """Return the failure on the fewest axes that show it, and those axes.

    An axis is named only if the same case fails with it and passes without it. The axes are None if at most one axis is
    larger than 1, or if the runs on single axes do not determine them.
    """
    mesh = failed.scenario.mesh
    wide = tuple(axis for axis, size in mesh if size > 1)
    if len(wide) < 2:
        return failed, None
    alone = {axis: _tried(trials, failed, _only(mesh, [axis])) for axis in wide}
    guilty = {axis: outcome for axis, outcome in alone.items() if isinstance(outcome, Trial)}
    passing = tuple(axis for axis, outcome in alone.items() if outcome is True)
    if not guilty:
        return failed, Axes(wide, "all") if len(passing) == len(wide) else None
    others = tuple(axis for axis in wide if axis not in guilty) if len(guilty) == 1 else ()
    return next(iter(guilty.values())), Axes(tuple(guilty), "any", passing, others)


def _tried(trials: Trials, failed: Trial, mesh: Mesh) -> Trial | bool | None:
    """Return the failure on another mesh; True if it passes there; None if the outcome is not known."""
    scenario = replace(failed.scenario, mesh=mesh, world_size=size_of(mesh))
    try:
        outcome = trials.run(scenario)
    except (CheckFailure, RankHang, ValueError):
        return None
    if outcome is not None:
        return outcome if outcome.error is None or failed.error is not None else None
    return True if trials.completed[scenario.place] else None


def _only(mesh: Mesh, axes: Iterable[str]) -> Mesh:
    return tuple((axis, size if axis in axes else 1) for axis, size in mesh)
