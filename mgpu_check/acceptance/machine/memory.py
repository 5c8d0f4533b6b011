"""Write patterns to host memory and read them back while copies to and from the GPUs run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_check.acceptance.machine.checks import of_host
from mgpu_check.devices.observations import Observation, Work

if TYPE_CHECKING:
    import torch

__all__ = ["examine_memory"]

_CHUNK = 1 << 20
_COPIES = 4
_COPIED = 1 << 17
_SHARE = 8
"""A divisor of the available memory: other programs need the rest."""


def examine_memory(devices: Sequence[torch.device], size: int, passes: int, wrong: int = -1) -> list[Observation]:
    """Return an observation of the memory of the host.

    Each word holds a number that derives from its address, in the next pass its complement.

    Args:
        devices: GPUs that copy in the meantime.
        size: bytes; less if an eighth of the available memory is less.
        passes: number of times that all of it is written and read.
        wrong: index of the word in which a planted fault flips bit 5; -1 for none.
    """
    import torch

    words = max(1, min(size, _available() // _SHARE) // 8)
    held = torch.empty(words, dtype=torch.int64, device="cpu")
    sent = torch.arange(_COPIED, dtype=torch.int64, device="cpu").mul_(2654435761)
    sent = sent.pin_memory() if devices else sent
    found: list[Observation] = []
    for turn in range(passes):
        back = [torch.zeros_like(sent, pin_memory=True) for _ in devices]
        for device, target in zip(devices, back, strict=True):
            for _ in range(_COPIES):
                target.copy_(sent.to(device, non_blocking=True), non_blocking=True)
        for start, pattern in _patterns(words, turn):
            held[start : start + len(pattern)] = pattern
        if 0 <= wrong < words:
            held[wrong] ^= 1 << 5
        found += _compared(held, turn)
        for device, target in zip(devices, back, strict=True):
            torch.cuda.synchronize(device)
            if not torch.equal(target, sent):
                text = f"{int((target != sent).sum())} of {len(sent)} words came back wrong from {device} meanwhile"
                found.append(of_host("failed", text, "memory", Work(operations=1), kind="host memory"))
    evidence = {"copying GPUs": len(devices)}
    work = Work(bytes=8 * words * passes, operations=passes)
    return [*found, of_host("passed", "", "memory", work, **evidence)]


def _patterns(words: int, turn: int) -> Iterator[tuple[int, torch.Tensor]]:
    import torch

    for start in range(0, words, _CHUNK):
        numbers = torch.arange(start, min(start + _CHUNK, words), dtype=torch.int64, device="cpu")
        pattern = numbers.mul_(-7046029254386353131).add_(turn // 2)
        yield start, pattern.bitwise_not_() if turn % 2 else pattern


def _compared(held: torch.Tensor, turn: int) -> Iterator[Observation]:
    """Yield an observation for the first chunk with wrong words."""
    for start, pattern in _patterns(len(held), turn):
        mine = held[start : start + len(pattern)]
        wrong = (mine != pattern).nonzero()
        if len(wrong):
            first = int(wrong[0])
            byte, bits = 8 * (start + first), hex((int(mine[first]) ^ int(pattern[first])) & (2**64 - 1))
            text = f"host memory: {len(wrong)} words wrong in pass {turn}, the first at byte {byte}, bits {bits}"
            evidence = {"kind": "host memory", "byte": byte, "bits": bits}
            yield of_host("failed", text, "memory", Work(operations=1), **evidence)
            return


def _available() -> int:
    """Return the bytes of memory that programs can have; 1 GiB if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 1 << 30
