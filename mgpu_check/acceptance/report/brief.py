"""Shorten a report for its JSON file: what went right is counted, what went wrong is kept.

A node of 4 GPUs has a thousand observations that passed, and a thousand samples. ``--evidence`` keeps them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mgpu_check.acceptance.report.figures import PANELS, reasons
from mgpu_check.acceptance.run_report import Accusation, RunReport, Verdict
from mgpu_check.devices.observations import Observation, Work
from mgpu_check.devices.telemetry.fields import FIELDS, Value
from mgpu_check.devices.telemetry.values import TelemetrySample
from mgpu_check.processes.rank_lists import grouped

_WHOLE = 8
"""Observations of a check, a subject and an outcome other than passed that are kept unchanged."""
_SAMPLES = 48
"""Samples of a GPU, and at most as many again with clocks that are held down."""
_KEPT = {*PANELS} | {"throttle", "utilization", "pcie_generation", "pcie_width"}


def brief(report: RunReport) -> RunReport:
    """Return the report with like observations joined, and with fewer samples."""
    observations, place = _joined(report.observations)
    return replace(
        report,
        observations=tuple(observations),
        samples=tuple(_thinned(report.samples)),
        verdict=_verdict(report.verdict, place),
        verdicts={host: _verdict(verdict, place) for host, verdict in report.verdicts.items()},
    )


def _joined(observations: Sequence[Observation]) -> tuple[list[Observation], dict[int, int]]:
    """Return the kept observations, and for each index of `observations` the index of the one that has its case."""
    kept: list[Observation] = []
    place: dict[int, int] = {}
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, entry in enumerate(observations):
        key = (entry.check, entry.subject, entry.outcome, entry.finding)
        mine = groups.setdefault(key, [])
        whole = 0 if entry.outcome in ("passed", "skipped") and not entry.finding else _WHOLE
        if len(mine) <= whole:  # the last of the group stands for all later ones
            mine.append(len(kept))
            kept.append(entry if len(mine) <= whole else replace(entry, evidence={}, suspects=(), work=Work(), times=0))
        place[number] = mine[-1]
        if len(mine) > whole:
            last = kept[mine[-1]]
            kept[mine[-1]] = replace(last, work=last.work + entry.work, times=last.times + entry.times)
    return [replace(one, case=_case(one)) for one in kept], place


def _case(entry: Observation) -> str:
    return entry.case if entry.times == 1 else f"{entry.times} cases, such as: {entry.case}".removesuffix(", such as: ")


def _verdict(verdict: Verdict, place: Mapping[int, int]) -> Verdict:
    def moved(numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(place[number] for number in numbers))

    def accusation(one: Accusation) -> Accusation:
        return replace(one, observations=moved(one.observations), shared=moved(one.shared))

    return replace(
        verdict,
        accusations=tuple(accusation(one) for one in verdict.accusations),
        unexplained=moved(verdict.unexplained),
    )


def _thinned(samples: Sequence[TelemetrySample]) -> list[TelemetrySample]:
    """Return evenly chosen samples of each GPU, with all values in the last, and counters where they have changed."""
    found = []
    for _, mine in grouped((sample.gpu, sample) for sample in samples):
        counted: Mapping[str, Value | None] = {}
        for place in _places(mine):
            sample = mine[place]
            counters = {name: value for name, value in sample.values.items() if FIELDS[name].kind == "counter"}
            whole = counters != counted or place == len(mine) - 1
            values = {name: value for name, value in sample.values.items() if whole or name in _KEPT}
            counted = counters
            found.append(replace(sample, values=values))
    return sorted(found, key=lambda sample: (sample.at, sample.gpu))


def _places(samples: Sequence[TelemetrySample]) -> list[int]:
    """Return the places of the samples to keep: the last, every few, and as many again with low clocks."""
    held = [place for place, sample in enumerate(samples) if reasons(sample)]
    few = range(0, len(samples), -(-len(samples) // _SAMPLES))
    return sorted({*few, *held[:: max(1, -(-len(held) // _SAMPLES))], len(samples) - 1})
