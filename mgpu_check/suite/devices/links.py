"""Check copies between all devices of a process and the host: the data arrives, and no other memory changes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mgpu_check.devices.observations import Observation, Subject, SubjectResult, Work
from mgpu_check.suite.common.contents import CHUNK, HOST, WrongBytes, bytes_of_content, compare, fill, tag_of
from mgpu_check.suite.devices.copy_cases import Copies

_GUARD = 256
_SHARE = 0.7
_CHUNKS = 6
"""Chunks of memory that a comparison needs in addition to the compared data."""


@dataclass(frozen=True)
class _Direction:
    """Source and destination of a copy; None is the host."""

    subject: Subject
    source: int | None
    destination: int | None

    def tag(self, seed: int, *, before: bool = False) -> int:
        source, destination = (HOST if end is None else end for end in (self.source, self.destination))
        return tag_of(source, destination, seed, before=before)

    def __str__(self) -> str:
        names = ("the host" if end is None else f"cuda:{end}" for end in (self.source, self.destination))
        return " -> ".join(names)


def examine_copies(devices: Sequence[torch.device], case: Copies) -> list[SubjectResult]:
    """Copy between all ordered pairs of `devices`; return an observation for each, by the positions of its devices."""
    pairs = itertools.permutations(range(len(devices)), 2)
    return _examine([_Direction(Subject("copy", pair), *pair) for pair in pairs], devices, case)


def examine_host_copies(devices: Sequence[torch.device], case: Copies) -> list[SubjectResult]:
    """Copy from the host to each of `devices` and back; return an observation for each way, by device position."""
    ways = []
    for index in range(len(devices)):
        ways += [
            _Direction(Subject("upload", (index,)), None, index),
            _Direction(Subject("download", (index,)), index, None),
        ]
    return _examine(ways, devices, case)


def _examine(ways: Sequence[_Direction], devices: Sequence[torch.device], case: Copies) -> list[SubjectResult]:
    names = {}
    for way in ways:
        names[way.tag(case.seed)] = f"the data of the copy {way}"
        names[way.tag(case.seed, before=True)] = f"the data from before the copy {way}"
    free = _free(devices)
    if case.reach > free // 4:
        case = replace(case, reach=1 << max(1, free // 4).bit_length() - 1)
    largest = _largest(free, case, copies=max(1, len(devices) - 1) if case.together else 1)
    found: dict[_Direction, list[_GuardedCopy]] = {way: [] for way in ways}
    for size in _cut(case.sizes, largest):
        for group in [list(ways)] if case.together else [[way] for way in ways]:
            copies = [_GuardedCopy(way, devices, case, size, _chunk(free)) for way in group]
            involved = {device for copy in copies for device in copy.devices}
            _synchronize(involved)
            for copy in copies:
                copy.start()
            _synchronize(involved)
            for copy in copies:
                copy.check(names)
                found[copy.way].append(copy)
    return [_observation(way, copies, case) for way, copies in found.items()]


def _largest(free: int, case: Copies, copies: int) -> int:
    """Return the largest size that fits into the memory of each device."""
    each = 2 if case.path == "strided" else 1
    needed = copies * (each + max(each, 2 if case.path == "casting" else 1)) if copies > 1 else 2
    return max(1, int(free * _SHARE - _CHUNKS * _chunk(free)) // needed - 4 * _GUARD)


def _free(devices: Sequence[torch.device]) -> int:
    """Return the least number of free bytes on any device."""
    torch.cuda.empty_cache()
    return min(torch.cuda.mem_get_info(device)[0] for device in devices)


def _chunk(free: int) -> int:
    return min(max(CHUNK, free // 16), 1 << 26)


def _cut(sizes: Sequence[int], largest: int) -> list[int]:
    """Return the sizes that fit, and in place of all others one that fits, with the alignment of the first of them."""
    fitting = [size for size in sizes if size <= largest]
    beyond = [size for size in sizes if size > largest]
    if beyond:
        fitting.append(max(1, largest - largest % 4096 - 4096 + beyond[0] % 4096))
    return list(dict.fromkeys(fitting))


class _GuardedCopy:
    """A copy, with the memory around its destination."""

    def __init__(self, way: _Direction, devices: Sequence[torch.device], case: Copies, size: int, chunk: int) -> None:
        self.way, self.size = way, size
        self.wrong: list[WrongBytes] = []
        self.outside = False
        self._case = case
        ends = [torch.device("cpu") if end is None else devices[end] for end in (way.source, way.destination)]
        self.devices = [device for device in ends if device.type != "cpu"]
        self._tag, self._before = way.tag(case.seed), way.tag(case.seed, before=True)
        self._step = 2 if case.path == "strided" else 1
        self._dtype = torch.int16 if case.path == "casting" else torch.uint8
        self._begin = _GUARD + case.destination + case.reach // self._dtype.itemsize
        self._chunk = chunk
        length = self._step * size
        source = self._memory(case.reach + case.source + length, ends[0])
        self._fill(source, self._tag)
        self._source = source[case.reach + case.source :: self._step]
        width = self._dtype.itemsize
        whole = self._memory((self._begin + length + _GUARD) * width, ends[1])
        self._fill(whole, self._before)
        self._whole: torch.Tensor | None = whole.view(self._dtype)

    def _memory(self, size: int, device: torch.device) -> torch.Tensor:
        if device.type == "cpu" and self._case.pinned:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return torch.empty(size, dtype=torch.uint8, device=device)

    def _fill(self, memory: torch.Tensor, tag: int) -> None:
        for low, high in _windows(memory.numel(), self._case.reach):
            fill(memory[low:high], tag, low, self._chunk)

    def start(self) -> None:
        """Start the copy, on its own streams if others run at the same time."""
        assert self._whole is not None
        target = self._whole[self._begin : self._begin + self._step * self.size : self._step]
        with self._streams():
            for into, out in zip(*(one.tensor_split(self._case.pieces) for one in (target, self._source)), strict=True):
                into.copy_(out, non_blocking=self._case.pinned)

    @contextlib.contextmanager
    def _streams(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device in self.devices if self._case.together else ():
                stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
            yield

    def check(self, names: Mapping[int, str]) -> None:
        """Compare the destination and the memory around it, on its device, and free it."""
        assert self._whole is not None
        width = self._dtype.itemsize
        windows = _windows(self._whole.numel(), self._case.reach // width)
        for low, end in ((at, stop) for start, stop in windows for at in range(start, stop, self._chunk)):
            high = min(low + self._chunk, end)
            expected = self._expected(low, high)
            mismatch = compare(
                self._whole[low:high].view(torch.uint8), expected.view(torch.uint8), names, start=low * width
            )
            if mismatch is not None:
                self.wrong.append(mismatch)
                self.outside |= not self._copied(mismatch.first // width)
        self._whole = None
        del self._source

    def _expected(self, low: int, high: int) -> torch.Tensor:
        """Return the right elements from `low` to `high` of the destination's memory."""
        assert self._whole is not None
        device, width = self._whole.device, self._dtype.itemsize
        expected = bytes_of_content(self._before, low * width, high * width, device).view(self._dtype)
        first, end = (min(self.size, max(0, -(-(at - self._begin) // self._step))) for at in (low, high))
        if first < end:
            start = self._case.reach + self._case.source
            content = bytes_of_content(self._tag, start + first * self._step, start + end * self._step, device)
            at = self._begin + first * self._step - low
            expected[at : at + (end - first - 1) * self._step + 1 : self._step] = content[:: self._step]
        return expected

    def _copied(self, element: int) -> bool:
        index, between = divmod(element - self._begin, self._step)
        return between == 0 and 0 <= index < self.size

    @property
    def seen(self) -> str:
        first = self.wrong[0]
        count = sum(mismatch.count for mismatch in self.wrong)
        width = self._dtype.itemsize
        of = self.size * width
        if self.outside:
            return f"{count} bytes in and around the destination of {of} bytes are wrong, some outside: {first.looks}"
        at = (first.first // width - self._begin) // self._step * width
        return f"{count} of {of} bytes are wrong, from byte {at} on: {first.looks}"


def _windows(length: int, reach: int) -> list[tuple[int, int]]:
    """Return the parts of an allocation that a copy uses: behind `reach`, and as much at the start."""
    behind = length - reach
    return [(0, behind), (reach, length)] if 0 < behind < reach else [(0, length)]


def _observation(way: _Direction, copies: Sequence[_GuardedCopy], case: Copies) -> Observation:
    work = Work(bytes=sum(copy.size for copy in copies), operations=len(copies) * case.pieces)
    wrong = [copy for copy in copies if copy.wrong]
    text = str(case)
    if way.subject.kind != "copy":
        text = f"{'pinned' if case.pinned else 'pageable'} memory, {text}"
    if not wrong:
        return Observation("links", way.subject, "passed", case=text, work=work)
    most = max(wrong, key=lambda copy: copy.size)
    evidence = dict(most.wrong[0].evidence) | {
        "size": most.size,
        "path": case.path,
        "sizes that failed": [copy.size for copy in wrong],
        "sizes that passed": [copy.size for copy in copies if not copy.wrong],
    }
    return Observation("links", way.subject, "failed", most.seen, text, work, evidence)


def _synchronize(devices: Iterable[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)
