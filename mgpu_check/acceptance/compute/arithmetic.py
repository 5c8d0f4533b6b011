"""Run the same computation on all GPUs, let the GPUs of one model vote, and locate the differences of the outvoted
ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgpu_check.acceptance.comparison import Vote, vote
from mgpu_check.devices.observations import EXCHANGED, Observation, Subject, SubjectResult
from mgpu_check.engine.named_function import NamedFunction
from mgpu_check.suite.devices.cases import Ballot, ComputeCase

if TYPE_CHECKING:
    from mgpu_check.acceptance.node import Node
    from mgpu_check.engine.rank_side.rank import Rank

_EXAMINE, _ELEMENTS = (
    NamedFunction(f"mgpu_check.suite.devices.arithmetic:{name}") for name in ("examine_arithmetic", "elements_of_piece")
)
_LISTED = 16
_LAUNCHES = 20


def _pieces(rank: Rank, case: ComputeCase, usual: int) -> tuple[bool, list[int]]:
    from mgpu_check.suite.devices.arithmetic import pieces_of_result

    return pieces_of_result(rank, case, usual, equal=rank.index > 0)


def measure_launches(rank: Rank, repeats: int) -> list[SubjectResult]:
    """Measure the seconds from one small kernel to the next, of kernels that are launched at once."""
    import torch

    from mgpu_check.suite.common.timing import measured, seconds_of

    one = torch.zeros(1, device=rank.device)
    laps = seconds_of(lambda: one.add_(1), rank.device, repeats, inner=_LAUNCHES)
    return [*measured("compute", Subject("gpu", (rank.index,)), "launch of a small kernel", "s", 0, laps, one.nbytes)]


def compute(node: Node, cases: Sequence[ComputeCase]) -> None:
    """Run `cases` on all GPUs, and record wrong results and outvoted GPUs."""
    numbers = node.numbers
    results = node.on_ranks("compute", _EXAMINE, cases, timeout=20 + 3 * sum(case.seconds for case in cases))
    ballots: dict[ComputeCase, dict[int, int]] = {}
    wrong: set[tuple[str, int]] = set()
    for number, entries in zip(numbers, results, strict=False):
        for entry in entries:
            if isinstance(entry, Ballot):
                ballots.setdefault(entry.case, {})[number] = entry.digest
            elif isinstance(entry, Observation) and entry.outcome == "failed":
                wrong.add((entry.case, number))
    models = {gpu.number: gpu.name for gpu in node.gpus}
    for case, digests in ballots.items():
        known = {gpu for gpu in digests if (str(case), gpu) in wrong}
        for result in vote(digests, models):
            node.record(_outvoted(node, case, result, digests, known))


def _outvoted(
    node: Node, case: ComputeCase, result: Vote, digests: Mapping[int, int], known: set[int]
) -> list[Observation]:
    """Return failed observations for the outvoted GPUs that no oracle has found wrong.

    Without a majority, a GPU that an oracle has found wrong explains the disagreement, and nothing more is returned.
    If no oracle has found one, any of the voters may be wrong: the failure is of their group, and accuses none alone.
    """
    if not result.decided:
        if known & set(result.odd):
            return []
        seen = f"no majority among {len(result.voters)} GPUs of one model, which give different bits"
        evidence: dict[str, Any] = {"digests": {str(gpu): f"{digests[gpu]:016x}" for gpu in result.odd}}
        group = Subject("group", result.odd)
        return [Observation("compute", group, "failed", seen, str(case), evidence=evidence | {EXCHANGED: False})]
    found = []
    for gpu in result.odd:
        if gpu in known:
            continue
        others = [other for other in result.voters if other not in result.odd]
        evidence = {"digest": f"{digests[gpu]:016x}", "voters": list(result.voters)}
        if isinstance(result.usual, int):
            evidence |= {"usual digest": f"{result.usual:016x}"} | _located(node, case, gpu, others[0], result.usual)
        seen = f"other bits than {len(others)} of {len(result.voters)} GPUs of its model, which agree"
        found.append(Observation("compute", Subject("gpu", (gpu,)), "failed", seen, str(case), evidence=evidence))
    return found


def _located(node: Node, case: ComputeCase, odd: int, other: int, usual: int) -> dict[str, Any]:
    """Compute again on the odd GPU and on one of the majority, and return where their results differ."""
    again = node.on_ranks("compute", _pieces, case, usual, gpus=[odd, other])
    if len(again) < 2 or not (again[0][0] and again[1][0]):
        return {"again": "the results agree"}
    pieces = [number for number, pair in enumerate(zip(again[0][1], again[1][1], strict=False)) if pair[0] != pair[1]]
    if not pieces:
        return {"again": "the results agree"}
    contents = node.on_ranks("compute", _ELEMENTS, pieces[0], gpus=[odd, other])
    if len(contents) < 2:
        return {"pieces": pieces}
    (start, got), (_, right) = contents
    differing = [(start + i, one, two) for i, (two, one) in enumerate(zip(got, right, strict=True)) if one != two]
    return {
        "pieces": pieces,
        "of pieces": len(again[0][1]),
        "errors": len(differing),
        "indices": [index for index, _, _ in differing[:_LISTED]],
        "values": [[f"{one:#x}", f"{two:#x}"] for _, one, two in differing[:_LISTED]],
        "lanes": len({index % 32 for index, _, _ in differing}),
        "share of single bits": sum((one ^ two).bit_count() == 1 for _, one, two in differing) / max(1, len(differing)),
    }
