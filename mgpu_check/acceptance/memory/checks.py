"""Check most of the memory of a GPU: every bit must hold its value, at its own address."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from mgpu_check.acceptance.load import keep_busy
from mgpu_check.acceptance.memory.cases import MemoryCase
from mgpu_check.acceptance.memory.diagnosis import evidence_of
from mgpu_check.acceptance.memory.patterns import rounds_of
from mgpu_check.acceptance.memory.region import Region, WrongRegion, take_region
from mgpu_check.devices.observations import Measurement, Observation, Subject, SubjectResult, Work
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.common.timing import Stopwatch, measured

_COPIES = 5


def examine_memory(rank: Rank, case: MemoryCase) -> list[SubjectResult]:
    """Write patterns over most of the free memory of the device of `rank`, and then read it, in the passes of `case`.

    Everything is written before anything is read, so that aliased addresses show. The device compares, and only wrong
    words are copied to the host.
    """
    subject = Subject("gpu", (rank.index,))
    with torch.cuda.device(rank.device), torch.no_grad():
        region = take_region(rank.device, case.share)
        try:
            if not region.chunks:
                return [Observation("memory", subject, "unknown", "no memory is free", str(case))]
            hold = functools.partial(keep_busy, rank, case.held) if case.held else None
            return [examine_region(region, case, subject, hold), *_bandwidth(region, subject)]
        finally:
            del region
            torch.cuda.empty_cache()


def examine_region(
    region: Region, case: MemoryCase, subject: Subject, hold: Callable[[], object] | None = None
) -> Observation:
    """Run the passes of `case` on a region, and call `hold` before each comparison; see `examine_memory`."""
    wrong = WrongRegion()
    done = 0
    for number in range(case.passes):
        rounds = rounds_of(case, number)
        region.write(*rounds[0])
        for index, (pattern, backwards) in enumerate(rounds):
            seed = case.seed + 1000 * number + index
            then = rounds[index + 1][0] if index + 1 < len(rounds) and case.pattern == "inversions" else None
            if hold is not None:
                hold()
            region.compare(pattern, wrong, seed, then=then, backwards=backwards)
            if then is None and index + 1 < len(rounds):
                region.write(*rounds[index + 1])
            done += 1
    work = Work(bytes=2 * done * region.bytes, operations=done * len(region.chunks), seconds=sum(region.watch.laps()))
    if not wrong.count and not wrong.blind and not wrong.astray:
        return Observation("memory", subject, "passed", case=str(case), work=work)
    if wrong.astray and not wrong.count and not wrong.blind:
        way, told = Subject("download", subject.members), {"astray": wrong.astray}
        return Observation("memory", way, "failed", wrong.astray[0], str(case), work, told)
    evidence = evidence_of(region, wrong.count, wrong.words) | {"bytes tested": region.bytes, "blind": wrong.blind}
    return Observation("memory", subject, "failed", _seen(wrong, evidence["kinds"]), str(case), work, evidence)


def _seen(wrong: WrongRegion, kinds: list[str]) -> str:
    if not wrong.count:
        return wrong.blind[0]
    first = wrong.words[0]
    words = "1 word" if wrong.count == 1 else f"{wrong.count} words"
    return (
        f"{words} wrong, the first at offset {8 * first.word:#x}: wrote {first.expected:#018x}, read {first.read:#018x}"
        f"{'; ' * bool(kinds)}{kinds[0] if kinds else ''}"
    )


def _bandwidth(region: Region, subject: Subject) -> list[Measurement]:
    if len(region.chunks) < 2 or region.chunks[0].shape != region.chunks[1].shape:
        return []
    watch = Stopwatch(region.device)
    for _ in range(_COPIES + 1):
        watch.start()
        region.chunks[0].copy_(region.chunks[1])
        watch.stop()
    size = 8 * region.chunks[0].numel()
    return measured("memory", subject, "memory bandwidth", "B/s", 2 * size, watch.laps()[1:], size)
