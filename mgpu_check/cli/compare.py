"""``mgpu-check compare --gpus=4 -- train.py --args``: does a training script do on four ranks what it does on one device?"""

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
In the arguments of the script, {…} with W in it is replaced by its value, where W is the number of processes of the run:
--batch-size={64/W}, --lr={0.1*W}.

exit codes: 0 equal; 1 it differs, or fails or hangs on the ranks; 2 not comparable: the ranks were given other samples or
other parameters, the script is not repeatable, makes no optimizer step, or gives no finite numbers from the first step on;
or undecided: nothing differs, but a trained parameter was not compared;
3 internal error of mgpu-check, which says nothing of the script; 4 wrong usage; 130 interrupted.
What a script must do to be comparable: https://github.com/mgpu-check/mgpu-check/blob/main/docs/how-to/compare.md.
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
            raise argparse.ArgumentTypeError(f"{text!r} is no {what}; give an integer of at least {least}")
        return n

    return parse  # type: ignore[return-value]  # what argparse takes for a type


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give a number of seconds above 0")
    return value


def _accepted(text: str) -> tuple[str, str]:
    try:
        return accepted(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _writable(text: str) -> Path:
    path = Path(text)
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
        description="Run a training script as it is on one device and on N ranks, and name the first optimizer step and "
        "parameter that part ways.",
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
        help="end a run in which no rank gets further for so long (default: 300)",
    )
    add(
        "--fresh-directory",
        action="store_true",
        help="begin each run in a copy of the current directory, in which what other runs write is not there",
    )
    add(
        "--unjudged",
        type=_accepted,
        action="append",
        default=[],
        metavar="PATTERN=REASON",
        help="parameters that need not be compared, and why not; the report repeats it (may be given several times)",
    )
    add(
        "--html",
        type=_page,
        metavar="FILE",
        help=f"write a page with the curves of loss and deviation; it takes {pages.INSTALL}",
    )
    add("--json", type=_writable, metavar="FILE", help="write the verdict, and what was compared, for programs")
    return parser


def _script_command(program: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the command of a script, which may begin with the Python that is to run it.

    Raises:
        SystemExit: by `parser`, where it is a launcher, or another program than a Python: each rank is the script itself.
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
            f"{program[0]} is a program, and compare records Python scripts: give the script that it starts, with the "
            "script's arguments"
        )
    return command


def _environments(gpus: int, backing: str | None) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return the environments of the run on one device, and of the ranks."""
    if backing is not None:
        return simulate.environment(1, backing), simulate.environment(gpus, backing)
    import torch

    several = dict(os.environ)
    names = ["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"] if torch.version.hip else ["CUDA_VISIBLE_DEVICES"]
    visible = next((several[name] for name in names if name in several), "0")  # the first that is set counts
    return {**several, names[0]: visible.split(",")[0]}, several


def _count(gpus: int, parser: argparse.ArgumentParser) -> int:
    """Count the devices, and refuse fewer than ranks: the ranks would fail for no fault of the script.

    Without any device the script may be one for CPUs.

    Raises:
        SystemExit: by `parser`.
    """
    import torch

    count = torch.cuda.device_count()  # it makes no context here, which would take memory of the first device
    if 0 < count < gpus:
        parser.error(
            f"--gpus={gpus}, but torch sees {count} GPU{'s' * (count > 1)} here; give a smaller number, or --simulate. For a "
            "script that uses no GPU, hide them: CUDA_VISIBLE_DEVICES= mgpu-check compare …"
        )
    return count


def _interrupted(number: int, frame: FrameType | None) -> None:
    for another in _ENDING:
        signal.signal(another, signal.SIG_IGN)  # the end of the processes is not to be interrupted
    raise KeyboardInterrupt


def main(argv: Sequence[str]) -> int:
    """Compare what the script of `argv` does on one device and on ranks; the exit code, see ``--help``."""
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
    from mgpu_check.compare.comparison import Plan, compare
    from mgpu_check.compare.page import write_page
    from mgpu_check.compare.result import write_json

    simulated = f"SIMULATED {given.simulate}" if given.simulate else ""
    single, several = _environments(given.gpus, given.simulate)
    plan = Plan(
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
    if given.html:
        write_page(given.html, done)
    if given.json:
        write_json(given.json, done)
    if simulated:
        print(f"{done.verdict.kind}, on {given.gpus} {simulated} GPUs")
    return _CODES[done.verdict.kind]
