"""Collect what the cases of a passing gate could not show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mgpu_check.diagnosis.observed import Expected, ObservedRun
from mgpu_check.gates.program import Program

_ALIKE = 0.01
"""Losses of ranks that differ by no more than this fraction hide how the ranks are weighted."""


class PassLimits:
    """The limits of a verdict: what no case that passed has shown, although a mistake may lie there."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._passes = 0
        self._equal_lengths: set[bool] = set()
        self._alike: set[bool] = set()

    def add(self, expected: Expected, runs: Sequence[ObservedRun]) -> None:
        """Add a case that passed: the results of one device, and of ranks."""
        single = expected.single
        self._passes = max(self._passes, single.backwards // max(1, single.optimizer_steps or single.calls))
        if single.equal_lengths is not None:
            self._equal_lengths.add(single.equal_lengths)
        if len(runs) > 1 and runs[0].losses:
            self._alike.add(_are_alike([run.losses for run in runs]))

    def lines(self) -> Iterator[str]:
        if self._passes > 1 and self._program.reference is None:
            yield (
                f"a wrong weight of micro-batches: backward ran {self._passes} times for each optimizer step, on one "
                "device too; give a reference= that takes the whole batch at once"
            )
        if self._equal_lengths == {True}:
            yield (
                "samples of different lengths: batch returned equal lengths only; pad some labels with -100, or return "
                "a mask"
            )
        if self._alike == {True}:
            yield (
                "a wrong weight of ranks: the loss was the same within 1 % on all ranks; let batch draw samples that "
                "differ more"
            )


def _are_alike(losses: Sequence[Sequence[float]]) -> bool:
    if any(len(of_rank) != len(losses[0]) for of_rank in losses):
        return False
    return all(max(each) - min(each) <= _ALIKE * max(map(abs, each)) for each in zip(*losses, strict=True))
