"""Find the axes of a mesh that a failure needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mgpu_check.errors import CheckFailure, RankHang
from mgpu_check.gates.meshes import Mesh, size_of
from mgpu_check.gates.trial import Trial, Trials

__all__ = ["shrunk_to_axes"]


def shrunk_to_axes(trials: Trials, failed: Trial) -> tuple[Trial, str]:
    """Return the failure on the fewest axes that show it, and in words which axes those are; "" if there is one axis only.

    An axis is named only if the same case fails with it, and passes without it.
    """
    mesh = failed.scenario.mesh
    wide = [axis for axis, size in mesh if size > 1]
    if len(wide) < 2:
        return failed, ""
    alone = {axis: _tried(trials, failed, _only(mesh, [axis])) for axis in wide}
    guilty = [axis for axis, outcome in alone.items() if isinstance(outcome, Trial)]
    passing = [axis for axis, outcome in alone.items() if outcome is True]
    if len(guilty) == 1:
        others = [axis for axis in wide if axis not in guilty]
        told = f"fails when {guilty[0]} > 1, for any {' and '.join(others)}"
        if rest := [axis for axis in others if axis in passing]:
            told += f"; passes with {_and(rest)} alone"
        smaller = alone[guilty[0]]
        return (smaller if isinstance(smaller, Trial) else failed), told
    if guilty:
        smaller = alone[guilty[0]]
        return (smaller if isinstance(smaller, Trial) else failed), f"fails when {_or(guilty)} > 1, each by itself"
    if len(passing) == len(wide):
        return failed, f"fails only when {_and(wide)} > 1 together; passes with each alone"
    return failed, ""


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


def _and(axes: Iterable[str]) -> str:
    return " and ".join(axes)


def _or(axes: Iterable[str]) -> str:
    return " or ".join(axes)
