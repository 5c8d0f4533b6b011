"""`mgpu-check accept`: decide whether a node may join the fleet, and name its defective parts.

`mgpu-check accept merge a.json b.json ...` joins the reports of many nodes into one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import mgpu_check.acceptance
from mgpu_check.acceptance.application import SUFFIXES
from mgpu_check.acceptance.faults import all_hardware_faults
from mgpu_check.acceptance.plan import CHECKS
from mgpu_check.acceptance.report import summary
from mgpu_check.acceptance.report.files import check_paths, read, write
from mgpu_check.acceptance.report.merge import merge
from mgpu_check.acceptance.report.summary import headline
from mgpu_check.acceptance.run_report import EXIT_CODES, RunReport
from mgpu_check.cli.codes import INTERNAL_ERROR, INTERRUPTED, RIGHT, WRONG_USAGE, Parser
from mgpu_check.cli.suite import at_standard, command_line, misuse, on_all_gpus, refuse_workers, run
from mgpu_check.engine.remote import launched_process
from mgpu_check.settings import all_options

_EPILOG = """\
exit codes: the worst verdict counts: 1 a node is REJECTED; 5 a node is SUSPECT: slower than at least two others with
the same GPU model and software, which agree; 2 a node is INCONCLUSIVE; 0 all nodes are ACCEPTED; 3 internal error;
4 wrong usage.
A GPU that a later report has in another host makes its old node INCONCLUSIVE.
"""


def _merge_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mgpu-check accept merge",
        usage="mgpu-check accept merge FILE.json FILE.json ... [--report=FILE.html|.json|.prom]",
        description="Join the JSON reports of many nodes into one, and name the nodes that differ from the others.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE.json", help="a report of `mgpu-check accept --report=FILE.json`"
    )
    text = f"write a report of all nodes; the suffix is the format: {', '.join(SUFFIXES)}; can be given several times"
    parser.add_argument("--report", action="append", default=[], type=Path, metavar="FILE", help=text)
    return parser


def merge_reports(argv: Sequence[str]) -> int:
    """Join the reports of `argv`, write the result, and return the exit code of the worst verdict."""
    parser = _merge_parser()
    options = parser.parse_args(list(argv))
    try:
        check_paths(options.report)
        reports: dict[str, RunReport] = {}
        for path in options.files:
            if str(path) in reports:
                raise ValueError(f"{path} is given twice; give the report of each node once")
            reports[str(path)] = read(path)
        report = merge(reports, shlex.join(["mgpu-check", "accept", "merge", *argv]))
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(summary.lines(report)))
    for path in options.report:
        try:
            write(path, report)
        except OSError as error:
            print(f"mgpu-check accept merge: {path} cannot be written: {error.strerror}")
            return INTERNAL_ERROR
    print(headline(report))
    return EXIT_CODES[report.verdict.kind]


_OWN = {
    "--for": "2h",
    "--memory": "0.9",
    "--baseline": "h100.json",
    "--record-baseline": "h100.json",
    "--report": "node.html",
    "--verdict-file": "verdict.txt",
    "--policy": "site.toml",
    "--plant": "copy-zeros",
}
"""Options of this command that the plugin calls ``--accept-...``, each with an example value."""

_OWN_SWITCHES = ("--evidence",)  # options of this command that the plugin calls `--accept-...`, without a value

_OURS = {*_OWN, *_OWN_SWITCHES}

_LIST = ("--accept-plant", "list")
_HELP = """\
usage: mgpu-check accept [--gpus=N|all] [--gpu-level=glance|quick|standard|long] [--for=TIME] [--simulate]
                         [--memory=SHARE] [--baseline=FILE] [--record-baseline=FILE]
                         [--report=FILE.html|.json|.prom] [--evidence] [--verdict-file=FILE]
                         [--policy=FILE.toml] [-k NAME] [pytest arguments]
       mgpu-check accept merge FILE.json FILE.json ... [--report=FILE]

Checks the GPUs of this node, their memory, arithmetic, links, collectives, training and health, and their host, and
prints one verdict. Without --gpus it checks all visible GPUs. Under torchrun or srun it checks the GPUs of all hosts,
each with a verdict.

  --gpu-level       glance: inventory, one pass of compute and links, health, in seconds;
                    quick: under a minute on 8 GPUs; standard (default): under ten; long: as thorough as possible
  --for             keep the GPUs under load for this time after the checks: 90s, 30m, 2h
  --memory          share of the free memory that is written and read back (default: 0.9)
  --baseline        compare facts and speed with a file that --record-baseline has written on a good node
  --record-baseline write facts and speed of these GPUs to a file, unless a check failed; use a node that you trust
  --report          write a report; can be given several times
  --evidence        keep every observation and sample in JSON reports, which are ten times as large then
  --verdict-file    write the verdict: its word alone in the first line, then the exit code; also where a launcher, such
                    as torchrun, has an exit code of its own
  --policy          rule on kinds of findings by their ids: accept, warn or reject; a file with a table [findings]
  --simulate        simulate the GPUs in software: shows how the checks work, and proves nothing about hardware
  --plant           plant a defect in simulated GPUs, such as copy-zeros:device=0,peer=2; --plant=list lists all defects
  -k                run only the checks whose names match; the verdict says so

exit codes:
  0 ACCEPTED   1 REJECTED   2 INCONCLUSIVE: something could not be checked   3 internal error   4 wrong usage
  130 interrupted
The last line of the output is the verdict.
"""


def main(argv: Sequence[str]) -> int:
    arguments = list(argv)
    if arguments and arguments[0] == "merge":
        return merge_reports(arguments[1:])
    if "-h" in arguments or "--help" in arguments:
        print(_HELP, end="")
        return 0
    _remove_old_verdict(arguments)
    if refused := misuse(arguments, _OWN, _OWN_SWITCHES):
        print(f"mgpu-check accept: {refused}", file=sys.stderr)
        return WRONG_USAGE
    typed = arguments = in_pytests_words(arguments)
    if "=".join(_LIST) in arguments or _LIST in itertools.pairwise(arguments):
        for name, fault in sorted(all_hardware_faults().items()):
            parameters = ",".join(f"{key}={value}" for key, value in fault.defaults.items())
            print(f"{name}{':' if parameters else ''}{parameters}\n    {fault.summary}")
        return RIGHT
    arguments = at_standard(on_all_gpus(arguments))
    if not any(argument.startswith("--hypothesis-seed") for argument in arguments):
        # One seed repeats the whole run. It goes first: options of the user may end with "--".
        arguments = [f"--hypothesis-seed={secrets.randbelow(2**32)}", *arguments]
    if (driver := launched_process.driver()) is not None:
        driver.connections.interrupted_by_leaving = True
    ending = _Ending()
    line = command_line(("accept",), arguments, typed, "--accept-")
    # The checks have no assertions to rewrite, and rewriting takes a second if the cache cannot be kept.
    code = run(["-rN", "--assert=plain", *arguments], [ending, line], mgpu_check.acceptance)
    if ending.interrupted:
        return INTERRUPTED
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        hint = f"checks are {', '.join(CHECKS)}: select some with -k, such as -k 'memory or links'"
        print(f"mgpu-check accept: no check was selected; {hint}", file=sys.stderr)
        return WRONG_USAGE
    return INTERNAL_ERROR if ending.broken else code


class _Ending:
    """A pytest plugin that distinguishes an interrupted run from an undecided one: pytest's exit code is 2 for both.
    `main` makes it for one run, and reads it after pytest has returned."""

    interrupted = False
    broken = False

    def pytest_configure(self, config: pytest.Config) -> None:
        refuse_workers(config, "mgpu-check accept: the command uses all GPUs at once, and runs in one process")

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.broken = excinfo.type is not KeyboardInterrupt
        # pytest's own Interrupted, a KeyboardInterrupt, comes here, too: _pytest/main.py, wrap_session, pytest 9.2.
        self.interrupted = excinfo.type is KeyboardInterrupt


def _remove_old_verdict(arguments: Sequence[str]) -> None:
    """Remove the verdict of an earlier run, so that it is not mistaken for that of a run that cannot start."""
    option = all_options()["accept_verdict_file"]
    candidates = [os.environ.get(option.variable, "")]
    for word, following in itertools.pairwise([*arguments, "-"]):
        flag, equals, value = word.partition("=")
        if flag in ("--verdict-file", option.flag):
            candidates.append(value if equals else following)
    path = Path(candidates[-1])
    if candidates[-1] and not candidates[-1].startswith("-") and path.is_file():
        path.unlink()


def in_pytests_words(arguments: Sequence[str]) -> list[str]:
    """Translate the options of this command into those of the plugin: ``--report=F`` into ``--accept-report=F``."""
    words = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        words.append(f"--accept-{name.removeprefix('--')}{equals}{value}" if name in _OURS else argument)
    return words
