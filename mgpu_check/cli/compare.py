"""``mgpu-check compare --gpus=4 -- train.py --args``: compare a training script on four ranks with one device.

It also compares a run with a run: two traces, two commits, two sets of arguments, a space of arguments, or a run
with a golden trace.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from mgpu_check import pages
from mgpu_check.cli import run_options, simulate
from mgpu_check.cli.codes import INTERRUPTED, RIGHT, UNDECIDED, WRONG, Parser
from mgpu_check.compare import comparison
from mgpu_check.compare.comparison import ComparisonPlan, ScriptComparison
from mgpu_check.compare.page import write_page
from mgpu_check.compare.processes import fitted
from mgpu_check.compare.trace import TraceError
from mgpu_check.compare.traces.files import VALUES_OF_COMPARISON, RecordedRun, installed, is_run, read_run, write_run
from mgpu_check.compare.traces.recording import NotRecorded, RunRecording, UndividedRun, checked_out, record
from mgpu_check.compare.traces.run_comparison import compare_runs
from mgpu_check.compare.verdict import ComparisonVerdict
from mgpu_check.oracles.pairs import fewest_options, settings_in_pairs


def of_files(options: argparse.Namespace, files: Sequence[str], parser: argparse.ArgumentParser) -> int:
    if len(files) != 2:
        parser.error(f"{len(files)} traces given: {', '.join(files)}; give two: compare A.trace B.trace")
    reason = "two traces are compared without running a script; only --unjudged, --html and --json go with them"
    run_options.refuse(options, run_options.OF_RUNS, reason, parser)
    reference, candidate = (_read(Path(file), parser) for file in files)
    print(f"mgpu-check compare: {files[1]} ({_told(candidate)}) with {files[0]} ({_told(reference)})", flush=True)
    plan = ComparisonPlan([], shlex.join(files), candidate.world, {}, {}, "", 0.0, None)
    return _judge(options, ScriptComparison(replace(plan, unjudged=dict(options.unjudged))), reference, candidate)


def _read(path: Path, parser: argparse.ArgumentParser) -> RecordedRun:
    try:
        return read_run(path)
    except TraceError as error:
        parser.error(str(error))


def _told(run: RecordedRun) -> str:
    return f"{run.script}: {run.world} rank{'s' * (run.world > 1)}, {len(run.ranks[0].steps)} steps"


def _judge(
    options: argparse.Namespace,
    done: ScriptComparison,
    reference: RecordedRun,
    candidate: RecordedRun,
    remarks: Sequence[str] = (),
) -> int:
    judged = compare_runs(reference, candidate, done.plan.unjudged, options.bitwise)
    report = replace(judged.verdict.report, remarks=[*judged.verdict.report.remarks, *remarks])
    done.aligned, done.rounding, done.verdict = judged.aligned, judged.rounding, replace(judged.verdict, report=report)
    return _written(options, done, reference.name)


def _written(options: argparse.Namespace, done: ScriptComparison, reference: str = "one device") -> int:
    done.report_fake_data()
    if options.html:
        write_page(options.html, done, reference)
    return run_options.conclude(done, json=options.json)


def compare_two_runs(options: argparse.Namespace, plan: ComparisonPlan, parser: argparse.ArgumentParser) -> int:
    """Run the script twice, or once beside a golden trace, and compare the runs."""
    if options.golden:
        return _golden(options, plan, parser)
    if options.space:
        return compare_space(options, plan, parser)
    values = VALUES_OF_COMPARISON if installed() else 0
    with run_options.interruptible(), ExitStack() as undo:
        reference, candidate, notes = _recordings(options, plan, values, undo, parser)
        print(f"mgpu-check compare: {plan.shown}: {candidate.name} with {reference.name}{plan.note}", flush=True)
        for line in notes:
            run_options.tell(line)
        return _both(options, plan, reference, candidate)


def _recordings(
    options: argparse.Namespace, plan: ComparisonPlan, values: int, undo: ExitStack, parser: argparse.ArgumentParser
) -> tuple[RunRecording, RunRecording, Sequence[str]]:
    """Return the two runs of --against, or of --a and --b, and what the user should know of them. `values` is the most
    bytes of values to keep of each, and `undo` removes the files of the commit."""
    try:
        if options.against:
            revision = undo.enter_context(checked_out(options.against))
            comparison_of_commit, root = ScriptComparison(revision.plan(plan)), str(revision.root)
            reference = RunRecording(revision.name, comparison_of_commit, values, root=root, foreign=revision.own)
            candidate = RunRecording("the working tree", ScriptComparison(plan), values, rounding=False)
            return reference, candidate, revision.notes
        reference = RunRecording("--a", ScriptComparison(_with(plan, "--a", options.a)), values)
        candidate = RunRecording("--b", ScriptComparison(_with(plan, "--b", options.b)), values, rounding=False)
        return reference, candidate, [f"{side.name}: {side.made.plan.shown}" for side in (reference, candidate)]
    except ValueError as error:
        parser.error(str(error))


def _with(plan: ComparisonPlan, flag: str, words: str) -> ComparisonPlan:
    try:
        command = [*plan.command, *shlex.split(words)]
        fitted(command, plan.world)
    except ValueError as error:
        raise ValueError(f"{flag}={words}: {error}; give the arguments as in a shell") from None
    return replace(plan, command=command, shown=f"{plan.shown} {words}".rstrip())


def _both(options: argparse.Namespace, plan: ComparisonPlan, reference: RunRecording, candidate: RunRecording) -> int:
    done = ScriptComparison(plan)
    share = not options.against  # slices of one run may be found in the other run
    runs: list[RecordedRun] = []
    for side, another in ((reference, candidate), (candidate, reference)):
        own = UndividedRun("one device", side.made, 1)
        shared = [UndividedRun(f"the ranks of {another.name}", another.made, plan.world)] if share else []
        stopped = None
        try:
            runs.append(record(side, run_options.tell, [own, *shared]))
        except NotRecorded as error:
            stopped = error
        for script in (side.made, another.made):  # the runs of both, if slices were found in the other run
            done.runs += script.runs
            script.runs = []
        if stopped is not None:
            done.verdict = stopped.verdict(f"{side.name}: ", beside=bool(runs))
            return _written(options, done, reference.name)
    return _judge(options, done, runs[0], runs[1], [*reference.remarks, *candidate.remarks])


def _golden(options: argparse.Namespace, plan: ComparisonPlan, parser: argparse.ArgumentParser) -> int:
    path: Path = options.golden
    if options.update_golden:
        print(f"mgpu-check compare: {plan.shown}: the golden trace {path}{plan.note}", flush=True)
        return write_recorded(RunRecording(path.name, ScriptComparison(plan)), path)
    if not path.exists():
        parser.error(f"--golden={path}: there is no such file; write it with --update-golden")
    golden = _read(path, parser)
    if options.steps == 0 and golden.limit:
        do = "leave --steps out, or write the file again with --update-golden"
        parser.error(f"--steps=all: the golden trace {path} ends after {golden.limit} steps, as recorded; {do}")
    plan = plan if plan.steps else replace(plan, steps=golden.limit)
    values = VALUES_OF_COMPARISON if golden.values is not None and installed() else 0
    run = RunRecording("this run", ScriptComparison(plan), values, rounding=not golden.moved)
    print(f"mgpu-check compare: {plan.shown}: this run with {path} ({_told(golden)}){plan.note}", flush=True)
    with run_options.interruptible():
        try:
            recorded = record(run, run_options.tell)
        except NotRecorded as stopped:
            run.made.verdict = stopped.verdict(beside=True)
            return _written(options, run.made, golden.name)
        return _judge(options, run.made, golden, recorded, run.remarks)


def read_space(path: Path) -> tuple[dict[str, list[Any]], list[dict[str, Any]]]:
    """Return options of a script with their values, and values that are not combined, from a TOML file."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--space={path}: {error}") from None
    space, refused = table.pop("space", None), table.pop("refused", [])
    lists = [*space.values()] if isinstance(space, dict) and not table else []
    usable = lists and all(isinstance(values, list) and len(values) > 1 for values in lists)
    if not usable or not all(isinstance(rule, dict) and rule and rule.keys() <= space.keys() for rule in refused):
        raise ValueError(
            f"--space={path} is no space of options; give a table [space] of options and their values, the simplest "
            'first, such as "--tp" = [1, 2], and [[refused]] for values that are not combined'
        )
    return space, refused


def _words(setting: Mapping[str, Any]) -> str:
    """Return the arguments of a setting: an option alone for true, nothing for false."""
    words = ([name] if value is True else [name, str(value)] for name, value in setting.items() if value is not False)
    return shlex.join(word for pair in words for word in pair)


def compare_space(options: argparse.Namespace, plan: ComparisonPlan, parser: argparse.ArgumentParser) -> int:
    """Compare the run with the first value of each option with runs that have each pair of other values."""
    try:
        space, refused = read_space(options.space)
    except ValueError as error:
        parser.error(str(error))
    simplest = {name: values[0] for name, values in space.items()}

    def is_allowed(setting: Mapping[str, Any]) -> bool:
        return not any(rule.items() <= (simplest | dict(setting)).items() for rule in refused)

    values = [(name, value) for name, own in space.items() for value in own[1:]]
    settings = settings_in_pairs(values, is_allowed) if is_allowed({}) else []
    if not settings:
        parser.error(f"--space={options.space}: [[refused]] leaves nothing to compare")
    runs = f"{len(settings)} settings with {_words(simplest) or 'no arguments'}"
    print(f"mgpu-check compare: {plan.shown}: {runs}{plan.note}", flush=True)
    with run_options.interruptible():
        return _of_space(options, plan, simplest, settings, is_allowed)


def _of_space(
    options: argparse.Namespace,
    plan: ComparisonPlan,
    simplest: Mapping[str, Any],
    settings: Sequence[Mapping[str, Any]],
    is_allowed: Callable[[Mapping[str, Any]], bool],
) -> int:
    def recording(setting: Mapping[str, Any], rounding: bool) -> RunRecording:
        words = _words({**simplest, **setting})
        return RunRecording(words or "no arguments", ScriptComparison(_with(plan, "--space", words)), rounding=rounding)

    reference = recording({}, rounding=True)
    try:
        baseline = record(reference, run_options.tell)
    except NotRecorded as stopped:
        reference.made.verdict = stopped.verdict(f"{reference.name}: ", beside=False)
        return _written(options, reference.made)
    verdicts: dict[str, ComparisonVerdict] = {}

    def verdict_on(setting: Mapping[str, Any]) -> ComparisonVerdict:
        words = _words({**simplest, **setting})
        if words not in verdicts:
            run = recording(setting, rounding=False)
            wholes = [UndividedRun("one device", run.made, 1)]
            wholes.append(UndividedRun(f"the ranks of {reference.name}", reference.made, plan.world))
            try:
                recorded = record(run, run_options.tell, wholes)
                verdicts[words] = compare_runs(baseline, recorded, plan.unjudged, options.bitwise).verdict
            except NotRecorded as stopped:
                verdicts[words] = stopped.verdict(f"{run.name}: ", beside=True)
            run_options.tell(f"{words}: {verdicts[words].kind}")
        return verdicts[words]

    def fails(setting: Mapping[str, Any]) -> bool:
        return bool(setting) and is_allowed(setting) and verdict_on(setting).kind == "differs"

    failing: list[dict[str, Any]] = []
    untried: list[str] = []
    for setting in settings:
        if any(fewest.items() <= setting.items() for fewest in failing):
            untried.append(_words(setting))
        elif fails(setting):
            failing.append(fewest_options(dict(setting), fails))
    for fewest in failing:
        print(f"\n{_words(fewest)}: {verdict_on(fewest).report}")
    counts = Counter[str](verdict.kind for verdict in verdicts.values())
    counts["not tried, because they have options that differ"] += len(untried)
    summary = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    print(f"\n{plan.shown}: {summary}; differs with: {'; '.join(map(_words, failing)) or 'nothing'}")
    code = WRONG if failing else RIGHT if counts["equal"] == counts.total() else UNDECIDED
    if options.json:
        table: dict[str, Any] = {"format": "mgpu-check space", "script": plan.shown, "simplest": reference.name}
        table["runs"] = [{"arguments": words, "verdict": own.kind, "headline": own.report.headline}
                         for words, own in verdicts.items()]  # fmt: skip
        table |= {"differs_with": [*map(_words, failing)], "not_tried": untried, "exit_code": code}
        options.json.write_text(json.dumps(table))
    return code


def write_recorded(recording: RunRecording, path: Path) -> int:
    """Record a run, and write its trace. Return the exit code."""
    with run_options.interruptible():
        try:
            run = record(recording, run_options.tell)
        except NotRecorded as stopped:
            print(f"\n{stopped.told('not recorded')}")
            _tell_fake_data(recording, failed=True)
            return WRONG if stopped.failed else UNDECIDED
        write_run(path, run)
    kept = f"values up to {len(run.values):,} bytes" if run.values is not None else "no values"
    print(f"\nrecorded: {_told(run)}: {path}, {path.stat().st_size:,} bytes, {kept}")
    for line in (*recording.remarks, *(f"not whole: {name}: {reason}" for name, reason in run.reasons.items())):
        print(f"  {line}")
    _tell_fake_data(recording, failed=False)
    return RIGHT


def _tell_fake_data(recording: RunRecording, failed: bool) -> None:
    fake = recording.made.plan.fake
    for line in fake.remarks(failed) if fake else ():
        print(f"  {line}")


_USAGE = (
    "mgpu-check compare [--gpus=N] [--simulate[=cpu|cuda:I]] [--steps=N] [--timeout=SECONDS] [--fresh-directory]\n"
    "                          [--fake-data[=PLAN]] [--unjudged=PATTERN=REASON]... [--html=FILE] [--json=FILE]\n"
    "                          -- script.py [args...]\n"
    "       mgpu-check compare [...] -- -m module [args...]\n"
    "       mgpu-check compare --against=COMMIT [--bitwise] [...] -- script.py [args...]\n"
    "       mgpu-check compare --a=ARGUMENTS --b=ARGUMENTS [--bitwise] [...] -- script.py [args...]\n"
    "       mgpu-check compare --space=FILE [...] -- script.py [args...]\n"
    "       mgpu-check compare --golden=FILE [--update-golden] [...] -- script.py [args...]\n"
    "       mgpu-check compare [--unjudged=PATTERN=REASON]... [--bitwise] [--json=FILE] A.trace B.trace"
)
_EPILOG = """\
In the arguments of the script, an expression in braces that contains W is replaced by its value. W is the number of
processes of the run: --batch-size={64/W}, --lr={0.1*W}.

exit codes:
  0 equal   1 differs, or fails or hangs on the ranks
  2 not comparable: the ranks saw other samples or started from other parameters, or the script is not repeatable, makes
    no optimizer step, or has no finite numbers from the first step on; or undecided: a trained parameter, a state of
    it, or a buffer was not compared, and nothing else differs
  3 internal error of mgpu-check, no verdict on the script   4 wrong usage   130 interrupted
Requirements for a comparable script: https://github.com/mgpu-check/mgpu-check/blob/main/docs/how-to/compare.md.
"""


_LIMIT = 10
"""Optimizer steps that are compared with one device by default: whole trainings would take hours, four times."""


def _accepted(text: str) -> tuple[str, str]:
    pattern, _, reason = (piece.strip() for piece in text.partition("="))
    if not pattern or not reason:
        message = f"{text!r} lacks a pattern or a reason; give PATTERN=reason, as in 'head.*=frozen after step 1'"
        raise argparse.ArgumentTypeError(message)
    return pattern, reason


def _page(text: str) -> Path:
    try:
        pages.require("a page")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return run_options.writable(text)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mgpu-check compare",
        usage=_USAGE,
        description="Run an unchanged training script on one device and on N ranks, and name the first optimizer step "
        "and parameter that differ.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run_options.add_run_options(parser, "compare", f"{_LIMIT} of ranks and one device, else all")
    add = parser.add_argument
    text = "parameters that need not be compared, and the reason, which the report repeats (may be given several times)"
    add("--unjudged", type=_accepted, action="append", default=[], metavar="PATTERN=REASON", help=text)
    text = "write a page with the curves of loss and deviation, and a picture of where the runs differ; requires "
    add("--html", type=_page, metavar="FILE", help=text + pages.INSTALL)
    add("--json", type=run_options.writable, metavar="FILE", help="write the verdict and the compared values as JSON")
    text = "compare the run of the working tree with the run of a commit, which git checks out temporarily"
    add("--against", type=_word, metavar="COMMIT", help=text)
    for flag in ("--a", "--b"):
        text = "compare two runs whose scripts have these additional arguments; '' for none"
        add(flag, type=str, metavar="ARGUMENTS", help=text)
    text = (
        "compare the run with the first values of options in a TOML file with runs that have each pair of other values"
    )
    add("--space", type=Path, metavar="FILE", help=text)
    add("--golden", type=run_options.writable, metavar="FILE", help="compare the run with the trace in FILE")
    add("--bitwise", action="store_true", help="of two runs: other bits differ, also if rounding explains them")
    add("--update-golden", action="store_true", help="write the trace of the run to the FILE of --golden")
    return parser


def _word(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("'' is empty; give a commit")
    return text


def _check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Check that the options go together. Return whether two runs of several ranks are compared."""
    pair = options.a if options.b is None else options.b
    modes = {"--against": options.against, "--a and --b": pair, "--golden": options.golden, "--space": options.space}
    chosen = [flag for flag, value in modes.items() if value is not None]
    if len(chosen) > 1:
        parser.error(f"{' and '.join(chosen)} say what to compare with; give one of them")
    if (options.a is None) != (options.b is None):
        flag = "--b" if options.a is None else "--a"
        parser.error(f"argument {flag}: --a and --b are the arguments of two runs; give both, or leave both out")
    if options.update_golden and not options.golden:
        parser.error("--update-golden writes the file of --golden; give --golden=FILE")
    if options.space and options.html:
        parser.error("--html shows one comparison; leave it out with --space")
    if options.bitwise and not chosen:
        parser.error(
            "--bitwise is for two runs, because sums over ranks round otherwise than one device; add --a and --b, "
            "--against, --golden or --space"
        )
    if not chosen and options.gpus < 2:
        parser.error("argument --gpus: '1' is not a number of ranks to compare with one device; give at least 2")
    return bool(chosen)


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    try:
        own, program = simulate.split_program(argv, parser)
        options = parser.parse_args(own)
        if "--" not in argv and any(is_run(Path(word)) for word in program[:2]):
            options, files = parser.parse_known_args(program, options)  # options may follow the files
            if unknown := [word for word in files if word.startswith("-")]:
                parser.error(f"unrecognized arguments: {' '.join(unknown)}")
            return of_files(options, files, parser)
        of_runs = _check(options, parser)
        command = run_options.script_command(program, parser)
        count = run_options.counted(options, command, [options.gpus] if of_runs else [1, options.gpus], parser)
        plan = replace(run_options.plan_of(options, program, command, count), unjudged=dict(options.unjudged))
        with plan.fake or nullcontext():
            return compare_two_runs(options, plan, parser) if of_runs else _compare(options, plan)
    except KeyboardInterrupt:
        print("mgpu-check compare: interrupted; all processes are ended", file=sys.stderr)
        return INTERRUPTED


def _compare(options: argparse.Namespace, plan: ComparisonPlan) -> int:
    runs = f"one device, and {options.gpus} ranks; mostly 4 runs, 2 if they decide, more for a replay or slices"
    print(f"mgpu-check compare: {plan.shown}: {runs}{plan.note}", flush=True)
    plan = replace(plan, limit=_LIMIT if options.steps is None else None)
    with run_options.interruptible():
        return _written(options, comparison.compare(plan, run_options.tell))
