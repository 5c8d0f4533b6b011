"""Run a script several times on each side, and return the curves of its loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from mgpu_check.compare.arguments import repeated
from mgpu_check.compare.comparison import crashes_at_exit, found_what_was_left, run_script
from mgpu_check.compare.control import SEED
from mgpu_check.compare.curves.judging import RunCurve, Side
from mgpu_check.compare.curves.reading import curve_of
from mgpu_check.compare.trace import Trace
from mgpu_check.compare.traces.recording import NotRecorded, RunRecording, check_run


@dataclass
class RepeatedRuns:
    """The runs of one side.

    Attributes:
        recording: the script with its arguments and environments.
        world: number of processes of a run.
        curves: the curves of the runs that have ended.
        samples: for each step of the first run, the digests of the samples that each process has seen.
    """

    recording: RunRecording
    world: int
    curves: list[RunCurve] = field(default_factory=list)
    samples: list[list[set[int]]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def side(self) -> Side:
        return Side(self.recording.name, self.curves)

    @property
    def by_seeds(self) -> bool:
        """True if the arguments of the script have the number of the run, as a seed; else runs differ by rounding."""
        plan = self.recording.made.plan
        return repeated(plan.command, 0) != repeated(plan.command, 1)


def run_all(runs: RepeatedRuns, repeats: int, tell: Callable[[str], None]) -> None:
    """Run the script `repeats` times, and keep the curves.

    Runs that do not differ by an argument are moved by roundoffs, except for the first one.

    Raises:
        NotRecorded: the script fails, makes no optimizer step, or loads what an earlier run wrote.
    """
    made, plan, by_seeds = runs.recording.made, runs.recording.made.plan, runs.by_seeds
    for number in range(repeats):
        made.plan = replace(plan, command=repeated(plan.command, number))
        moved = None if by_seeds or not number else SEED + number - 1
        label = f"{runs.recording.name}, run {number + 1} of {repeats}{'' if moved is None else ', moved by roundoffs'}"
        environment = plan.several if runs.world > 1 or plan.world == 1 else plan.single
        done = run_script(made, tell, label, runs.world, moved=moved, environment=environment)
        check_run(runs.recording, done)
        if left := found_what_was_left(made.runs):
            raise NotRecorded(left.report, failed=False)
        runs.curves.append(curve_of(f"run {number + 1}", done.traces))
        if not number:
            runs.samples = _seen(done.traces)
            runs.remarks += crashes_at_exit([done])
        for trace in done.traces:
            trace.steps.clear()  # hundreds of steps are large
    made.plan = plan


def _seen(traces: Sequence[Trace]) -> list[list[set[int]]]:
    steps = zip(*(trace.steps for trace in traces), strict=False)
    return [[set(step.seen) for step in each] for each in steps]


def others_seen(one: RepeatedRuns, other: RepeatedRuns) -> int | None:
    """Return the first step whose samples the sides do not share, counted from 1; else None.

    Processes that share no sample with the other side do not count: they may see what other processes have computed.
    """
    for number, (here, there) in enumerate(zip(one.samples, other.samples, strict=False), 1):
        found = [
            set[int]().union(*(seen for seen in mine if not seen.isdisjoint(set().union(*theirs))))
            for mine, theirs in ((here, there), (there, here))
        ]
        if any(here) and any(there) and (found[0] != found[1] or not found[0]):
            return number
    return None
