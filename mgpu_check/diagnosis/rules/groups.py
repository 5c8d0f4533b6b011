"""Detect collectives over the wrong ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mgpu_check.diagnosis.registry import Precedence, mistake, on_tensors
from mgpu_check.diagnosis.report import Finding
from mgpu_check.processes.rank_lists import grouped, named

if TYPE_CHECKING:
    from mgpu_check.diagnosis.tensors import Tensors

_NEAR = 2e-3
"""Relative tolerance of a ratio: the results and the hypothesis are summed in different orders."""

mistake(
    "wrong-process-group",
    "a collective runs over the wrong ranks, not over those that hold the parts",
    "pass group= to the collective, and divide by the size of the group, not by the world size",
)


@on_tensors(Precedence.SUMS + 90)
def off_by_number_of_groups(tensors: Tensors) -> Finding | None:
    """Detect a result that is off by the number of process groups, its root, or the inverse of either."""
    groups = [event.details["group"] for _, event in tensors.events("collective") if "group" in event.details]
    sizes = {len(group) for group in groups if len(group) < tensors.size}
    made = tensors.first("group")
    if made is None or not sizes:
        return None
    existing = {len(ranks) for trace in tensors.traces for ranks in trace.groups[1:]} or set(range(1, tensors.size))
    factor = tensors.factor()
    factors = {name: tensors.factor([name]) if factor is None else factor for name in tensors.names}
    for name, ratio in factors.items():
        for size in (size for size in range(1, tensors.size) if tensors.size % size == 0 and size in existing):
            if (power := _as_power(ratio, tensors.size / size)) is not None:
                ran = " and ".join(map(str, sorted(sizes)))
                return Finding(
                    "wrong-process-group",
                    f"groups were made ({made.site}), collectives ran over {ran} ranks, and {name} is {ratio:.4g} "
                    f"times what it should be: {power}, the number of groups of {size}",
                    site=made.site,
                )
    return None


def _as_power(ratio: float | None, number: float) -> str | None:
    """Return in words which power of `number` a ratio is: 1, -1, 1/2 or -1/2; None if it is another."""
    for exponent, words in ((1.0, ""), (-1.0, "1 / "), (0.5, "the root of "), (-0.5, "1 / the root of ")):
        if ratio and abs(ratio - number**exponent) < _NEAR * number**exponent:
            return f"{words}{number:g}"
    return None


@on_tensors(Precedence.SUMS + 110)
def parted_by_group(tensors: Tensors) -> Finding | None:
    """Detect a wrong process group: ranks agree within groups of one size, and differ between the groups."""
    split = [name for name in tensors.relations.split if len(tensors.holders(name)) == tensors.size]
    if not split or len(split) < len(tensors.relations.split) or tensors.size < 4:
        return None
    parts = [grouped((one.digests.get(name), rank) for rank, one in enumerate(tensors.seen)) for name in split]
    groups = [ranks for _, ranks in parts[0]]
    sizes = {len(ranks) for ranks in groups}
    same = all([ranks for _, ranks in part] == groups for part in parts)
    # A metric with few possible values may agree on some ranks by chance, but not on the same ranks in every case.
    always = all(
        len({other.seen[rank].digests.get(name) for rank in ranks}) == 1
        for other in tensors.further
        for name in split
        for ranks in groups
    )
    apart = any(len({one.digests.get(name) for one in other.seen}) > 1 for other in tensors.further for name in split)
    always &= apart or not tensors.further
    if len(sizes) != 1 or not 1 < min(sizes) < tensors.size or not same or not always:
        return None
    together = " and ".join(named(ranks) for ranks in groups)
    return Finding("wrong-process-group", f"{split[0]} is the same within each of {together}, and differs between them")
