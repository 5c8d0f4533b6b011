"""Run a script as often as its trace needs, and return the recorded run; also the script of another commit.

The commit is checked out into a temporary directory, where its script runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, NamedTuple

from mgpu_check.compare import reports
from mgpu_check.compare.comparability import SEEDS
from mgpu_check.compare.comparison import (
    ComparisonPlan,
    ScriptComparison,
    Tell,
    constants_placed,
    crashes_at_exit,
    run_script,
)
from mgpu_check.compare.processes import ScriptRun, fitted, temporary
from mgpu_check.compare.trace import Trace
from mgpu_check.compare.traces.files import RecordedRun, gathered, whole
from mgpu_check.compare.verdict import SEED, ComparisonVerdict, Kind
from mgpu_check.diagnosis.report import Report
from mgpu_check.processes.rank_lists import few
from mgpu_check.processes.scratch import Scratch

_UNPLACED = (
    "ranks hold different parameters, and no run with whole parameters shows which slices they are: each rank's "
    "tensors are recorded unchanged, and can be compared with the tensors of the same rank only"
)


class NotRecorded(Exception):
    """A run has no trace, for the reason in `report`, whose headline begins with the kind of the verdict.
    If it `failed`, the script failed or hung."""

    def __init__(self, report: Report, failed: bool) -> None:
        super().__init__(report.headline)
        self.report, self.failed = report, failed

    def told(self, outcome: str, subject: str = "") -> Report:
        """Return the report with another kind in its headline, and with what it is about."""
        return replace(self.report, headline=f"{outcome}: {subject}{self.report.headline.partition(': ')[2]}")

    def verdict(self, subject: str = "", *, beside: bool) -> ComparisonVerdict:
        """Return the verdict on a comparison that ends here.
        `subject`: what the headline is about. `beside`: the run that it is compared with has a trace, so a script that
        fails has failed on one side only."""
        outcome: Kind = "differs" if beside and self.failed else "not comparable"
        return ComparisonVerdict(outcome, self.told(outcome, subject))


@dataclass
class RunRecording:
    """The settings of a recording, and its runs: a command makes it, `record` runs it, and adds remarks."""

    name: str  # name of the recorded run in reports
    made: ScriptComparison
    values: int = 0  # most bytes of values to keep
    rounding: bool = True  # run the script once more, moved by roundoffs
    root: str = ""  # a directory, whose imported modules are recorded; "" for none
    foreign: Collection[str] = frozenset()  # the files that the script must not import
    remarks: list[str] = field(default_factory=list)


@dataclass
class UndividedRun:
    """A run with whole parameters, where other ranks find their slices."""

    label: str  # name of the run
    made: ScriptComparison  # the script with its arguments and environments
    world: int  # number of processes


class _Placed(NamedTuple):
    """A run of the ranks, the files that each kept, the run that shows their slices, and the files with the slices."""

    ranks: ScriptRun
    kept: list[IO[bytes]]
    reference: Trace | None
    files: Mapping[str, int | Sequence[int]]


def record(recording: RunRecording, tell: Tell, wholes: Sequence[UndividedRun] | None = None) -> RecordedRun:
    """Run the script on its ranks, and return the recorded run.

    Ranks that hold slices run again after a run with whole parameters. If no such run is possible, each rank's tensors
    are recorded unchanged.

    Args:
        wholes: the runs with whole parameters to try; None: the script on one device.

    Raises:
        NotRecorded: the script fails, makes no optimizer step, or is not repeatable.
    """
    comparison = recording.made
    world = comparison.plan.world
    with contextlib.ExitStack() as undo:
        label = f"{world} ranks" if world > 1 else "one device"
        recorded = _Placed(*_run(recording, tell, label, undo, {}, recording.values), None, {})
        if world > 1 and is_open(recorded.ranks.traces):
            tried = [UndividedRun("one device", comparison, 1)] if wholes is None else wholes
            placed = next(filter(None, (_placed(recording, tell, source, undo) for source in tried)), None)
            recorded = placed or recorded
            if placed is None:
                recording.remarks.append(_UNPLACED)
        assembly = whole(recorded.ranks.traces, recorded.reference)
        moved: list[Trace] = []
        if recording.rounding:
            repeated, _ = _run(recording, tell, f"{label}, moved by roundoffs", undo, recorded.files, 0, SEED)
            if difference := _not_repeated(recorded.ranks.traces, repeated.traces):
                raise NotRecorded(reports.refusal(difference, [SEEDS]), failed=False)
            moved = whole(repeated.traces, recorded.reference).ranks
        recording.remarks += crashes_at_exit(comparison.runs)
        values = gathered(recorded.kept) if recording.values else None
    facts = next(iter(recorded.ranks.traces[0].of("environment")), {})
    environment = {"simulation": comparison.plan.simulated or "none", **facts}
    for key in ("event", "after"):
        environment.pop(key, None)

    def without(traces: Sequence[Trace]) -> list[Trace]:
        kinds = "environment", "imported"
        return [replace(own, events=[event for event in own.events if event["event"] not in kinds]) for own in traces]

    return RecordedRun(
        recording.name,
        comparison.plan.shown,
        without(assembly.ranks),
        environment,
        without(moved),
        values,
        comparison.plan.steps,
        **assembly.placed(),
    )


def is_open(traces: Sequence[Trace]) -> bool:
    """Return whether ranks hold different parameters that do not describe which slices they are."""
    starts_by_name: dict[str, tuple[tuple[int, ...], int]] = {}
    for trace in traces:
        starts = {name: value for step in trace.steps for name, value in step.before.items()}
        for name, parameter in trace.parameters.items():
            if parameter.held is None and name in starts:
                own = parameter.shape, starts[name].bits
                if starts_by_name.setdefault(name, own) != own:
                    return True
    unsliced = [{name for name, entry in trace.parameters.items() if entry.held is None} for trace in traces]
    return any(labels != unsliced[0] for labels in unsliced)


def _run(
    recording: RunRecording,
    tell: Tell,
    label: str,
    undo: contextlib.ExitStack,
    files: Mapping[str, int | Sequence[int]],
    values: int,
    moved: int | None = None,
) -> tuple[ScriptRun, list[IO[bytes]]]:
    """Run the script on its ranks. Return the run, and for each rank the file with what it kept."""
    comparison = recording.made
    world = comparison.plan.world
    kept = [temporary(undo) for _ in range(world)]
    for file in kept:
        request = {"bytes": values // world if files else values, "root": recording.root}
        os.write(file.fileno(), json.dumps(request).encode() + b"\n")
    own = {**files, "kept": [file.fileno() for file in kept]}
    done = run_script(comparison, tell, label, world, moved=moved, environment=comparison.plan.several, files=own)
    _check_run(recording, done)
    return done, kept


def _check_run(recording: RunRecording, done: ScriptRun) -> None:
    report, files = None, {file for t in done.traces for event in t.of("imported") for file in event["files"]}
    if done.has("starts"):
        report = reports.starts_other_ranks(done, len(done.ranks))
    elif done.has("alone"):
        reason = "the script trains on several GPUs in one process, which a trace does not hold"
        report = reports.refusal(reason, ["compare it with one device: mgpu-check compare -- SCRIPT"])
    elif done.failed:
        report = reports.failed_run(done, done.failed, one_device=len(done.ranks) == 1)
    elif silent := [ended for ended in done.ranks if not ended.steps]:
        report = reports.no_steps(done, silent)
    elif foreign := sorted(files & set(recording.foreign)):
        report = reports.refusal(
            f"the run of {recording.name} has imported {few(foreign, 3)} from the working tree, so it did not run the "
            "commit",
            ["remove an editable install of this repository, or install it as a path in a .pth file"],
        )
    if report is not None:
        raise NotRecorded(report, failed=bool(done.failed) and not done.has("starts") and not done.has("alone"))


def _placed(recording: RunRecording, tell: Tell, source: UndividedRun, undo: contextlib.ExitStack) -> _Placed | None:
    """Run the ranks again, which find their slices in the parameters of another run; None if that run fails."""
    comparison, whole_plan = recording.made, source.made.plan
    try:
        fitted(whole_plan.command, source.world)
    except ValueError:
        return None  # an argument has no value for this number of processes
    keep, nowhere = temporary(undo).fileno(), os.open(os.devnull, os.O_WRONLY)
    undo.callback(os.close, nowhere)
    label, environment = f"{source.label}, for its whole parameters", whole_plan.several if source.world > 1 else None
    kept = {"keep": [keep, *[nowhere] * (source.world - 1)]}
    run = run_script(source.made, tell, label, source.world, environment=environment, files=kept)
    if run.failed or not run.traces[0].steps or is_open(run.traces):
        return None

    def placed(files: Mapping[str, int | Sequence[int]], how: str) -> _Placed:
        label = f"{comparison.plan.world} ranks, with {how}"
        return _Placed(*_run(recording, tell, label, undo, files, recording.values), run.traces[0], files)

    wholes = {"wholes": keep}
    recorded = placed(wholes, "slices")
    if source.world > 1 or not whole(recorded.ranks.traces, recorded.reference).same_elsewhere:
        return recorded
    files = constants_placed(comparison, tell, wholes, undo)
    return placed(files, "all slices") if files else recorded


def _not_repeated(ranks: Sequence[Trace], repeated: Sequence[Trace]) -> str | None:
    """Describe how a run that is moved by roundoffs differs in its inputs; None if it does not.
    Later stages of a pipeline receive activations, which are moved, so the samples of one rank suffice."""
    twice = f"not repeatable: run twice on {f'{len(ranks)} ranks' if len(ranks) > 1 else 'one device'}"
    pairs = list(zip(ranks, repeated, strict=True))
    for original, repetition in pairs:
        if len(original.steps) != len(repetition.steps):
            return f"{twice}, the script made {len(original.steps)} and {len(repetition.steps)} steps"
        for number, (step, repeated_step) in enumerate(zip(original.steps, repetition.steps, strict=True)):
            for name, value in step.before.items():
                if name not in repeated_step.before or repeated_step.before[name].bits != value.bits:
                    return f"{twice}, {name} had different values before step {number + 1}"
    for number in range(min(len(trace.steps) for trace in ranks)):
        samples = [[trace.steps[number].samples for trace in pair] for pair in pairs]
        equal = [original == repetition for original, repetition in samples if any(original)]
        if equal and not any(equal):
            return f"{twice}, the model received different samples at step {number + 1}"
    return None


_GENERATED = ("__pycache__", ".egg-info", ".pyc", ".pyo", ".so")
"""Ends of ignored names that are made from source files, so a commit has others."""


@dataclass(frozen=True)
class Revision:
    """A commit in a directory."""

    name: str  # the commit for reports: "main (1a2b3c4)"
    directory: Path  # the directory that stands for the current one
    root: Path  # the top directory of the repository's working tree
    top: Path  # the top directory of the commit
    own: frozenset[str]  # the files of the working tree that git tracks, or would track
    notes: Sequence[str]  # what the user should know of both trees, a line each

    def moved(self, word: str) -> str:
        """Return the path of a file or directory in the commit, if `word` is an absolute path in the working tree."""
        path = Path(word)
        inside = path.is_absolute() and path.is_relative_to(self.root)
        return str(self.top / path.relative_to(self.root)) if inside else word

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the variables, with the directories of the commit before the directories of the working tree."""
        paths = [os.path.realpath(path) for path in sys.path[1:] if path]
        ours = [moved for path in paths if (moved := self.moved(path)) != path and os.path.isdir(moved)]
        inherited = [self.moved(path) for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
        return {**variables, "PYTHONPATH": os.pathsep.join(dict.fromkeys([*ours, *inherited]))}

    def plan(self, plan: ComparisonPlan) -> ComparisonPlan:
        """Return the plan of the same script in the commit."""
        python, *words = plan.command
        words = [self.moved(word) for word in words]
        script = next((word for word in words if not word.startswith("-")), "")
        if "-m" not in words[: words.index(script)] and not (self.directory / script).exists():
            raise ValueError(f"there is no {script} in {self.name}; give a commit that has it")
        single, several = (self.environment(variables) for variables in (plan.single, plan.several))
        return replace(plan, command=[python, *words], single=single, several=several, directory=self.directory)


@contextmanager
def checked_out(revision: str) -> Iterator[Revision]:
    """Check a commit out as a temporary worktree, and remove it afterwards.

    Data that git ignores are links to those of the working tree.

    Raises:
        ValueError: git is not installed, the current directory is in no repository, or it has no such commit.
    """
    option = f"--against={revision}"
    try:
        root = Path(_git("rev-parse", "--show-toplevel").strip()).resolve()
    except FileNotFoundError:
        raise ValueError(f"{option} needs git, which is not installed") from None
    except subprocess.CalledProcessError:
        place = f"{Path.cwd()} is in no git repository"
        raise ValueError(f"{option}: {place}; run this in the repository of the script") from None
    try:
        commit = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").strip()
    except subprocess.CalledProcessError:
        missing = f"the repository {root} has no commit {revision!r}"
        raise ValueError(f"{option}: {missing}; give a branch, a tag, or a commit of git log") from None
    directory = Path.cwd().resolve().relative_to(root)
    with Scratch.new("compare") as scratch:
        top = scratch / root.name
        try:
            _git("-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", "--quiet", str(top), commit, at=root)
        except subprocess.CalledProcessError as error:
            raise ValueError(f"{option} cannot be checked out: {error.stderr.strip()}") from None
        try:
            if not (top / directory).is_dir():
                raise ValueError(f"{option}: the directory {directory} does not exist in {commit[:9]}")
            name = f"{revision} ({commit[:9]})" if not commit.startswith(revision) else commit[:9]
            notes = [*_differences(root, commit), *_linked(root, top)]
            own = frozenset(str(root / file) for file in _listed(root, "--cached", "--others", "--exclude-standard"))
            yield Revision(name, top / directory, root, top, own, notes)
        finally:
            _git("worktree", "remove", "--force", str(top), at=root)


def _git(*words: str, at: Path | None = None) -> str:
    return subprocess.run(["git", *words], cwd=at, capture_output=True, text=True, check=True).stdout


def _listed(root: Path, *words: str) -> list[str]:
    return [name for name in _git("ls-files", "-z", *words, at=root).split("\0") if name]


def _differences(root: Path, commit: str) -> Iterator[str]:
    changed, uncommitted = (
        [name for name in _git("diff", "--name-only", "-z", tree, "--", at=root).split("\0") if name]
        for tree in (commit, "HEAD")
    )
    fresh = _listed(root, "--others", "--exclude-standard")
    if uncommitted:
        yield f"uncommitted changes are part of the run of the working tree: {few(uncommitted, 3)}"
    if fresh:
        yield f"files that git does not track are in the working tree only: {few(fresh, 3)}"
    if not changed and not fresh:
        yield "the working tree equals the commit: both runs are of the same files"


def _linked(root: Path, top: Path) -> Iterator[str]:
    """Link the data that git ignores into the commit."""
    ignored = _listed(root, "--others", "--ignored", "--exclude-standard", "--directory")
    linked = []
    for name in (name.rstrip("/") for name in ignored):
        if not name.endswith(_GENERATED) and (top / name).parent.is_dir() and not (top / name).exists():
            (top / name).symlink_to(root / name)
            linked.append(name)
    if linked:
        yield f"both runs share what git ignores: {few(linked, 3)}"
    if (root / ".gitmodules").exists():
        yield "submodules are not checked out for the run of the commit"
