"""Find slow GPUs and links: compare measurements with the other GPUs of the node, a baseline, and the floors of the
SKU.

Each comparison is passed, failed, or unknown. An observation fails if one of its comparisons fails, and is unknown if
all of them are unknown. If no majority shows which values are right, the GPUs *differ*: all of them are suspects. See
`mgpu_check.acceptance.robust` for the statistics and the origin of the limits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mgpu_check.acceptance.baseline import Baseline
from mgpu_check.acceptance.comparison import Against, Comparison, amount, least_shortfall, useless, wrong
from mgpu_check.acceptance.performance.peers import Group, among_peers, gpus_of, link_classes
from mgpu_check.acceptance.robust import shortfall
from mgpu_check.acceptance.run_report import Gpu
from mgpu_check.acceptance.skus import Floors, packaged_floors
from mgpu_check.devices.observations import Measurement, Observation, Outcome, Subject, Work

CHECK = "performance"

_OWN_LOSS = 0.25
"""Share of the speed that a GPU may lose after its first measurement in a run: clocks fall by a few percent as it warms
up."""

_NAMES: Mapping[Against, str] = {
    "peers": "the others",
    "itself": "its own first measurement",
    "baseline": "the baseline",
    "floor": "the floor of its SKU",
}


def judge(
    measurements: Sequence[Measurement],
    gpus: Sequence[Gpu],
    baseline: Baseline | None = None,
    floors: Floors | None = None,
    software: Mapping[int, Mapping[str, str]] | None = None,
    links: Mapping[tuple[int, int], str] | None = None,
    again: Sequence[Measurement] = (),
) -> list[Observation]:
    """Compare each measurement with its references.

    Args:
        measurements: with numbers of GPUs in the run. Several measurements of one subject, quantity and size must be in
            the order of time; the later ones are also compared with the first.
        baseline: result of `mgpu_check.acceptance.baseline.read_baseline`; None without a baseline.
        floors: default the table of this package.
        software: versions of "driver", "cuda", "nccl" and "torch" by host; a baseline of other versions does not count.
        links: class of the link from the first GPU to the second. Only links of one class are compared. For a pair
            without a class, the classes are derived from the speeds. Default the classes that the facts of the GPUs
            give.
        again: measurements of a second look, in another order. A value that was measured again is slow only if both
            looks show it; if one does, the observation has the evidence "once".

    Returns:
        One observation for each measurement. A measurement without any comparison is unknown. It is skipped instead if
        the subject has another measurement with a comparison, or is a group, because its GPUs and links are judged by
        themselves.

        In addition a failed observation of the group of GPUs that differ without a majority. Its evidence has the key
        "differ", or "differ to the host" for copies from and to the host.

        And one unknown observation for each GPU without a comparison with `floors` or `baseline`: if all GPUs of a node
        are too slow, a comparison between them does not show it. The same if `baseline` is given and does not apply.
    """
    floors = packaged_floors() if floors is None else floors
    by_number = {gpu.number: gpu for gpu in gpus}
    first_look = len(measurements)
    measurements = [*measurements, *again]
    unknown = sorted({gpu for m in measurements for gpu in gpus_of(m.subject)} - set(by_number))
    if unknown:
        raise ValueError(f"judge: measurements are of GPUs {unknown}, but gpus has {sorted(by_number)}")
    beside, split = among_peers(measurements, by_number, link_classes(gpus) if links is None else links)
    judged: list[tuple[Measurement, list[Comparison]]] = []
    firsts: dict[tuple[Any, ...], Measurement] = {}
    for number, measurement in enumerate(measurements):
        comparisons = [beside[number]]
        judged.append((measurement, comparisons))
        if useless(measurement):
            continue
        first = firsts.setdefault((measurement.subject, *measurement.kind), measurement)
        if first is not measurement:
            comparisons.append(_beside_itself(measurement, first))
        if baseline is not None:
            comparisons.append(baseline.compare(measurement, by_number, software or {}))
        comparisons += floors.compare(measurement, by_number)
    known = {
        measurement.subject for measurement, comparisons in judged if _outcome(comparisons) in ("passed", "failed")
    }
    found = [_observation(measurement, comparisons, known) for measurement, comparisons in judged]
    looks = [
        _JudgedSpeed(number >= first_look, one.kind, entry)
        for number, (one, entry) in enumerate(zip(measurements, found, strict=True))
    ]
    open_ = [group for group in split if all(found[number].outcome != "failed" for number in group)]
    looks += [_differ(group, min(group) >= first_look) for group in open_]  # another reference has not decided
    return _confirmed(looks) + list(_without_reference(judged, by_number, baseline, floors, software or {}))


@dataclass(frozen=True)
class _JudgedSpeed:
    second: bool
    kind: tuple[Any, ...]
    entry: Observation

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.entry.subject, self.kind)


def _confirmed(looks: Sequence[_JudgedSpeed]) -> list[Observation]:
    """Return the observations of both looks; failures that one of two looks shows have the evidence "once"."""
    again = {look.kind for look in looks if look.second}
    one, other = ({k.key for k in looks if k.second == second and k.entry.outcome == "failed"} for second in (0, 1))
    both = one & other
    found = []
    for look in looks:
        entry = look.entry
        if entry.outcome == "failed" and look.kind in again:
            once = look.key not in both
            said = "in one of two looks only" if once else "again when measured in another order"
            evidence = {**entry.evidence, "once": True} if once else entry.evidence
            entry = replace(entry, seen=f"{entry.seen}; {said}", evidence=evidence)
        found.append(entry)
    return found


def unmeasured(measurements: Sequence[Measurement], gpus: Sequence[Gpu]) -> list[Observation]:
    """Return an observation for each GPU whose own speed was not measured: skipped if its links were, else unknown."""
    measured = {m.subject.members[0] for m in measurements if m.subject.kind == "gpu"}
    linked = {member for m in measurements for member in gpus_of(m.subject)}
    found = []
    for gpu in gpus:
        subject = Subject("gpu", (gpu.number,))
        if gpu.number in linked - measured:
            found.append(Observation(CHECK, subject, "skipped", "only its links were measured"))
        elif gpu.number not in measured:
            why = "no check has measured how fast it is; memory, compute and links do"
            found.append(Observation(CHECK, subject, "unknown", why))
    return found


def _differ(group: Group, second: bool) -> _JudgedSpeed:
    """Return the observation of GPUs that differ, which accuses no GPU."""
    several = sorted(group.values(), key=lambda one: one.subject)
    first, values = several[0], {str(m.subject): amount(m.value, m.unit) for m in several}
    members = tuple(sorted({gpu for m in several for gpu in gpus_of(m.subject)}))
    key = "differ to the host" if first.subject.kind in ("upload", "download") else "differ"
    evidence = {
        "measured_by": first.check, "quantity": first.quantity, "unit": first.unit, "size": first.size,
        key: {str(m.subject): m.value for m in several},
    }  # fmt: skip
    seen = f"{first.quantity} differs: {', '.join(map(': '.join, values.items()))}; no majority shows which is right"
    subject, work = Subject("group", members), Work(operations=min(m.repeats for m in several))
    entry = Observation(CHECK, subject, "failed", seen, _size(first), work, evidence, members)
    return _JudgedSpeed(second, first.kind, entry)


def _beside_itself(measurement: Measurement, first: Measurement) -> Comparison:
    missing = shortfall(measurement.value, first.value, measurement.unit)
    limit = max(_OWN_LOSS, least_shortfall(measurement.kind))
    outcome: Outcome = "failed" if missing > limit else "passed"
    return Comparison("itself", outcome, first.value, missing, limit, "first measurement of this run")


def _outcome(comparisons: Sequence[Comparison]) -> Outcome:
    outcomes = [comparison.outcome for comparison in comparisons]
    return "failed" if "failed" in outcomes else "passed" if "passed" in outcomes else "unknown"


def _observation(
    measurement: Measurement, comparisons: Sequence[Comparison], known: Collection[Subject]
) -> Observation:
    outcome = _outcome(comparisons)
    telling = [comparison for comparison in comparisons if comparison.outcome == outcome]
    elsewhere = measurement.subject in known or measurement.subject.kind == "group"
    if outcome == "unknown" and elsewhere and not wrong(measurement):
        outcome = "skipped"
    evidence = {
        "measured_by": measurement.check,
        **({"collective": True} if measurement.check == "collectives" else {}),
        "quantity": measurement.quantity,
        "unit": measurement.unit,
        "size": measurement.size,
        "value": measurement.value if math.isfinite(measurement.value) else str(measurement.value),
        "repeats": measurement.repeats,
        "spread": measurement.spread,
        "comparisons": [comparison.as_json() for comparison in comparisons],
    }
    seen = "" if outcome == "passed" else _seen(measurement, telling)
    case = _size(measurement)
    work = Work(operations=measurement.repeats)
    return Observation(CHECK, measurement.subject, outcome, seen, case, work, evidence)


def _size(measurement: Measurement) -> str:
    if measurement.unit == "FLOP/s":
        return f"matrices of {measurement.size} x {measurement.size}"
    for name, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if measurement.size >= scale and measurement.size % scale == 0:
            return f"{measurement.size // scale} {name}"
    return f"{measurement.size} B"


def _seen(measurement: Measurement, telling: Sequence[Comparison]) -> str:
    what = f"{measurement.quantity} is {amount(measurement.value, measurement.unit)}"
    if telling[0].outcome == "unknown":
        return f"{what}: " + "; ".join(f"against {_NAMES[c.against]}: {c.why}" for c in telling)
    lines = []
    for c in telling:
        assert c.reference is not None and c.missing is not None and c.limit is not None
        least = f"{c.missing:.0%} slower than {amount(c.reference, measurement.unit)}, {c.why}"
        lines.append(f"{least} (limit {c.limit:.0%})" if c.limit else least)
    return f"{what} ({measurement.repeats} repeats): " + "; ".join(lines)


def _without_reference(
    judged: Sequence[tuple[Measurement, Sequence[Comparison]]],
    gpus: Mapping[int, Gpu],
    baseline: Baseline | None,
    floors: Floors,
    software: Mapping[int, Mapping[str, str]],
) -> Iterator[Observation]:
    measured: dict[int, set[Against]] = {}
    for measurement, comparisons in judged:
        for number in gpus_of(measurement.subject):
            made = measured.setdefault(number, set())
            made.update(c.against for c in comparisons if c.outcome in ("passed", "failed"))
    for number, made in sorted(measured.items()):
        gpu = gpus[number]
        lacking = baseline.entry(gpu, software.get(gpu.host, {}))[1] if baseline is not None else ""
        if baseline is not None and not lacking and "baseline" not in made:
            lacking = f"{baseline.file} does not list any of the measured quantities"
        if made & {"baseline", "floor"} and not lacking:
            continue
        listed = floors.about(gpu) or "its floors are for other quantities than those measured"
        if lacking:
            seen = (
                f"the baseline does not count for {gpu.name}: {lacking}. Record one with --record-baseline=FILE on a "
                "node that you trust"
            )
        else:
            seen = (
                f"no reference says how fast {gpu.name} should be: {listed}, and no baseline was given. If all GPUs "
                "were too slow, it would not show. Give --baseline=FILE, recorded with --record-baseline=FILE on a "
                "node that you trust"
            )
        evidence = {
            "name": gpu.name,
            "memory": gpu.memory,
            "floors": listed,
            "baseline": lacking,
            "compared": sorted(made),
        }
        yield Observation(CHECK, Subject("gpu", (number,)), "unknown", seen, "absolute speed", evidence=evidence)
