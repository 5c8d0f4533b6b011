"""Run a round of full load: training, together with memory tests, collectives and copies.

Each kind of work has its own stream, so that the device runs them at the same time. The right results of all are known.
"""

from __future__ import annotations

import abc
import copy
import functools
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from mgpu_check.acceptance.cases import Loaded, MemoryCase, SoakCase, Trained, TransformerCase
from mgpu_check.acceptance.memory.checks import examine_region, take_region
from mgpu_check.acceptance.training.transformer import Training, Transformer, arithmetic, model_of, placed, tokens_of
from mgpu_check.devices.observations import Observation, Subject, SubjectKind
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.oracles.devices.operations import Stopwatch
from mgpu_check.oracles.generated_data import counted, digests, integers

_RANGE = 1 << 10
_FAILED = 8  # most failed observations of one kind per round; a limit, because an error under load repeats


def examine_load(rank: Rank, case: SoakCase) -> list[Observation | Loaded]:
    """Keep the device of `rank` under load for a round, and check all results. A collective."""
    with torch.cuda.device(rank.device), arithmetic(case.training):
        model = copy.deepcopy(_model(replace(case.training, steps=1)))
        training = placed(Training(case.training, model, tokens_of(case.training)), rank.device)
        beside = [_CopyLoad(rank, case), _MemoryLoad(rank, case)]
        exchange = _Exchange(rank, case)
        torch.cuda.synchronize(rank.device)
        watch = Stopwatch(rank.device)
        step_digests = []
        began = time.monotonic()
        steps = training.steps()
        for step in range(case.training.steps):
            watch.start()
            loss = next(steps)
            watch.stop()
            turn, rest = divmod(step + 1, case.every)
            if rest:
                continue
            step_digests.append(digests([loss, *training.parameters.values()]))
            exchange.turn()
            for work in beside:
                work.turn(turn)
        numbers = torch.stack(step_digests).tolist()
        torch.cuda.synchronize(rank.device)
        seconds = time.monotonic() - began
        failed = [entry for work in beside for entry in work.end()]
        reduced, exchanged = exchange.end()
    laps = watch.laps()
    trained = Trained(case.training, ("loss", *training.parameters), tuple(map(tuple, numbers)), sum(laps))
    moved = exchange.bytes + sum(work.bytes for work in beside)
    torch.cuda.empty_cache()
    return [*failed, Loaded(trained, seconds, tuple(laps), moved, reduced, exchanged)]


@functools.lru_cache(maxsize=1)
def _model(case: TransformerCase) -> Transformer:
    """Make a model once for all rounds, so that devices do not cool down between rounds."""
    return model_of(case)


class _Beside(abc.ABC):
    """Work that runs next to the training.
    `examine_load` makes it for a round, calls `turn` between steps of the training, and `end` after the last one."""

    def __init__(self, rank: Rank, case: SoakCase) -> None:
        self.rank, self.case = rank, case
        self.stream = torch.cuda.Stream(rank.device)
        self.bytes = 0  # the number of bytes that it has moved
        self.failed: list[Observation] = []

    @abc.abstractmethod
    def turn(self, turn: int) -> None:
        """Queue the work once."""

    def end(self) -> list[Observation]:
        """Finish the work, and return its failed observations."""
        return self.failed


class _CopyLoad(_Beside):
    """Copies of words to the device and back; two contents alternate, so that stale data of the previous turn shows."""

    def __init__(self, rank: Rank, case: SoakCase) -> None:
        super().__init__(rank, case)
        host = torch.device("cpu")
        self._seeds = (2 * case.number, 2 * case.number + 1)
        self._sent = [counted((case.copied,), seed, host).pin_memory() for seed in self._seeds]
        self._back = torch.empty_like(self._sent[0]).pin_memory()
        self._there = torch.empty(case.copied, dtype=torch.int64, device=rank.device)
        self._last = -1

    def turn(self, turn: int) -> None:
        self._look()
        self._last = turn % 2
        with torch.cuda.stream(self.stream):
            self._there.copy_(self._sent[self._last], non_blocking=True)
            self._back.copy_(self._there, non_blocking=True)
        self.bytes += 2 * self._back.nbytes

    def end(self) -> list[Observation]:
        self._look()
        return self.failed

    def _look(self) -> None:
        """Compare the words that came back in the previous turn."""
        self.stream.synchronize()
        if self._last < 0 or torch.equal(self._back, self._sent[self._last]) or len(self.failed) >= _FAILED:
            return
        mismatches = (self._back != self._sent[self._last]).nonzero()[:, 0]
        with torch.cuda.stream(self.stream):
            arrived = torch.equal(self._there, counted((self.case.copied,), self._seeds[self._last], self.rank.device))
        subject_kind: SubjectKind = "download" if arrived else "upload"
        position = int(mismatches[0]) if len(mismatches) else 0
        message = f"{len(mismatches)} of {self.case.copied} words are wrong under load"
        message += f", the first at offset {8 * position:#x}"
        subject = Subject(subject_kind, (self.rank.index,))
        evidence = {"words": len(mismatches), "first": 8 * position}
        self.failed.append(Observation("soak", subject, "failed", message, str(self.case), evidence=evidence))


class _MemoryLoad(_Beside):
    def __init__(self, rank: Rank, case: SoakCase) -> None:
        super().__init__(rank, case)
        with torch.cuda.stream(self.stream):
            self._region = take_region(rank.device, case.memory_share)

    def turn(self, turn: int) -> None:
        if not self._region.chunks:
            return
        pattern = ("random", "address")[turn % 2]
        memory = MemoryCase(pattern, self.case.memory_share, 1000 * self.case.number + turn)
        with torch.cuda.stream(self.stream):
            observation = examine_region(self._region, memory, Subject("gpu", (self.rank.index,)))
        self.bytes += 2 * self._region.bytes
        if observation.outcome == "failed" and len(self.failed) < _FAILED:
            message = f"memory under load: {observation.seen}"
            self.failed.append(replace(observation, check="soak", seen=message, case=str(self.case)))


class _Exchange:
    """An all_reduce and an all_to_all; errors are counted on the device, and read only at the end."""

    def __init__(self, rank: Rank, case: SoakCase) -> None:
        self.rank = rank
        self.bytes = 0
        self._stream = torch.cuda.Stream(rank.device)
        size = rank.size
        shape = (case.collective,)
        self._base = integers(shape, -_RANGE, _RANGE, seed=case.number, device=rank.device, dtype=torch.int32)
        self._total = self._base * (size * (size + 1) // 2)
        self._buffer = torch.empty_like(self._base)
        self._given = self._base.view(size, -1)
        self._got = torch.empty_like(self._given)
        self._reduced = torch.zeros((), dtype=torch.int64, device=rank.device)
        self._exchanged = torch.zeros(size, dtype=torch.int64, device=rank.device)
        # Rank r gives rank s the s-th part, times r + 1.
        self._factors = torch.arange(1, size + 1, dtype=torch.int32, device=rank.device).view(-1, 1)
        self._expected = self._given[rank.index] * self._factors

    def turn(self) -> None:
        if self.rank.size == 1:
            return
        with torch.cuda.stream(self._stream):
            torch.mul(self._base, self.rank.index + 1, out=self._buffer)
            dist.all_to_all_single(self._got.view(-1), self._buffer)
            self._exchanged += (self._got != self._expected).sum(dim=1)
            dist.all_reduce(self._buffer)
            self._reduced += (self._buffer != self._total).sum()
        self.bytes += 2 * self._buffer.nbytes

    def end(self) -> tuple[int, dict[int, int]]:
        """Return the number of wrong elements in sums, and source rank -> number of wrong elements in exchanges."""
        return int(self._reduced), {rank: count for rank, count in enumerate(self._exchanged.tolist()) if count}
