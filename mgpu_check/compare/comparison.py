"""Run the script as often as a comparison needs, and decide the verdict.

Runs are sequential: a script may write files, and two runs on one device would share its memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from mgpu_check.compare import reports
from mgpu_check.compare.alignment import Aligned
from mgpu_check.compare.assembly import Assembly, assembled
from mgpu_check.compare.comparability import SNAPSHOT, drawing, standing
from mgpu_check.compare.diagnosis import others_from_the_start
from mgpu_check.compare.fake_data import FakeData
from mgpu_check.compare.first_difference import with_rows_together
from mgpu_check.compare.processes import ScriptRun, fitted, fresh_directory, run, temporary
from mgpu_check.compare.rounding import Rounding, repeatability
from mgpu_check.compare.trace import Trace
from mgpu_check.compare.verdict import (
    SEED,
    ComparisonVerdict,
    measured,
    of_failure,
    of_inputs,
    refused,
    refused_with,
    replayed,
    settled,
    unconfirmed,
    verdict_of,
)
from mgpu_check.engine.process import describe_exit
from mgpu_check.processes.collective_records import relative
from mgpu_check.processes.rank_lists import named

Tell = Callable[[str], None]  # called with a line about each run after it has ended


class RecorderError(RuntimeError):
    """The recorder failed in the script's process, so there is no verdict."""


@dataclass(frozen=True)
class ComparisonPlan:
    """The settings of a comparison: a command or a gate makes them, and no run changes them."""

    command: Sequence[str]  # the Python interpreter, the script and its arguments; see `processes.fitted`
    shown: str  # the script and its arguments for reports
    world: int  # number of ranks
    single: Mapping[str, str]  # environment of the run on one device
    several: Mapping[str, str]  # environment of the ranks
    simulated: str  # the kind of simulated devices, as in "SIMULATED cpu"; "" for real devices
    timeout: float  # seconds without progress until a run is ended
    steps: int | None  # optimizer steps to compare; None: all up to `limit`, and `tape.STEPS` in a replay
    fresh: bool = False  # each run starts in a directory of its own
    without_gpus: bool = False  # torch sees no GPU, and no GPU is simulated
    unjudged: Mapping[str, str] = field(default_factory=dict)  # pattern of accepted parameters -> the reason
    directory: Path | None = None  # where the script runs; None: in the current directory
    launcher: str = "torchrun"  # whose variables the ranks get; see `mgpu_check.processes.environments.VARIABLES`
    replaced: str = ""  # the words of a launcher that is not run
    limit: int | None = None  # number of optimizer steps of each run if `steps` is None; None: all steps of the script
    fake: FakeData | None = None  # makes the data that the script lacks; its variables are in both environments

    @property
    def note(self) -> str:
        """The end of a line: the launcher that was replaced, and the kind of simulated devices."""
        suffix = f"; in place of “{self.replaced}”, with the variables of {self.launcher}" if self.replaced else ""
        suffix += "; fake data in place of what is missing" if self.fake else ""
        return suffix + (f"; {self.simulated} x{self.world}: proves code, never hardware" if self.simulated else "")


@dataclass
class ScriptComparison:
    """The runs of a comparison, in order, and the verdict.
    `compare`, or a command that records runs, makes it from a plan. `run_script` adds each run; the verdict comes last,
    for the reports and the exit code."""

    plan: ComparisonPlan
    runs: list[ScriptRun] = field(default_factory=list)
    starts_ranks: bool = False  # the script starts its ranks itself, as far as the runs have shown
    assembly: Assembly | None = None  # the traces of the ranks; None for a single process with several devices
    aligned: Aligned | None = None
    rounding: Rounding | None = None
    verdict: ComparisonVerdict = field(default_factory=lambda: refused("nothing was run"))

    def report_fake_data(self) -> None:
        """Add to the report of the verdict which data was made, and which could not be."""
        if self.plan.fake is not None:
            report, failed = self.verdict.report, self.verdict.kind != "equal"
            report = replace(report, remarks=[*report.remarks, *self.plan.fake.remarks(failed)])
            self.verdict = replace(self.verdict, report=report)


def compare(plan: ComparisonPlan, tell: Tell) -> ScriptComparison:
    """Compare the script on one device with the script on several ranks, in as many runs as that needs."""
    comparison = ScriptComparison(plan)
    with contextlib.ExitStack() as undo:
        tapes = [temporary(undo).fileno() for _ in range(plan.world)]
        try:
            verdict = _verdict(comparison, tell, tapes)
            if verdict.inputs_differ and comparison.assembly is not None:
                verdict = _replay(comparison, tell, tapes, verdict)
        except KeyboardInterrupt:
            aligned = comparison.aligned
            known = "one device and ranks were not compared" if aligned is None else unconfirmed(aligned)
            tell(f"no verdict: interrupted in run {len(comparison.runs) + 1}; {known}")
            raise
    runs = comparison.runs
    remarks = [*verdict.report.remarks, *_also(comparison, verdict), *_led(runs), *crashes_at_exit(runs)]
    # Later runs may be ended earlier.
    earliest = [runs[0], *[run for run in runs if len(run.ranks) > 1][:1]]
    stopped = any(ended.how == "stopped" for run in earliest for ended in run.ranks)
    if plan.limit and verdict.kind == "equal" and not verdict.replayed and stopped:
        remarks.insert(0, f"compared {verdict.compared} steps, where the runs were ended; --steps=all compares all")
    if plan.without_gpus and any(run.failed for run in runs):
        remarks.append("torch sees no GPU here; do: pass --simulate if the script needs GPUs")
    comparison.verdict = replace(verdict, report=replace(verdict.report, remarks=remarks))
    return comparison


def _replay(
    comparison: ScriptComparison, tell: Tell, tapes: Sequence[int], refusal: ComparisonVerdict
) -> ComparisonVerdict:
    """Compare the ranks with one device that is given their inputs; return `refusal` if that is not possible."""

    def run(label: str, *, steps: int, moved: int | None, files: Mapping[str, int]) -> ScriptRun:
        return run_script(comparison, tell, label, 1, moved=moved, files=files, until=steps)

    plan, assembly = comparison.plan, comparison.assembly
    assert assembly is not None
    replay = replayed(refusal, comparison.runs[0].traces[0], assembly, tapes, plan.steps, plan.unjudged, run)
    comparison.aligned = replay.aligned or comparison.aligned
    comparison.rounding = replay.rounding or comparison.rounding
    return replay.verdict


def _verdict(comparison: ScriptComparison, tell: Tell, tapes: Sequence[int]) -> ComparisonVerdict:
    plan = comparison.plan
    reference = run_script(comparison, tell, "one device", 1)
    if reference.has("starts"):
        return refused_with(reports.starts_other_ranks(reference, 1))
    if reference.failed:
        return of_failure(reference, reference.failed, one_device=True)
    if not reference.traces[0].steps:
        return replace(refused_with(reports.no_steps(reference, reference.ranks)), untrained=True)
    several = _several(comparison, tell, tapes)
    if several.has("starts"):
        return refused_with(reports.starts_other_ranks(several, plan.world))
    if several.failed:
        return of_failure(several, several.failed, one_device=False)
    silent = [ended for ended in several.ranks if not ended.steps]
    if silent:
        return refused_with(reports.no_steps(several, silent))
    assembly = assembled(reference.traces[0], several.traces)
    if len(several.ranks) == plan.world:
        comparison.assembly = assembly
    comparison.aligned = aligned = _aligned(reference, assembly, plan.world)
    refusal = _found_what_was_left(comparison.runs)
    return refusal or _of_pair(comparison, tell, assembly, aligned)


def _of_pair(comparison: ScriptComparison, tell: Tell, assembly: Assembly, aligned: Aligned) -> ComparisonVerdict:
    """Judge one device and several that have both trained: in these two runs if they suffice, else in further ones."""
    plan, reference = comparison.plan, comparison.runs[0]
    if others := others_from_the_start(aligned):
        reason = " and ".join(dict.fromkeys(obstacle.reason for obstacle in others))
        return of_inputs(reason, [obstacle.todo for obstacle in others], step=1)
    random = drawing(reference.traces[0])
    if random and comparison.assembly and not assembly.may_hold_slices and aligned.samples(0).same:
        return of_inputs(random.reason, [random.todo])
    if not assembly.may_hold_slices and (outcome := settled(aligned, plan.unjudged)):
        verdict, comparison.rounding = outcome
        return verdict
    divided = assembly.may_hold_slices and comparison.assembly is not None
    repeated, stopped = _again(comparison, tell, divided)
    if stopped is not None:
        return stopped
    aligned = comparison.aligned or aligned  # with the slices that the further runs have placed
    repeat = repeatability(reference.traces[0], repeated.traces[0])
    if repeat is not None and repeat.step == 0:
        return verdict_of(aligned, None, repeat)
    moved = run_script(comparison, tell, "one device, moved by roundoffs", 1, moved=SEED)
    if moved.failed:
        return of_failure(moved, moved.failed, one_device=True)
    further = functools.partial(run_script, comparison, tell, "one device, moved by other roundoffs", 1)
    comparison.rounding = measured(aligned, [moved.traces[0], repeated.traces[0]], further)
    return verdict_of(aligned, comparison.rounding, repeat, plan.unjudged)


def _again(comparison: ScriptComparison, tell: Tell, divided: bool) -> tuple[ScriptRun, ComparisonVerdict | None]:
    """Run on one device again. Return the run, and the verdict if the comparison ends here.
    `divided`: ranks may hold slices. Then the ranks run again, too, and find their slices in the parameters of one
    device."""
    world = comparison.plan.world
    with contextlib.ExitStack() as undo:
        wholes = temporary(undo)
        keep = {"keep": wholes.fileno()} if divided else {}
        repeated = run_script(comparison, tell, "one device, again", 1, files=keep)
        if repeated.failed:
            return repeated, of_failure(repeated, repeated.failed, one_device=True)
        refusal = _found_what_was_left(comparison.runs)
        if refusal is not None or not divided:
            return repeated, refusal
        files = {"wholes": wholes.fileno()}
        several = run_script(comparison, tell, f"{world} ranks, with slices", world, files=files)
        if several.failed:
            return repeated, of_failure(several, several.failed, one_device=False)
        reference = comparison.runs[0]
        assembly = assembled(reference.traces[0], several.traces)
        if assembly.same_elsewhere and (placed := constants_placed(comparison, tell, files, undo)):
            several = run_script(comparison, tell, f"{world} ranks, with all slices", world, files=placed)
            if not several.failed:
                assembly = assembled(reference.traces[0], several.traces)
    comparison.aligned = _aligned(reference, assembly, world)
    return repeated, _found_what_was_left(comparison.runs)


def constants_placed(
    comparison: ScriptComparison, tell: Tell, files: Mapping[str, int], undo: contextlib.ExitStack
) -> Mapping[str, int | Sequence[int]]:
    """Find the places of constants by runs with distinct values. Return the files of a run with them; empty on failure.
    `undo`: closes the files."""
    world = comparison.plan.world
    wholes, *placements = (temporary(undo).fileno() for _ in range(1 + world))
    label = "with constants moved apart, until the first step"
    if run_script(comparison, tell, f"one device, {label}", 1, files={"keep": wholes}, distinct=True).failed:
        return {}
    placing: Mapping[str, int | Sequence[int]] = {"wholes": wholes, "found": placements}
    if run_script(comparison, tell, f"{world} ranks, {label}", world, files=placing, distinct=True).failed:
        return {}
    return {**files, "placed": placements}


def _aligned(reference: ScriptRun, own: Assembly, world: int) -> Aligned:
    trace = reference.traces[0]
    return Aligned(trace, with_rows_together(trace, own.ranks), world, **own.placed())


def _several(comparison: ScriptComparison, tell: Tell, tapes: Sequence[int]) -> ScriptRun:
    """Return the run on several devices: a rank per device, or one process that divides the work.
    A script that never makes a process group trains the same model on each rank. That is a mistake unless one process
    uses several devices, through DataParallel or with layers on several devices."""

    def has_several(trace: Trace) -> bool:
        replicas = max((event["replicas"] for event in trace.of("module")), default=1)
        return replicas > 1 or len({parameter.device for parameter in trace.parameters.values()}) > 1

    world = comparison.plan.world
    ranks = run_script(comparison, tell, f"{world} ranks", world, files={"tape": tapes})
    if ranks.has("group") or ranks.has("starts"):
        return ranks
    # A script that fails or hangs before it makes its group may still be one for several ranks.
    several = ranks.failed is None and any(map(has_several, ranks.traces))
    if not several and not all(ended.has("alone") for ended in ranks.ranks):
        return ranks
    return run_script(comparison, tell, f"one process with {world} GPUs", 1, environment=comparison.plan.several)


def run_script(
    comparison: ScriptComparison,
    tell: Tell,
    label: str,
    world: int,
    moved: int | None = None,
    environment: Mapping[str, str] | None = None,
    files: Mapping[str, int | Sequence[int]] = MappingProxyType({}),
    distinct: bool = False,
    until: int | None = None,
) -> ScriptRun:
    """Run the script once, and add the run, by the name `label` in reports, to the others.

    Without an `environment` it has that of the plan for this number of processes. `distinct` makes the elements of
    constant tensors distinct, and stops after the first step. See `mgpu_check.compare.processes.run` for `moved` and
    `files`.
    """
    plan = comparison.plan
    environment = environment or (plan.single if world == 1 else plan.several)
    starts_ranks = comparison.starts_ranks and world > 1
    with fresh_directory(plan.directory) if plan.fresh else nullcontext(plan.directory) as directory:
        done = run(
            label,
            fitted(plan.command, world),
            environment,
            world,
            timeout=plan.timeout,
            steps=1 if distinct else until or plan.steps or plan.limit,
            taped=plan.steps,
            moved=moved,
            directory=directory,
            files=files,
            distinct=distinct,
            launcher=plan.launcher,
            starts_ranks=starts_ranks,
        )
    if done.has("starts") and world > 1 and not starts_ranks:
        # Each process of the runner was to be a rank, and started ranks. They have written nothing to the files yet.
        comparison.starts_ranks = True
        return run_script(comparison, tell, label, world, moved, environment, files, distinct, until)
    comparison.starts_ranks |= done.has("started") and not done.has("starts")
    comparison.runs.append(done)
    for broken in (event for trace in done.traces for event in trace.of("broken")):
        raise RecorderError(
            f"mgpu-check could not record the script in the run “{label}”: {broken['error']} at {broken['place']}; "
            "the script is not at fault; do: report this as a defect of mgpu-check"
        )
    steps = sorted({ended.steps for ended in done.ranks})
    number = str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
    by = ", which the script starts" if done.starts_ranks else ""
    tell(f"{label}{by}: {number} optimizer steps, {done.seconds:.1f} s")
    return done


def _led(runs: Sequence[ScriptRun]) -> Iterator[str]:
    """Report the line that gave the ranks another address than the store of the comparison."""
    for script_run in runs:
        if script_run.has("spawned") or script_run.has("started"):  # the script is its own launcher
            return
        for event in [event for trace in script_run.traces for event in trace.of("led")][:1]:
            location = f"{relative(script_run.shown(event['file']))}:{event['line']}"
            action = f"sets {event['variable']}" if event["variable"] else "names an address"
            yield (
                f"{location} {action}: the ranks met at the store of compare instead of {event['address']}; do: leave "
                "the address to the launcher: torchrun also holds the store, and ranks that try another address wait "
                "until they time out"
            )
            return


def crashes_at_exit(runs: Sequence[ScriptRun]) -> Iterator[str]:
    for script_run in runs:
        # A signal ended them after the end of the script.
        crashed = [ended for ended in script_run.ranks if ended.how == "finished" and ended.exit_code]
        if crashed:
            yield (
                f"{named([ended.rank for ended in crashed])} of the run “{script_run.label}” ended with "
                f"{describe_exit(crashed[0].exit_code)} after the script had ended, which torchrun reports as a "
                "failure; do: call torch.distributed.destroy_process_group() at the script's end"
            )


def _also(comparison: ScriptComparison, verdict: ComparisonVerdict) -> Iterator[str]:
    """Return the other obstacles of runs that could not be compared."""
    if verdict.kind != "not comparable" or not comparison.runs or not comparison.runs[0].traces[0].steps:
        return
    one, *others = comparison.runs
    ranks = next((run.traces for run in others if len(run.ranks) > 1), [])
    scratch = one.directory.parent.resolve() if comparison.plan.fresh and one.directory else None
    for obstacle in standing(one.traces[0], ranks, scratch):
        if (line := f"do: {obstacle.todo}") not in verdict.report.remarks:
            yield f"also: {obstacle.reason}"
            yield line


def _found_what_was_left(runs: Sequence[ScriptRun]) -> ComparisonVerdict | None:
    """Return the refusal if the last run loaded a file of an earlier run, and therefore started from another state."""
    written = {event["file"] for earlier in runs[:-1] for trace in earlier.traces for event in trace.of("save")}
    last = runs[-1]
    for trace in last.traces:
        for event in trace.of("load"):
            own = [e for t in last.traces for e in t.of("save") if e["file"] == event["file"]]
            if event["file"] in written - {None} and not any(e["after"] <= event["after"] for e in own):
                loaded = f"the run “{last.label}” has loaded {event['file']}"
                return refused(f"{loaded}, which an earlier run of this comparison wrote", [SNAPSHOT])
    return None
