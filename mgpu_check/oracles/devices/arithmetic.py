"""Repeat operations on a GPU and judge each result: with algebra, with the IEEE standard, or with the other GPUs.

Each operation is prepared by the function that its row in `COMPUTATIONS` names.
"""

from __future__ import annotations

import pkgutil
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mgpu_check.devices.observations import Observation, Outcome, Subject, SubjectResult, Unit, Work
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.oracles.devices.cases import COMPUTATIONS, Ballot, ComputeCase
from mgpu_check.oracles.devices.operations import (
    CaseUnsupported,
    Prepare,
    Prepared,
    Stopwatch,
    bits,
    differing,
    digests_of_pieces,
    evidence_of,
    length_of_piece,
    measured,
)
from mgpu_check.oracles.generated_data import digest
from mgpu_check.torch_hooks import switches

OPERATIONS: dict[str, Prepare] = {
    name: pkgutil.resolve_name(f"{__package__}.{row.prepare}") for name, row in COMPUTATIONS.items()
}
"""Name of an operation -> function that makes its operands."""


_BATCH = 16
_LEAST_LAPS = 3  # a rate needs as many
_BATCH_BYTES = 1 << 29
_ELEMENTS = 1 << 16


def examine_arithmetic(rank: Rank, cases: Sequence[ComputeCase]) -> list[SubjectResult | Ballot]:
    """Run each case on the device of `rank`, judge its results, and cast a ballot with the digest of the first one.

    An oracle judges the first result, if the operation has one. All other results must have the same bits. Each batch
    also compares a copy with one changed bit: a comparison that misses the change is a failure too.
    """
    results: list[SubjectResult | Ballot] = []
    with torch.cuda.device(rank.device), torch.no_grad():
        for case in cases:
            results += examine_case(case, rank.device, Subject("gpu", (rank.index,)))
    torch.cuda.empty_cache()
    return results


_last: dict[torch.device, torch.Tensor] = {}
"""Device -> the last result of `pieces_of_result`, which `elements_of_piece` reads."""


def pieces_of_result(rank: Rank, case: ComputeCase, wanted: int, equal: bool) -> tuple[bool, list[int]]:
    """Repeat a case until the digest of a result equals `wanted`, or, if `equal` is false, until it differs.

    The case sets the most repeats. Return whether such a result occurred, and the digests of at most 64 pieces of the
    last result.
    """
    with torch.cuda.device(rank.device), torch.no_grad(), switches.repeatable_precision(tf32=case.dtype == "tf32"):
        prepared = OPERATIONS[case.operation](case, rank.device)
        for _ in range(case.repeats):
            result = _last[rank.device] = prepared.call()
            if (digest(result) == wanted) == equal:
                return True, digests_of_pieces(result)
        return False, digests_of_pieces(result)


def elements_of_piece(rank: Rank, number: int) -> tuple[int, list[int]]:
    """Return the offset of a piece in the last result of `pieces_of_result`, and the bits of its first elements."""
    flat = bits(_last.pop(rank.device))
    start = number * length_of_piece(flat)
    mask = (1 << 8 * flat.element_size()) - 1
    return start, [word & mask for word in flat[start : start + min(_ELEMENTS, length_of_piece(flat))].tolist()]


def require(dtype: str, device: torch.device) -> None:
    """Raise `CaseUnsupported` if the device has no units for a dtype."""
    if device.type != "cuda":
        return
    least = {"tf32": (8, 0), "bfloat16": (8, 0), "int8": (7, 5), "float8_e4m3fn": (8, 9), "float8_e5m2": (8, 9)}
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None:
        if dtype in ("tf32", "float8_e4m3fn", "float8_e5m2"):
            raise CaseUnsupported(f"{dtype} is not checked with ROCm")
    elif capability < least.get(dtype, (0, 0)):
        needed, own = (".".join(map(str, numbers)) for numbers in (least[dtype], capability))
        raise CaseUnsupported(f"{dtype} needs compute capability {needed}; this device has {own}")


@dataclass
class _Results:
    summary: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    done: int = 0
    mismatches: int = 0
    seconds: float = 0.0
    laps: list[float] = field(default_factory=list)


def examine_case(case: ComputeCase, device: torch.device, subject: Subject) -> list[SubjectResult | Ballot]:
    """Run one case on a device; see `examine_arithmetic`."""
    with switches.repeatable_precision(tf32=case.dtype == "tf32"):
        try:
            if COMPUTATIONS[case.operation].needs_units:
                require(case.dtype, device)
            prepared = OPERATIONS[case.operation](case, device)
        except CaseUnsupported as error:
            return [Observation("compute", subject, "skipped", str(error), str(case))]
        reference = prepared.call()
        tally = _Results(done=1)
        if prepared.judge is not None and (evidence := prepared.judge(reference)):
            tally.mismatches, tally.evidence = 1, evidence
            suffix = f" of {evidence['products'][0]}" if "products" in evidence else ""
            tally.summary = f"{_counted(evidence)} wrong in the first result{suffix}"
        _repeat(case, prepared, reference, tally)
    work = Work(operations=tally.done, seconds=tally.seconds)
    outcome: Outcome = "failed" if tally.mismatches else "passed"
    entry = Observation("compute", subject, outcome, tally.summary, str(case), work, tally.evidence)
    rate: list[SubjectResult] = []
    if len(tally.laps) >= _LEAST_LAPS:
        unit: Unit = "FLOP/s" if prepared.operations else "s"
        size, name = case.size if prepared.operations else reference.nbytes, f"{case.operation}, {case.dtype}"
        rate += measured("compute", subject, name, unit, prepared.operations, tally.laps, size)
    return [entry, *rate, Ballot(case, digest(reference))]


def _repeat(case: ComputeCase, prepared: Prepared, reference: torch.Tensor, tally: _Results) -> None:
    """Repeat the operation up to the case's repeats or seconds, and compare each result with the first."""
    drawn = random.Random(case.seed)
    expected_bits = bits(reference)
    batch = max(_LEAST_LAPS, min(_BATCH, _BATCH_BYTES // max(1, reference.nbytes)))
    until = time.monotonic() + case.seconds
    while tally.done < case.repeats and (tally.done == 1 or time.monotonic() < until):
        count = min(batch, case.repeats - tally.done)
        results = _timed(case, prepared, count, reference.device, tally)
        control = expected_bits.clone()
        control[drawn.randrange(len(control))] ^= 1
        error_counts = differing(bits(torch.stack(results)).view(count, -1), expected_bits).tolist()
        if int(differing(control, expected_bits)) != 1:
            tally.mismatches += 1
            tally.summary = tally.summary or "the device did not find an element that was changed on purpose"
        for number, result in enumerate(results):
            if error_counts[number]:
                _differs(tally, number, result, reference)
        tally.done += count
    if tally.mismatches:
        tally.evidence["wrong results"] = tally.mismatches
        tally.evidence["results"] = tally.done


def _timed(
    case: ComputeCase, prepared: Prepared, count: int, device: torch.device, tally: _Results
) -> list[torch.Tensor]:
    """Run the operation `count` times. A timed case measures each operation of its first batch separately."""
    watch, results = Stopwatch(device), []
    separately = case.timed and not tally.laps
    for number in range(count):
        if separately or number == 0:
            watch.start()
        results.append(prepared.call())
        if separately or number == count - 1:
            watch.stop()
    laps = watch.laps()
    tally.seconds += sum(laps)
    if separately:
        tally.laps = laps
    return results


def _differs(tally: _Results, number: int, result: torch.Tensor, reference: torch.Tensor) -> None:
    tally.mismatches += 1
    if "errors" not in tally.evidence:
        differs = (bits(result) != bits(reference)).reshape(reference.shape)
        tally.evidence = evidence_of(result, reference, differs) | {"repeat": tally.done + number}
        tally.summary = tally.summary or f"{_counted(tally.evidence)} not as before in repeat {tally.done + number}"


def _counted(evidence: dict[str, Any]) -> str:
    errors = evidence["errors"]
    suffix = f", the first at {evidence['indices'][0]}" if evidence.get("indices") else ""
    return f"{errors} element{'s' * (errors != 1)} of {evidence.get('elements', '?')}{suffix},"
