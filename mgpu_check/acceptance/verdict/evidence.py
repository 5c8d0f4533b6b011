"""Lines of evidence for an accusation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from mgpu_check.devices.observations import Observation, Part, Subject


def evidence_lines(
    observations: Sequence[Observation], numbers: Sequence[int], others: Mapping[int, Sequence[Part]]
) -> Iterator[str]:
    """Yield a line for each check, subject and kind of finding that failed, with the number of failures.

    Args:
        numbers: indices of the failed observations that the accused part explains.
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
