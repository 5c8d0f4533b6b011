"""Run the same computation on all GPUs, let the GPUs of one model vote, and locate the differences of the outvoted
ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgpu_check.acceptance.comparison import Vote, vote
from mgpu_check.devices.observations import EXCHANGED, Observation, Subject, SubjectResult
from mgpu_check.engine.rank_side.rank import NamedFunction, Rank
from mgpu_check.oracles.devices.cases import Ballot, ComputeCase, Laps

if TYPE_CHECKING:
    from mgpu_check.acceptance.node import Node

_EXAMINE, _ELEMENTS = (
    NamedFunction(f"mgpu_check.oracles.devices.arithmetic:{name}")
    for name in ("examine_arithmetic", "elements_of_piece")
)
_LISTED = 16
_LAUNCHES = 20


def _pieces(rank: Rank, case: ComputeCase, usual: int) -> tuple[bool, list[int]]:
    from mgpu_check.oracles.devices.arithmetic import pieces_of_result

    return pieces_of_result(rank, case, usual, equal=rank.index > 0)


def measure_launches(rank: Rank, repeats: int, laps: Laps) -> list[SubjectResult]:
    """Measure the seconds from one small kernel to the next, of kernels that are launched at once, and the second
    longest of `laps` larger ones."""
    import torch

    from mgpu_check.oracles.devices.operations import measured, second_longest, seconds_of

    tensor = torch.zeros(1, device=rank.device)
    times = seconds_of(lambda: tensor.add_(1), rank.device, repeats, inner=_LAUNCHES)
    subject = Subject("gpu", (rank.index,))
    launches = measured("compute", subject, "launch of a small kernel", "s", 0, times, tensor.nbytes)
    large = torch.zeros(laps.bytes, dtype=torch.uint8, device=rank.device)
    times = seconds_of(lambda: large.add_(1), rank.device, laps.count)
    return [*launches, *second_longest("compute", subject, "kernel", times, laps.bytes)]


def compute(node: Node, cases: Sequence[ComputeCase]) -> None:
    """Run `cases` on all GPUs, and record wrong results and outvoted GPUs."""
    numbers = node.numbers
    results = node.on_ranks("compute", _EXAMINE, cases, timeout=20 + 3 * sum(case.seconds for case in cases))
    ballots: dict[ComputeCase, dict[int, int]] = {}
    failures: set[tuple[str, int]] = set()
    for number, entries in zip(numbers, results, strict=False):
        for entry in entries:
            if isinstance(entry, Ballot):
                ballots.setdefault(entry.case, {})[number] = entry.digest
            elif isinstance(entry, Observation) and entry.outcome == "failed":
                failures.add((entry.case, number))
    models = {gpu.number: gpu.name for gpu in node.gpus}
    for case, digests in ballots.items():
        failed_gpus = {gpu for gpu in digests if (str(case), gpu) in failures}
        for result in vote(digests, models):
            node.record(_outvoted(node, case, result, digests, failed_gpus))


def _outvoted(
    node: Node, case: ComputeCase, result: Vote, digests: Mapping[int, int], failed_gpus: set[int]
) -> list[Observation]:
    """Return failed observations for the outvoted GPUs that no oracle has found wrong.
    Without a majority, a GPU that an oracle has found wrong explains the disagreement, and nothing more is returned. If
    no oracle has found one, any of the voters may be wrong: the failure is of their group, and accuses none alone."""
    if not result.decided:
        if failed_gpus & set(result.odd):
            return []
        message = f"no majority among {len(result.voters)} GPUs of one model, which give different bits"
        evidence: dict[str, Any] = {"digests": {str(gpu): f"{digests[gpu]:016x}" for gpu in result.odd}}
        group = Subject("group", result.odd)
        return [Observation("compute", group, "failed", message, str(case), evidence=evidence | {EXCHANGED: False})]
    observations = []
    for gpu in result.odd:
        if gpu in failed_gpus:
            continue
        others = [voter for voter in result.voters if voter not in result.odd]
        evidence = {"digest": f"{digests[gpu]:016x}", "voters": list(result.voters)}
        if isinstance(result.usual, int):
            evidence |= {"usual digest": f"{result.usual:016x}"} | _located(node, case, gpu, others[0], result.usual)
        message = f"other bits than {len(others)} of {len(result.voters)} GPUs of its model, which agree"
        subject = Subject("gpu", (gpu,))
        observations.append(Observation("compute", subject, "failed", message, str(case), evidence=evidence))
    return observations


def _located(node: Node, case: ComputeCase, odd: int, peer: int, usual: int) -> dict[str, Any]:
    """Compute again on the odd GPU and on one of the majority, and return where their results differ."""
    recomputed = node.on_ranks("compute", _pieces, case, usual, gpus=[odd, peer])
    if len(recomputed) < 2 or not (recomputed[0][0] and recomputed[1][0]):
        return {"again": "the results agree"}
    pairs = zip(recomputed[0][1], recomputed[1][1], strict=False)
    pieces = [number for number, (mine, usual_piece) in enumerate(pairs) if mine != usual_piece]
    if not pieces:
        return {"again": "the results agree"}
    contents = node.on_ranks("compute", _ELEMENTS, pieces[0], gpus=[odd, peer])
    if len(contents) < 2:
        return {"pieces": pieces}
    (start, got), (_, expected) = contents
    both = enumerate(zip(expected, got, strict=True), start)
    differing = [(index, wanted, actual) for index, (wanted, actual) in both if wanted != actual]
    single = sum((wanted ^ actual).bit_count() == 1 for _, wanted, actual in differing)
    return {
        "pieces": pieces,
        "of pieces": len(recomputed[0][1]),
        "errors": len(differing),
        "indices": [index for index, _, _ in differing[:_LISTED]],
        "values": [[f"{wanted:#x}", f"{actual:#x}"] for _, wanted, actual in differing[:_LISTED]],
        "lanes": len({index % 32 for index, _, _ in differing}),
        "share of single bits": single / max(1, len(differing)),
    }
