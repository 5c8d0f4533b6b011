"""``mgpu-check simulate --gpus=4 -- script.py --args``: run a program as if this machine had four GPUs.

The program runs in its own Python process. There, ``sitecustomize`` (see ``cli/startup``) enters the simulated
node when torch is first imported. Child processes inherit this through the environment, so the program may also be a
launcher, such as mpiexec. The results of a simulated run say nothing about hardware.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from mgpu_check.cli.codes import WRONG_USAGE, Parser, number
from mgpu_check.compare.fake_data import FakeData, plan_file
from mgpu_check.option_values import ARITHMETIC_VARIABLE, parse_arithmetic
from mgpu_check.processes.environments import simulating

_USAGE = (
    "mgpu-check simulate [--gpus=N] [--simulate[=cpu|cuda:I]] [--simulate-arithmetic=gpu] [--] script.py|PROGRAM "
    "[args...]\n       mgpu-check simulate [--gpus=N] [--simulate[=cpu|cuda:I]] [--] -m module [args...]"
)
_NOT_SIMULATED = (
    "mgpu-check simulate: nothing was simulated: no Python of the program imported torch on the simulated node. A "
    "Python is not simulated if it runs with -I, -E or -S, without the environment of its parent, or on another host"
)


def backing_device(text: str) -> str:
    """Return `text` if a device of this name can back simulated ones: "cpu" or "cuda:I". A type for `argparse`."""
    device_type, _, index = text.partition(":")
    if text == "cpu" or (device_type == "cuda" and index.isdecimal()):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not a backing device; give cpu, or cuda:I of a real GPU")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mgpu-check simulate",
        usage=_USAGE,
        description="Run a Python script, or a PROGRAM of the PATH such as torchrun, mpiexec or bash, and every "
        "Python that it starts, on a SIMULATED node with N GPUs.",
        epilog="The exit code is the program's own (128 + N if signal N has ended it), or 4 on wrong usage. "
        "A simulated run proves code, never hardware.",
        allow_abbrev=False,
    )
    text = "number of simulated GPUs (default: 2)"
    parser.add_argument("--gpus", type=number(1, "number of GPUs"), default=2, metavar="N", help=text)
    add_simulate(parser, default="cpu")
    add_fake_data(parser)
    return parser


def add_fake_data(parser: argparse.ArgumentParser) -> None:
    text = "make small random data, datasets and pretrained models in place of those that are missing; PLAN is a file "
    text += "that says what to make, and is written if it does not exist"
    parser.add_argument("--fake-data", nargs="?", const=Path(), type=plan_file, metavar="PLAN", help=text)


def add_simulate(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add ``--simulate[=DEVICE]``, with the syntax of the pytest option: without a device it means the CPU."""
    text = "simulate the GPUs in software, on the CPU (default) or on a real GPU; proves code, never hardware"
    options: dict[str, Any] = {"type": backing_device, "nargs": "?", "const": "cpu", "metavar": "DEVICE"}
    parser.add_argument("--simulate", default=default, help=text, **options)
    text = "how simulated GPUs compute: cpu (default), gpu, or kinds, such as order,ulp"
    parser.add_argument("--simulate-arithmetic", action=_Exported, metavar="gpu|KINDS", help=text)


class _Exported(argparse.Action):
    """Check the arithmetic, and leave it in the environment, where every Python of the program finds it."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        try:
            os.environ[ARITHMETIC_VARIABLE] = str(parse_arithmetic(values))
        except ValueError as error:
            parser.error(f"{option_string}: {error}")


def split_program(argv: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Split `argv` into options of the command and the program with its arguments.

    The program starts after ``--``, or at ``-m`` or the first word that is not an option, nor the value of one.
    """
    takes_a_word = {flag for action in parser._actions if action.nargs is None for flag in action.option_strings}
    position = 0
    while position < len(argv):
        word = argv[position]
        if word == "--":
            return list(argv[:position]), list(argv[position + 1 :])
        if word == "-m" or not word.startswith("-"):
            break
        position += 2 if word in takes_a_word else 1
    return list(argv[:position]), list(argv[position:])


def program_command(program: Sequence[str], parser: argparse.ArgumentParser, hint: str = "") -> list[str]:
    """Return the command that starts `program`: a script, ``-m`` and a module, or a program by its path or name.
    Scripts and modules run in a new Python process. The message has the `hint` if there is no such script."""
    if not program:
        parser.error("no program given; name a script, or a module with -m")
    if program[0] == "-m":
        if len(program) < 2:
            parser.error("-m needs the name of a module")
        return [sys.executable, *program]
    if program[0].startswith("-"):
        parser.error(f"unknown option {program[0]!r}; options of the program come after its name")
    path = Path(program[0])
    # The programs of this environment come first.
    search_path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if (path / "__main__.py").exists() if path.is_dir() else path.exists():
        # Keep the name as given, for `sys.argv`.
        command = [str(path.absolute())] if _runs_by_itself(path) else [sys.executable, program[0]]
    elif executable := shutil.which(program[0], path=search_path):
        command = [executable] if _runs_by_itself(Path(executable)) else [sys.executable, executable]
    else:
        parser.error(f"no such script: {program[0]}{hint}")
    return [*command, *program[1:]]


def _runs_by_itself(path: Path) -> bool:
    """Return whether a file is a binary, or a script of an interpreter other than Python."""
    if not path.is_file() or not os.access(path, os.X_OK):
        return False
    with path.open("rb") as file:
        head = file.readline(256)
    return head.startswith(b"\x7fELF") or (head.startswith(b"#!") and b"python" not in head)


def main(argv: list[str]) -> int:
    """Run the program of ``argv``, and return its exit code (128 + N if signal N ended it); 4 on wrong usage."""
    parser = _parser()
    own, program = split_program(argv, parser)
    options = parser.parse_args(own)
    hint = "; name a script, -m and a module, or a program of the PATH such as torchrun or mpiexec"
    command = program_command(program, parser, hint)
    notice = f"mgpu-check: SIMULATED node, {options.gpus} GPUs on {options.simulate}; this says nothing about hardware"
    print(notice, file=sys.stderr)
    fake = None if options.fake_data is None else FakeData(options.fake_data)
    with tempfile.TemporaryFile() as entered, fake or nullcontext():
        variables = simulating(os.environ, options.gpus, options.simulate) | (fake.variables if fake else {})
        # A path, because processes that inherit no file descriptors, such as those of mpiexec, must reach the file.
        variables["_MGPU_CHECK_ENTERED"] = f"/proc/{os.getpid()}/fd/{entered.fileno()}"
        try:
            code = _run(command, variables)
        except OSError as error:
            print(f"mgpu-check simulate: {command[0]} cannot be run: {error.strerror}", file=sys.stderr)
            return WRONG_USAGE
        if not os.fstat(entered.fileno()).st_size:
            print(_NOT_SIMULATED, file=sys.stderr)
        for line in fake.remarks(code != 0) if fake else ():
            print(f"mgpu-check: {line}", file=sys.stderr)
    return code if code >= 0 else 128 - code


def _run(command: Sequence[str], variables: Mapping[str, str]) -> int:
    with subprocess.Popen(command, env=variables) as child:
        # Ctrl-C reaches the whole foreground group. The program handles it, and this process waits for its end.
        kept = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return child.wait()
        finally:
            signal.signal(signal.SIGINT, kept)
