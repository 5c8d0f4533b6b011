"""Define an operation of the check of arithmetic, describe where and how its results are wrong, and measure its time.

An operation is its call and the judge of its first result. Results are compared on the device that made them. Time is
that of the device's own clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Any

import torch

from mgpu_check.asserts.collectives import index_of
from mgpu_check.devices.observations import Measurement, Subject, Unit, median_and_spread
from mgpu_check.oracles.devices import cases
from mgpu_check.oracles.devices.cases import SECOND_LONGEST, ComputeCase
from mgpu_check.oracles.generated_data import digest
from mgpu_check.torch_hooks.tensors import INTEGER_OF_SIZE

_LISTED = 16
_LOOKED_AT = 4096
_PIECES = 64
_BLOCK = 1 << 24


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor, flat, as integers with the same bits, so that a NaN equals itself."""
    flat = tensor.reshape(-1)
    wanted = INTEGER_OF_SIZE[flat.element_size()]
    return flat if flat.dtype == wanted else flat.view(wanted)


def differing(rows: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return for each of `rows` how many elements differ from `expected`: int64, on their device."""
    return (rows != expected).sum(dim=-1)


def length_of_piece(tensor: torch.Tensor) -> int:
    """Return the number of elements in each of at most 64 pieces of a tensor; the last piece may have fewer."""
    return max(1, -(-tensor.numel() // _PIECES))


def digests_of_pieces(tensor: torch.Tensor) -> list[int]:
    return [digest(piece) for piece in bits(tensor).split(length_of_piece(tensor))]


def evidence_of(got: torch.Tensor, expected: torch.Tensor, mismatches: torch.Tensor) -> dict[str, Any]:
    """Describe the wrong elements of a result, in values that JSON can hold.

    Args:
        got, expected: tensors of the same shape and dtype, on one device.
        mismatches: a mask of the same shape.

    Returns:
        `errors` is the number of wrong elements, and `elements` the number of all. The other keys describe at most the
        first 4096 wrong elements. `indices` and `values` list the first 16: their indices, and (expected, got) as
        hexadecimal bits. `bits` maps a bit to the number of elements in which it differs. `share of single bits` and
        `share of NaN` are fractions; the latter counts infinities too. `period` is the largest number that divides all
        distances between wrong elements in row-major order. `lanes` is the number of distinct places modulo 32. `box`
        has the first and the last wrong index of each dimension.
    """
    flat = mismatches.reshape(-1)
    errors = int(flat.sum())
    # The first 4096 places that are true, block by block, so that memory does not grow with the errors.
    places: list[int] = []
    for start in range(0, flat.numel(), _BLOCK):
        block = flat[start : start + _BLOCK]
        if bool(block.any()):
            places += (block.nonzero()[: _LOOKED_AT - len(places), 0] + start).tolist()
        if len(places) >= _LOOKED_AT:
            break
    evidence: dict[str, Any] = {"errors": errors, "elements": flat.numel()}
    if not places:
        return evidence
    selection = torch.tensor(places, device=flat.device)
    values = [bits(tensor)[selection].tolist() for tensor in (expected, got)]
    mask = (1 << 8 * got.element_size()) - 1
    pairs = [(expected_word & mask, got_word & mask) for expected_word, got_word in zip(*values, strict=True)]
    flips = [expected_word ^ got_word for expected_word, got_word in pairs]
    counts = Counter(bit for flip in flips for bit in range(64) if flip >> bit & 1)
    odd = got.reshape(-1)[selection]
    infinite = float((~torch.isfinite(odd.float())).double().mean()) if odd.dtype.is_floating_point else 0.0
    indices = [index_of(position, got.shape) for position in places]
    width = got.element_size() * 2 + 2
    return evidence | {
        "indices": [list(index) for index in indices[:_LISTED]],
        "values": [[f"{value:#0{width}x}" for value in pair] for pair in pairs[:_LISTED]],
        "bits": {str(bit): times for bit, times in counts.most_common()},
        "share of single bits": sum(flip.bit_count() == 1 for flip in flips) / len(flips),
        "share of NaN": infinite,
        "period": gcd(*(following - previous for previous, following in pairwise(places))),
        "lanes": len({position % 32 for position in places}),
        "box": [[min(axis), max(axis)] for axis in zip(*indices, strict=True)],
    }


DTYPES: dict[str, torch.dtype] = {
    "tf32": torch.float32,
    **{name: getattr(torch, name) for name in (*cases.NUMBERS, "float8_e4m3fn", "float8_e5m2")},
}
"""Name of a dtype in a case -> dtype of its operands."""

Judge = Callable[[torch.Tensor], dict[str, Any]]  # returns evidence of the errors in a result; empty if it is right


class CaseUnsupported(Exception):
    """The device cannot run the case; the message names what it lacks."""


@dataclass(frozen=True)
class Prepared:
    """An operation with its operands.
    A function of `COMPUTATIONS` makes it. `examine_case` calls it and its judge once, and then repeats the call."""

    call: Callable[[], torch.Tensor]  # runs the operation, always on the same operands
    judge: Judge | None = None  # judges the first result; None if only repeats and other GPUs can show an error
    operations: float = 0.0  # floating-point operations of one call; 0 if they are not counted


Prepare = Callable[[ComputeCase, torch.device], Prepared]


def exactly(expected: torch.Tensor) -> Judge:
    """Judge by known values: every element must equal `expected`, which has neither NaN nor -0.0."""

    def judge(got: torch.Tensor) -> dict[str, Any]:
        if got.shape != expected.shape or got.dtype != expected.dtype:
            return {"errors": got.numel(), "shape": list(got.shape), "dtype": str(got.dtype)}
        mismatches = got != expected  # true for NaN
        return evidence_of(got, expected, mismatches) if bool(mismatches.any()) else {}

    return judge


def seeded(case: ComputeCase, number: int) -> int:
    """Return the seed of operand `number` of a case; `number` is below 1000, so seeds of cases do not overlap."""
    return case.seed * 1000 + number


_WARM_UP = 2


class Stopwatch:
    """A stopwatch for the work that a device gets between `start` and `stop`; it does not wait for the device.
    A measurement makes it for the current stream, and reads the laps at its end."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        if self._stream is not None:
            self._pairs.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            self._pairs[-1][0].record(self._stream)

    def stop(self) -> None:
        if self._stream is not None:
            self._pairs[-1][1].record(self._stream)

    def laps(self) -> list[float]:
        """Wait for the device, and return the seconds of each lap; empty for the CPU."""
        if self._stream is not None:
            self._stream.synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in self._pairs]


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int, *, inner: int = 1) -> list[float]:
    """Return `repeats` measurements of the seconds that `work` takes on `device`, each the mean of `inner` calls, after
    a warm-up."""
    with torch.cuda.device(device):
        watch = Stopwatch(device)
        for _ in range(_WARM_UP):
            work()
        for _ in range(repeats):
            watch.start()
            for _ in range(inner):
                work()
            watch.stop()
        return [lap / inner for lap in watch.laps()]


def second_longest(check: str, subject: Subject, name: str, laps: Sequence[float], size: int) -> list[Measurement]:
    """Return the second longest of `laps`, seconds of single calls of `size` bytes: the longest may be an accident.
    The first quarter does not count, as the device may then wait for the host. Empty as for `measured`."""
    seconds = sorted(laps[len(laps) // 4 :])
    if len(seconds) < 2 or seconds[0] <= 0:
        return []
    return [Measurement(check, subject, f"{name}{SECOND_LONGEST}", "s", seconds[-2], len(seconds), size)]


def measured(
    check: str, subject: Subject, quantity: str, unit: Unit, amount: float, laps: Sequence[float], size: int
) -> list[Measurement]:
    """Return the rate of `subject`, which did `amount` bytes or operations in each of `laps` seconds; in the unit "s",
    the time of a lap.

    Empty if there are no laps, or if one was too short for the clock of the device.
    """
    if not laps or min(laps) <= 0:
        return []
    rates = laps if unit == "s" else [amount / lap for lap in laps]
    value, spread = median_and_spread(rates)
    return [Measurement(check, subject, quantity, unit, value, len(rates), size, spread)]
