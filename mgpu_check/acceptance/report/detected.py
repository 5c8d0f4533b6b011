"""Say how rare and how slow a fault may be that an acceptance finds."""

from __future__ import annotations

import math

from mgpu_check.acceptance.checklist import CHECKLIST
from mgpu_check.acceptance.report import view
from mgpu_check.acceptance.run_report import RunReport

_MISSED = 0.05
"""Probability that a rare fault is missed."""


def detected(report: RunReport) -> list[str]:
    return [line for line in (rates(report), slowness(report)) if line]


def rates(report: RunReport) -> str:
    """Return the rarest faults that the checks without failures find with a probability of 95 %; "" if none counts.

    A fault that strikes each of n operations with probability 1/N is missed with probability (1 - 1/N)^n.
    """
    found = []
    for run in view.checks_by_name(report):
        unit, done = CHECKLIST[run.name].counts if run.name in CHECKLIST else "", run.least.operations
        if unit and done > 1 and run.outcome == "passed":
            found.append(f"1 in {math.floor(1 / (1 - _MISSED ** (1 / done)))} {unit}")
    return f"faults as rare as {', '.join(found)} are found with a probability of 95 %" if found else ""


def slowness(report: RunReport) -> str:
    """Return how much slower than its peers a part must be to be found, by the kind of speed; "" if none has peers."""
    limits: dict[str, float] = {}
    speeds = [entry for entry in report.observations if {"comparisons", "measured_by"} <= entry.evidence.keys()]
    compared = 0
    for entry in speeds:
        for one in entry.evidence["comparisons"]:
            if one["against"] == "peers" and one["outcome"] in ("passed", "failed"):
                compared += 1
                pageable = ", pageable" * entry.evidence["quantity"].startswith("pageable")
                host = pageable or ", host" * (entry.subject.kind in ("upload", "download"))
                name = f"{entry.evidence['measured_by']}{', times' if entry.evidence['unit'] == 's' else host}"
                limits[name] = max(limits.get(name, 0.0), one["limit"])
    found = ", ".join(f"{limit:.0%} ({name})" for name, limit in limits.items())
    return (
        f"a part slower than its peers by {found} is found; {compared} of {len(speeds)} speeds have peers"
        if found
        else ""
    )
