"""``mgpu-check compare --gpus=4 -- train.py --args``: compare a training script on four ranks with one device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mgpu_check import pages
from mgpu_check.cli import compare_runs, simulate
from mgpu_check.cli.codes import INTERRUPTED, Parser
from mgpu_check.cli.comparing import (
    add_run_options,
    conclude,
    counted,
    interruptible,
    plan_of,
    script_command,
    tell,
    writable,
)
from mgpu_check.compare import comparison
from mgpu_check.compare.arguments import accepted
from mgpu_check.compare.comparison import ComparisonPlan
from mgpu_check.compare.page import write_page

_USAGE = (
    "mgpu-check compare [--gpus=N] [--simulate[=cpu|cuda:I]] [--steps=N] [--timeout=SECONDS] [--fresh-directory]\n"
    "                          [--unjudged=PATTERN=REASON]... [--html=FILE] [--json=FILE] --\n"
    "                          script.py [args...]\n"
    "       mgpu-check compare [...] -- -m module [args...]\n"
    "       mgpu-check compare --against=COMMIT [...] -- script.py [args...]\n"
    "       mgpu-check compare --a=ARGUMENTS --b=ARGUMENTS [...] -- script.py [args...]\n"
    "       mgpu-check compare --golden=FILE [--update-golden] [...] -- script.py [args...]\n"
    "       mgpu-check compare [--unjudged=PATTERN=REASON]... [--json=FILE] A.trace B.trace"
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
    try:
        return accepted(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _page(text: str) -> Path:
    try:
        pages.require("a page")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return writable(text)


_TAKE_A_WORD = (
    *("--gpus", "--steps", "--timeout", "--unjudged", "--html", "--json"),
    *("--against", "--a", "--b", "--golden"),
)


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
    add_run_options(parser, "compare", f"{_LIMIT} of ranks and one device, else all")
    add = parser.add_argument
    add(
        "--unjudged",
        type=_accepted,
        action="append",
        default=[],
        metavar="PATTERN=REASON",
        help="parameters that need not be compared, and the reason, which the report repeats (may be given several "
        "times)",
    )
    add(
        "--html",
        type=_page,
        metavar="FILE",
        help="write a page with the curves of loss and deviation, and a picture of where the runs differ; requires "
        + pages.INSTALL,
    )
    add("--json", type=writable, metavar="FILE", help="write the verdict and the compared values as JSON")
    add(
        "--against",
        type=_word,
        metavar="COMMIT",
        help="compare the run of the working tree with the run of a commit, which git checks out temporarily",
    )
    for flag in ("--a", "--b"):
        add(
            flag, type=_word, metavar="ARGUMENTS", help="compare two runs whose scripts have these additional arguments"
        )
    add("--golden", type=writable, metavar="FILE", help="compare the run with the trace in FILE")
    add("--update-golden", action="store_true", help="write the trace of the run to the FILE of --golden")
    return parser


def _word(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("'' is empty; give a commit, or arguments of the script in quotes")
    return text


def _check(given: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Check that the options go together. Return whether two runs of several ranks are compared."""
    modes = {"--against": given.against, "--a and --b": given.a or given.b, "--golden": given.golden}
    chosen = [flag for flag, value in modes.items() if value]
    if len(chosen) > 1:
        parser.error(f"{' and '.join(chosen)} say what to compare with; give one of them")
    if bool(given.a) != bool(given.b):
        parser.error("--a and --b are the arguments of two runs; give both, or leave both out")
    if given.update_golden and not given.golden:
        parser.error("--update-golden writes the file of --golden; give --golden=FILE")
    if not chosen and given.gpus < 2:
        parser.error("argument --gpus: '1' is not a number of ranks to compare with one device; give at least 2")
    return bool(chosen)


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    try:
        own, program = simulate.split_program(argv, _TAKE_A_WORD)
        given = parser.parse_args(own)
        if "--" not in argv and compare_runs.are_files(program):
            given, files = parser.parse_known_args(program, given)  # options may follow the files
            if unknown := [word for word in files if word.startswith("-")]:
                parser.error(f"unrecognized arguments: {' '.join(unknown)}")
            return compare_runs.of_files(given, files, parser)
        of_runs = _check(given, parser)
        command = script_command(program, parser)
        count = counted(given, command, [given.gpus] if of_runs else [1, given.gpus], parser)
        plan = replace(plan_of(given, program, command, count), unjudged=dict(given.unjudged))
        return compare_runs.of_runs(given, plan, parser) if of_runs else _compare(given, plan)
    except KeyboardInterrupt:
        print("mgpu-check compare: interrupted; all processes are ended", file=sys.stderr)
        return INTERRUPTED


def _compare(given: argparse.Namespace, plan: ComparisonPlan) -> int:
    print(f"mgpu-check compare: {plan.shown}: one device, and {given.gpus} ranks{plan.note}", flush=True)
    plan = replace(plan, limit=_LIMIT if given.steps is None else None)
    with interruptible():
        done = comparison.compare(plan, tell)
    if given.html:
        write_page(given.html, done)
    return conclude(done, json=given.json)
