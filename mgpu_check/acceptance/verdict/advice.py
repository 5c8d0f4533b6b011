"""Advice for a part that the verdict accuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from mgpu_check.acceptance.checklist import CHECKLIST
from mgpu_check.acceptance.findings import listed
from mgpu_check.devices.observations import Observation, Part, Subject

_ADVICE = {
    "gpu": "drain the node, reset this GPU and run again; if it fails again, send it back",
    "link": "drain the node, re-seat both GPUs or their bridge and run again; if it fails again, send back the "
    "baseboard, or the bridge",
    "host-link": "drain the node, re-seat this GPU, look at its slot and riser, and run again; if it fails again, try "
    "the GPU in another slot",
    "host": "look at what all GPUs share: driver, libraries, firmware, IOMMU and ACS settings; run again on one GPU "
    "at a time",
}


def advice_for(part: Part, failed: Sequence[Observation]) -> str:
    """Return what to do about `part`, given the failed observations that it explains."""
    known = [entry for entry in failed if _names_the_defect(entry)]
    if known:  # then its finding gives better advice than the kind of the part
        return f"drain the node; {listed(known)[0].advice}"
    if {entry.check for entry in failed} == {"performance"}:
        return (
            "look at clocks, throttle reasons, power and cooling, and at the width of its links; " + _ADVICE[part.kind]
        )
    return _ADVICE[part.kind]


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
