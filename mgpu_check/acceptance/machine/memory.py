"""Write patterns to host memory and read them back while copies to and from the GPUs run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from mgpu_check.acceptance.machine.checks import of_host
from mgpu_check.devices.observations import Observation, Subject, Work
from mgpu_check.processes.limits import available_memory

if TYPE_CHECKING:
    import torch

CHUNK = 1 << 20
"""Words that are written or compared at once: 8 MiB."""
_ODD = -7046029254386353131  # 2^64 divided by the golden ratio
_COPIED = 1 << 17
"""Words of a copy."""
_SHARE = 8
"""A divisor of the available memory: other programs need the rest."""
_UNKNOWN = 1 << 30
"""Available memory, where the kernel does not say."""


def examine_memory(
    devices: Sequence[torch.device], size: int, passes: int, copies: int, wrong: int = -1
) -> list[Observation]:
    """Return observations of the memory of the host, and of GPUs whose copies were wrong.

    Each word holds a number that derives from its address, in the next pass its complement.

    Args:
        devices: GPUs that copy in the meantime.
        size: bytes; less if an eighth of the available memory is less.
        passes: number of times that all of it is written and read.
        copies: number of times that each GPU copies 1 MiB from and to the host, for each 8 MiB written or read.
        wrong: index of the word whose bit 5 a planted fault flips; -1 for none.
    """
    import torch

    known = available_memory()
    words = max(1, min(size, (_UNKNOWN if known is None else known) // _SHARE) // 8)
    held = torch.empty(words, dtype=torch.int64, device="cpu")
    sent = torch.arange(_COPIED, dtype=torch.int64, device="cpu").mul_(2654435761)
    sent = sent.pin_memory() if devices else sent
    there = [torch.empty_like(sent, device=device) for device in devices]
    back = [torch.zeros_like(sent, pin_memory=True) for _ in devices]

    def load() -> None:
        for on_device, target in zip(there, back, strict=True):
            for _ in range(copies):
                on_device.copy_(sent, non_blocking=True)
                target.copy_(on_device, non_blocking=True)

    found: list[Observation] = []
    for turn in range(passes):
        pattern = WordPattern(turn)
        for start in range(0, words, CHUNK):
            load()
            pattern.write(start, held[start : start + CHUNK])
        if 0 <= wrong < words:
            held[wrong] ^= 1 << 5
        found += _compared(held, pattern, turn, load)
        for place, (device, target) in enumerate(zip(devices, back, strict=True)):
            torch.cuda.synchronize(device)
            if wrong_words := int((target != sent).sum()):
                text = f"{wrong_words} of {len(sent)} words came back wrong while host memory was under load"
                link = Subject("download", (place,))  # or the way there, or the GPU
                found.append(Observation("machine", link, "failed", text, "memory", Work(operations=1)))
    evidence = {"copying GPUs": len(devices)}
    work = Work(bytes=8 * words * passes, operations=passes)
    return [*found, of_host("passed", "", "memory", work, **evidence)]


class WordPattern:
    """The content of memory in a pass: a word is its index times an odd number, or its complement."""

    def __init__(self, turn: int) -> None:
        import torch

        self._other = turn % 2
        self._shift = turn // 2
        first = torch.arange(CHUNK, dtype=torch.int64, device="cpu").mul_(_ODD)
        self._first = first.neg_() if self._other else first  # the complement of n is -n - 1

    def write(self, start: int, chunk: torch.Tensor) -> None:
        import torch

        added = start * _ODD + self._shift
        added = -added - 1 if self._other else added
        torch.add(self._first[: len(chunk)], (added + (1 << 63)) % (1 << 64) - (1 << 63), out=chunk)


def _compared(held: torch.Tensor, pattern: WordPattern, turn: int, load: Callable[[], None]) -> Iterator[Observation]:
    """Yield an observation for the first chunk with wrong words. Call `load` before each chunk."""
    import torch

    scratch = torch.empty(CHUNK, dtype=torch.int64, device="cpu")
    for start in range(0, len(held), CHUNK):
        load()
        mine = held[start : start + CHUNK]
        right = scratch[: len(mine)]
        pattern.write(start, right)
        if not torch.equal(mine, right):
            wrong = (mine != right).nonzero()
            first = int(wrong[0])
            byte, bits = 8 * (start + first), hex((int(mine[first]) ^ int(right[first])) & (2**64 - 1))
            text = f"host memory: {len(wrong)} words wrong in pass {turn}, the first at byte {byte}, bits {bits}"
            evidence = {"kind": "host memory", "byte": byte, "bits": bits}
            yield of_host("failed", text, "memory", Work(operations=1), **evidence)
            return
