"""``mgpu-check compare --curve``: compare the loss curves of repeated runs, of a script or from files."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from mgpu_check.cli.codes import number
from mgpu_check.cli.compare_runs import recordings
from mgpu_check.cli.comparing import OF_RUNS, conclude, interruptible, refuse, tell
from mgpu_check.compare.comparison import ComparisonPlan, ScriptComparison
from mgpu_check.compare.curves.judging import CurveComparison, RunCurve, Side, judge
from mgpu_check.compare.curves.outcome import table, verdict_of, write_json, write_page
from mgpu_check.compare.curves.reading import side_of
from mgpu_check.compare.curves.running import RepeatedRuns, others_seen, run_all
from mgpu_check.compare.traces.recording import NotRecorded, RunRecording
from mgpu_check.compare.verdict import ComparisonVerdict, of_inputs


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--curve",
        type=number(1, "number of steps"),
        nargs="?",
        const=0,
        metavar="STEPS",
        help="compare loss curves of repeated runs, over STEPS steps (default: all): of a script, of traces, CSV files "
        "or event files of TensorBoard",
    )
    add(
        "--repeats",
        type=number(2, "number of runs"),
        default=3,
        metavar="N",
        help="with --curve, run each side N times (default: 3), with other seeds if the arguments have {R}, else moved "
        "by roundoffs",
    )
    add("--tag", metavar="NAME", help="with --curve, the column of a CSV file, or the tag of an event file")


def of_files(given: argparse.Namespace, words: Sequence[str], parser: argparse.ArgumentParser) -> int:
    if len(words) != 2:
        parser.error(
            f"curves of {len(words)} sides given: {', '.join(words)}; give two sides, each a file, a directory, or a "
            "pattern in quotes: compare --curve 'old/*.csv' 'new/*.csv'"
        )
    why = "curves of files are compared without running a script; only --tag, --html, --json and --sarif go with them"
    refuse(given, (*OF_RUNS, "unjudged"), why, parser)
    try:
        one, other = (_until(side_of(word, given.tag), given.curve) for word in words)
    except ValueError as error:
        parser.error(str(error))
    print(f"mgpu-check compare: {other} with {one}", flush=True)
    plan = ComparisonPlan([], shlex.join(words), 1, {}, {}, "", 0.0, None)
    found = judge(one, other)
    return _conclude(given, ScriptComparison(plan), verdict_of(found), found)


def _until(side: Side, steps: int) -> Side:
    cut = [RunCurve(c.name, {s: v for s, v in c.values.items() if not steps or s <= steps}) for c in side.curves]
    return Side(side.name, cut)


def of_runs(given: argparse.Namespace, plan: ComparisonPlan, parser: argparse.ArgumentParser) -> int:
    """Run a script repeatedly on both sides, and compare its curves."""
    if given.tag:
        parser.error(f"--tag={given.tag} names a curve in a file, and a script has one, its loss; leave --tag out")
    why = "--curve compares losses, over --curve=STEPS steps, and no parameters; leave them out"
    refuse(given, ("steps", "unjudged"), why, parser)
    plan = replace(plan, steps=given.curve or None)
    with interruptible(), ExitStack() as undo:
        if given.against or given.a:
            one, other, notes = recordings(given, plan, 0, undo, parser)
            sides = RepeatedRuns(one, plan.world), RepeatedRuns(other, plan.world)
        else:
            names, notes = ("one device", f"{plan.world} ranks"), ()
            one, other = (RunRecording(name, ScriptComparison(plan)) for name in names)
            sides = RepeatedRuns(one, 1), RepeatedRuns(other, plan.world)
        if sides[0].by_seeds != sides[1].by_seeds:
            parser.error("{R} is in the arguments of one side only; put it in those of both sides, or of none")
        print(f"mgpu-check compare: {plan.shown}: curves of {other.name} and {one.name}{plan.note}", flush=True)
        for line in notes:
            tell(line)
        done = ScriptComparison(plan)
        other.made.runs = one.made.runs  # no run may load what a run of the other side wrote
        for runs in sides:
            try:
                run_all(runs, given.repeats, tell)
            except NotRecorded as stopped:
                verdict = stopped.verdict(f"{runs.recording.name}: ", beside=runs is sides[1])
                if given.html:
                    none = CurveComparison((sides[0].side, sides[1].side), [])
                    write_page(given.html, plan.shown, verdict, none)
                return _conclude(given, done, verdict, None)
        return _of_sides(given, done, *sides)


def _of_sides(given: argparse.Namespace, done: ScriptComparison, one: RepeatedRuns, other: RepeatedRuns) -> int:
    found = judge(one.side, other.side)
    by_seeds = one.by_seeds and other.by_seeds
    remarks = [*one.remarks, *other.remarks]
    remarks.append(f"repeats differ by {'the seed in their arguments' if by_seeds else 'rounding alone'}")
    step = None if by_seeds else others_seen(one, other)
    if step is not None:
        why = f"the runs see other samples from step {step} on"
        if step == 1:
            todo = "let both see the same samples; or compare by seeds: put {R} in the arguments, as in --seed={R}"
            refusal = of_inputs(f"{why}, and repeats that differ by rounding do not", [todo])
            return _conclude(given, done, refusal, found)
    verdict = verdict_of(found, remarks)
    if verdict.kind == "differs" and step is not None:
        verdict = verdict_of(found, [*remarks, f"a possible cause: {why}"])
    if verdict.kind == "differs" and not by_seeds:
        do = "do: compare the first steps tensor by tensor, which names the mistake: the same command without --curve"
        verdict = replace(verdict, report=replace(verdict.report, remarks=[*verdict.report.remarks, do]))
    return _conclude(given, done, verdict, found)


def _conclude(
    given: argparse.Namespace, done: ScriptComparison, verdict: ComparisonVerdict, found: CurveComparison | None
) -> int:
    for line in table(found) if found is not None else ():
        tell(line)
    done.verdict = verdict
    if given.html and found is not None:
        write_page(given.html, done.plan.shown, verdict, found)
    if given.json:
        write_json(given.json, verdict, found)
    return conclude(done, json=None, sarif=given.sarif)
