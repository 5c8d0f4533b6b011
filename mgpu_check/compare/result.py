"""Write the outcome for programs, as one JSON object."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from mgpu_check.compare.alignment import Aligned, Kind, deviation
from mgpu_check.compare.comparison import ScriptComparison
from mgpu_check.version import __version__

_KINDS: tuple[Kind, ...] = ("gradient", "parameter")


def curves(done: ScriptComparison) -> dict[str, list[Any]]:
    """Return losses and largest deviations of gradients and parameters, with one entry per step.

    "one" is the loss on one device, "ranks" the mean over the ranks, and "each" has the loss of each rank. "deviation"
    is relative to the tensor, and "excess" relative to its tolerance: above 1 it is not rounding. Unknown values are
    None; both deviations are None from the first step whose values on one device are not finite.
    """
    found: dict[str, list[Any]] = {"one": [], "ranks": [], "each": [], "deviation": [], "excess": []}
    aligned = done.aligned
    if aligned is None:
        return found
    for step in range(aligned.steps):
        one, mean, each = aligned.losses(step)
        found["one"].append(one)
        found["ranks"].append(mean)
        found["each"].append(each)
        size, excess = _largest(done, aligned, step) if step < aligned.compared else (None, None)
        found["deviation"].append(size)
        found["excess"].append(excess)
    return found


def _largest(done: ScriptComparison, aligned: Aligned, step: int) -> tuple[float, float | None]:
    largest, excess = 0.0, None if done.rounding is None else 0.0
    for kind in _KINDS:
        for name in aligned.names:
            expected, here = aligned.found(step, kind, name)
            shape = aligned.parameter(name).shape
            size = max((deviation(value, expected, shape).size for value in here.values()), default=0.0)
            largest = max(largest, size)
            if done.rounding is not None and excess is not None:
                excess = max(excess, size / done.rounding.tolerance(step, kind, name))
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
        "findings": [{"mistake": one.mistake, "evidence": one.evidence, "site": one.site} for one in report.findings],
        "remarks": report.remarks,
        "observables": [
            {"name": o.name, "relations": o.relations, "detail": o.detail} for o in report.observables
        ],
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
    """Return the value with null for numbers that are not finite, as JSON needs."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _strict(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(part) for part in value]
    return value
