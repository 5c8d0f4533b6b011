"""Collect wrong results of collectives, and report the attributes that the wrong calls have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mgpu_check.errors import CollectiveMismatch
from mgpu_check.processes.rank_lists import named

if TYPE_CHECKING:
    import torch

    from mgpu_check.engine.rank_side.rank import Rank


_SHOWN = 3
_COMMON = ("function", "dtype", "op", "values", "place", "layout", "elements", "asynchronous", "members", "root")


@dataclass(frozen=True)
class WrongResult:
    """A wrong result on this rank; `call` is a call or its description."""

    call: object
    text: str

    @classmethod
    def of(
        cls,
        call: object,
        got: torch.Tensor,
        expected: torch.Tensor,
        mismatches: torch.Tensor,
        looks: str = "",
        label: str = "",
    ) -> WrongResult:
        """Describe the wrong elements of a vector; `mismatches` is their mask."""
        index = int(mismatches.nonzero()[0])
        text = f"element {index}: got {got[index].item()!r}, expected {expected[index].item()!r}"
        dtype = str(got.dtype).removeprefix("torch.")
        count = f"{int(mismatches.sum())} of {got.numel()} elements of {dtype} are wrong"
        return cls(call, f"{label}: " * bool(label) + "; ".join(filter(None, (text, count, looks))))


def raise_findings(findings: Sequence[WrongResult], calls: int, rank: Rank) -> None:
    """Raise one error for all findings of this rank, with their common attributes; return if there are no findings."""
    if not findings:
        return
    failed_calls = {id(finding.call): finding.call for finding in findings}
    leading, *others = findings[:_SHOWN]
    head = f"{leading.call} is wrong on {named([rank.index])} of {rank.size} ({rank.device}): {leading.text}"
    count = f"  {len(failed_calls)} of {calls} collectives are wrong"
    if len(failed_calls) > 1 and (common := _common(list(failed_calls.values()))):
        count += f"; all of them: {common}"
    lines = [f"  {finding.call}: {finding.text}" for finding in others]
    if len(findings) > _SHOWN:
        lines.append(f"  and {len(findings) - _SHOWN} more")
    raise CollectiveMismatch("\n".join([head, count, *lines]), ranks=[rank.index])


def _common(calls: Sequence[object]) -> str:
    attributes = []
    for name in _COMMON:
        values = {getattr(call, name, None) for call in calls}
        if len(values) == 1 and (value := values.pop()) not in (None, (), False):
            attributes.append("async" if value is True else f"{name} {value}")
    return ", ".join(attributes)


def assert_shared(checksums: Sequence[Sequence[tuple[str, str]]] | Mapping[int, Sequence[tuple[str, str]]]) -> None:
    """Assert that all ranks hold the same bits of the results that they share.

    Args:
        checksums: the return value of `assert_collectives_match` on each rank.

    Raises:
        CollectiveMismatch: `.ranks` has the ranks that differ from the majority; all ranks if there is no majority.
    """
    __tracebackhide__ = True
    by_rank = dict(checksums) if isinstance(checksums, Mapping) else dict(enumerate(checksums))
    holders: dict[str, dict[str, list[int]]] = {}
    for rank, entries in by_rank.items():
        for label, checksum in entries:
            holders.setdefault(label, {}).setdefault(checksum, []).append(rank)
    for label, ranks in holders.items():
        if len(ranks) > 1:
            most = max(ranks.values(), key=len)
            tied = sum(len(same) == len(most) for same in ranks.values()) > 1
            others = sorted(rank for same in ranks.values() if same is not most for rank in same)
            text = f"{label}: ranks disagree about the bits of the result: {named(others)} against {named(most)}"
            raise CollectiveMismatch(text, ranks=sorted([*most, *others]) if tied else others)
