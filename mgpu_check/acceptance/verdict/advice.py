"""Advice for a part that the verdict accuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mgpu_check.acceptance.checklist import CHECKLIST
from mgpu_check.acceptance.findings import Action, ReportedFinding, Severity, listed, suited
from mgpu_check.acceptance.run_report import Accusation
from mgpu_check.devices.observations import Observation, Part, PartKind, Subject


@dataclass(frozen=True)
class Remedy:
    """The remedy for an accused part: its urgency, the first action of a program, and the advice to a person."""

    severity: Severity
    action: Action
    advice: str


_ADVICE: Mapping[PartKind, str] = {
    "gpu": "drain the node, reset this GPU and run again; if it fails again, send it back",
    "link": "drain the node, re-seat both GPUs or their bridge and run again; if it fails again, send back the "
    "baseboard, or the bridge",
    "host-link": "drain the node, re-seat this GPU, look at its slot and riser, and run again; if it fails again, try "
    "the GPU in another slot",
    "host": "look at what all GPUs share: driver, libraries, firmware, IOMMU and ACS settings; run again on one GPU "
    "at a time",
}
_ACTIONS: Mapping[PartKind, Action]
_ACTIONS = {"gpu": "reset-gpu", "link": "reseat", "host-link": "reseat", "host": "inspect-node"}
_SUBJECTS = {"gpu": ("gpu",), "link": ("copy",), "host-link": ("upload", "download"), "host": ("host",)}
"""The subjects whose findings are about a part of each kind itself."""


def remedy_for(part: Part, failed: Sequence[Observation]) -> Remedy:
    """Return what to do about `part`, given the failed observations that it explains.

    A finding about another subject is a symptom: its severity and its action are not those of the part.
    """
    remedy = Remedy("isolate", _ACTIONS[part.kind], _ADVICE[part.kind])
    known = listed(entry for entry in failed if _names_the_defect(entry))
    own = listed(entry for entry in failed if _is_about(entry.subject, part))
    if finding := next(iter(known or own), None):
        remedy = replace(remedy, severity=finding.severity, action=suited(finding.action, part.kind))
    if known:  # its finding gives better advice than the kind of the part
        return replace(remedy, advice=f"drain the node; {known[0].advice}")
    if {entry.check for entry in failed} == {"performance"}:
        where = "look at clocks, throttle reasons, power and cooling, and at the width of its links"
        return replace(remedy, advice=f"{where}; {remedy.advice}")
    return remedy


def of_symptoms(
    findings: Iterable[ReportedFinding], observations: Sequence[Observation], accusations: Sequence[Accusation]
) -> Iterator[ReportedFinding]:
    """Yield the findings of a run. One whose subject is not accused asks to inspect the node, not for another part."""
    for finding in findings:
        own = any(_is_about(finding.subject, accusation.part) for accusation in accusations)
        if finding.ruling != "reject" or own or finding.severity == "config":
            yield finding
            continue
        mine = {
            n for n, entry in enumerate(observations) if (entry.finding, entry.subject) == (finding.id, finding.subject)
        }
        causes = [str(accusation.part) for accusation in accusations if mine & set(accusation.observations)]
        advice = f"see the verdict on {' and '.join(causes)}, which explains it" if causes else finding.advice
        yield replace(finding, severity="isolate", action="inspect-node", advice=advice)


def _is_about(subject: Subject, part: Part) -> bool:
    return subject.kind in _SUBJECTS[part.kind] and subject.members == part.members


def _names_the_defect(entry: Observation) -> bool:
    """Return whether a check of facts reports a defect, not a call that ended with an error."""
    check = CHECKLIST[entry.check]
    return (check.of_driver or check.of_facts) and "ended" not in entry.evidence


def evidence_lines(
    observations: Sequence[Observation], numbers: Sequence[int], others: Mapping[int, Sequence[Part]]
) -> Iterator[str]:
    """Yield a line for each check, subject and kind of finding that failed, with the number of failures.

    Args:
        others: the other accused parts that explain an observation, by its index.
    """
    looks = Counter((entry.check, entry.subject.in_any_order) for entry in observations)
    failed: dict[tuple[str, Subject, str], list[int]] = {}
    for number in numbers:
        entry = observations[number]
        failed.setdefault((entry.check, entry.subject.in_any_order, entry.finding), []).append(number)
    for (check, subject, _), mine in failed.items():
        entry = observations[mine[0]]
        case = f" ({entry.case})" if entry.case else ""
        also = dict.fromkeys(str(part) for number in mine for part in others.get(number, ()))
        shared = f"; shared: {' and '.join(also)} may explain it alone" if also else ""
        count = f"{len(mine)} of {looks[check, subject]} looks failed"
        yield f"{check}: {entry.subject}: {entry.seen}{case}; {count}{shared}"
