"""``mgpu-check compare --gpus=4 -- train.py --args``: compare a training script on four ranks with one device."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from mgpu_check import pages
from mgpu_check.annotations import annotation, wanted
from mgpu_check.cli import simulate
from mgpu_check.cli.codes import INTERRUPTED, RIGHT, UNDECIDED, WRONG, Parser
from mgpu_check.compare.arguments import accepted, fitted

__all__ = ["main"]

_USAGE = (
    "mgpu-check compare [--gpus=N] [--simulate[=cpu|cuda:I]] [--steps=N] [--timeout=SECONDS] [--fresh-directory]\n"
    "                          [--unjudged=PATTERN=REASON]... [--html=FILE] [--json=FILE] -- script.py [args...]\n"
    "       mgpu-check compare [...] -- -m module [args...]"
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
_CODES = {"equal": RIGHT, "differs": WRONG, "not comparable": UNDECIDED, "undecided": UNDECIDED}
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "horovodrun", "srun", "jsrun")
_LAUNCHING = re.compile(r"torch\.distributed\.(run|launch)$|accelerate\.commands\.|deepspeed\.launcher\.")
_PYTHON = re.compile(r"python[\d.]*")
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _number(least: int, what: str) -> type[int]:
    def parse(text: str) -> int:
        try:
            n = int(text)
        except ValueError:
            n = least - 1
        if n < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {what}; give an integer of at least {least}")
        return n

    return parse  # type: ignore[return-value]  # argparse accepts any callable as a type


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; give a number of seconds above 0")
    return value


def _accepted(text: str) -> tuple[str, str]:
    try:
        return accepted(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _writable(text: str) -> Path:
    path = Path(text)
    if not text or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file; give the name of the file to write, or leave it out")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.absolute().parent} for {path.name}")
    return path


def _page(text: str) -> Path:
    try:
        pages.require("a page")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return _writable(text)


_TAKE_A_WORD = ("--gpus", "--steps", "--timeout", "--unjudged", "--html", "--json")


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
    add = parser.add_argument
    add("--gpus", type=_number(2, "number of ranks"), default=2, metavar="N", help="number of ranks (default: 2)")
    simulate.add_simulate(parser)
    add("--steps", type=_number(1, "number of steps"), metavar="N", help="compare N optimizer steps (default: all)")
    add(
        "--timeout",
        type=_seconds,
        default=300.0,
        metavar="SECONDS",
        help="end a run if no rank makes progress for this time (default: 300)",
    )
    add(
        "--fresh-directory",
        action="store_true",
        help="start each run in a fresh copy of the current directory, without files of other runs",
    )
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
        help=f"write a page with the curves of loss and deviation; requires {pages.INSTALL}",
    )
    add("--json", type=_writable, metavar="FILE", help="write the verdict and the compared values as JSON")
    return parser


def _script_command(program: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the command of a script, which may start with a Python interpreter.

    Raises:
        SystemExit: by `parser`: `program` is a launcher, or not a Python program. Each rank runs the script directly.
    """
    name = Path(program[0]).name if program else ""
    python = _PYTHON.fullmatch(name) is not None and not Path(program[0]).is_dir()
    words = program[1:] if python else program
    options = list(itertools.takewhile(lambda word: word.startswith("-") and word != "-m", words)) if python else []
    rest = words[len(options) :]
    module = rest[1] if len(rest) > 1 and rest[0] == "-m" else ""
    if name in _LAUNCHERS or _LAUNCHING.match(module):
        parser.error(
            f"{module or name} starts ranks, and so does compare: give the script and its own arguments only, such as "
            "compare --gpus=4 -- train.py --epochs=2"
        )
    if python and not rest:
        parser.error(f"no script given for {name}: name one, or a module with -m")
    command = simulate.program_command(program, parser)
    if command[0] != sys.executable and not python:
        parser.error(
            f"{program[0]} is a program, but compare runs Python scripts only: give the script that it starts, with "
            "the script's arguments"
        )
    return command


def _environments(gpus: int, backing: str | None) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return two environments: for the run on one device, and for the ranks."""
    if backing is not None:
        return simulate.environment(1, backing), simulate.environment(gpus, backing)
    import torch

    several = dict(os.environ)
    names = ["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"] if torch.version.hip else ["CUDA_VISIBLE_DEVICES"]
    visible = next(
        (several[name] for name in names if name in several), "0"
    )  # the first variable that is set takes effect
    return {**several, names[0]: visible.split(",")[0]}, several


def _count(gpus: int, parser: argparse.ArgumentParser) -> int:
    """Return the number of devices. Reject a number below that of ranks, because the ranks would fail.

    No device at all is accepted: the script may run on CPUs.

    Raises:
        SystemExit: by `parser`: there are too few devices.
    """
    import torch

    count = torch.cuda.device_count()  # creates no CUDA context, which would occupy memory of the first device
    if 0 < count < gpus:
        parser.error(
            f"--gpus={gpus}, but torch sees {count} GPU{'s' * (count > 1)} here; give a smaller number, or "
            "--simulate. For a script that uses no GPU, hide them: CUDA_VISIBLE_DEVICES= mgpu-check compare …"
        )
    return count


def _interrupted(number: int, frame: FrameType | None) -> None:
    for another in _ENDING:
        signal.signal(another, signal.SIG_IGN)  # a second signal must not interrupt the clean-up
    raise KeyboardInterrupt


def main(argv: Sequence[str]) -> int:
    """Compare the script of `argv` on one device and on ranks, and return the exit code: see ``--help``."""
    parser = _parser()
    try:
        own, program = simulate.split_program(argv, _TAKE_A_WORD)
        given = parser.parse_args(own)
        command = _script_command(program, parser)
        for world in (1, given.gpus):
            try:
                fitted(command, world)
            except ValueError as error:
                parser.error(str(error))
        count = given.gpus if given.simulate else _count(given.gpus, parser)
    except SystemExit as stop:
        return int(stop.code or 0)
    return _compare(given, program, command, count)


def _compare(given: argparse.Namespace, program: Sequence[str], command: Sequence[str], count: int) -> int:
    from mgpu_check.compare.comparison import ComparisonPlan, compare
    from mgpu_check.compare.page import write_page
    from mgpu_check.compare.result import write_json

    simulated = f"SIMULATED {given.simulate}" if given.simulate else ""
    single, several = _environments(given.gpus, given.simulate)
    plan = ComparisonPlan(
        command,
        shlex.join(program),
        given.gpus,
        single,
        several,
        simulated,
        given.timeout,
        given.steps,
        given.fresh_directory,
        without_gpus=not count,
        unjudged=dict(given.unjudged),
    )
    note = f"; {simulated} x{given.gpus}: proves code, never hardware" if simulated else ""
    print(f"mgpu-check compare: {plan.shown}: one device, and {given.gpus} ranks{note}", flush=True)
    kept = {number: signal.signal(number, _interrupted) for number in _ENDING}
    try:
        done = compare(plan, lambda line: print(f"  {line}", flush=True))
    except KeyboardInterrupt:
        print("mgpu-check compare: interrupted; all processes are ended", file=sys.stderr)
        return INTERRUPTED
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    print(f"\n{done.verdict.report}")
    if done.verdict.kind == "differs" and wanted(None):
        script = next((f"{word}:1" for word in command if word.endswith(".py")), "")
        report = done.verdict.report
        print(annotation(f"{plan.shown} differs on {given.gpus} ranks", str(report), report.site or script))
    if given.html:
        write_page(given.html, done)
    if given.json:
        write_json(given.json, done)
    if simulated:
        print(f"{done.verdict.kind}, on {given.gpus} {simulated} GPUs")
    return _CODES[done.verdict.kind]
