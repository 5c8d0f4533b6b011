"""``mgpu-check simulate --gpus=4 -- script.py --args``: run a program as if this machine had four GPUs.

The program runs in a Python of its own, in which ``sitecustomize`` (see :mod:`mgpu_check.startup`) enters the
simulated node when torch is first imported; the processes that it starts inherit that by the environment. Whatever is
printed or computed inside says nothing about hardware.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mgpu_check.cli.codes import Parser
from mgpu_check.processes.launched import simulating

__all__ = ["add_simulate", "environment", "main", "program_command", "split_program"]

_USAGE = (
    "mgpu-check simulate [--gpus=N] [--simulate[=cpu|cuda:I]] [--] script.py|torchrun [args...]\n"
    "       mgpu-check simulate [--gpus=N] [--simulate[=cpu|cuda:I]] [--] -m module [args...]"
)


def _gpus(text: str) -> int:
    try:
        n = int(text)
    except ValueError:
        n = 0
    if n < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GPUs; give an integer of at least 1")
    return n


def backing_device(text: str) -> str:
    """Return the real device that computes, "cpu" or "cuda:I", as `argparse` parses it.

    Raises:
        argparse.ArgumentTypeError: `text` is neither.
    """
    kind, _, index = text.partition(":")
    if text == "cpu" or (kind == "cuda" and index.isdecimal()):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is no backing device; give cpu, or cuda:I of a real GPU")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mgpu-check simulate",
        usage=_USAGE,
        description="Run a Python program, and the processes that it starts, on a SIMULATED node with N GPUs.",
        epilog="The exit code is the program's own (128 + N where signal N has ended it), or 4 on wrong usage. "
        "A simulated run proves code, never hardware.",
        allow_abbrev=False,
    )
    parser.add_argument("--gpus", type=_gpus, default=2, metavar="N", help="number of simulated GPUs (default: 2)")
    add_simulate(parser, default="cpu")
    return parser


def add_simulate(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add ``--simulate[=DEVICE]``, spelled and read as by pytest's plugin: without a device it is the CPU."""
    parser.add_argument(
        "--simulate",
        type=backing_device,
        nargs="?",
        const="cpu",
        default=default,
        metavar="DEVICE",
        help="make the GPUs in software, on the CPU (default) or on a real GPU; proves code, never hardware",
    )


def split_program(argv: Sequence[str], takes_a_word: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split our own options from the program and its arguments, which start after ``--``, or at ``-m`` or the first
    name.

    Args:
        takes_a_word: the options of ours whose value may be the next word.
    """
    position = 0
    while position < len(argv):
        word = argv[position]
        if word == "--":
            return list(argv[:position]), list(argv[position + 1 :])
        if word == "-m" or not word.startswith("-"):
            break
        position += 2 if word in takes_a_word else 1
    return list(argv[:position]), list(argv[position:])


def program_command(program: Sequence[str], parser: argparse.ArgumentParser, others: str | None = None) -> list[str]:
    """Return the command that starts `program`, a script or ``-m`` and a module, with its arguments, in a Python of its
    own.

    Args:
        others: what to say where there is neither such a script nor a program of that name which a package has installed,
            as ``torchrun``. None: such programs are not taken.

    Raises:
        SystemExit: by `parser`, with what is wrong: there is none, or no such script.
    """
    if not program:
        parser.error("no program given; name a script, or a module with -m")
    if program[0] == "-m":
        if len(program) < 2:
            parser.error("-m needs the name of a module")
    elif program[0].startswith("-"):
        parser.error(f"unknown option {program[0]!r}; options of the program come after its name")
    elif not Path(program[0]).exists():
        if others is not None and (found := _installed_program(program[0])):
            return [sys.executable, found, *program[1:]]
        parser.error(f"no such script: {program[0]}{others or ''}")
    return [sys.executable, *program]


def _installed_program(name: str) -> str | None:
    """Return the program of that name that an installed package has brought, as ``torchrun``; None where there is none
    in Python.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    found = shutil.which(name, path=path)
    if found is None:
        return None
    with open(found, "rb") as file:
        first = file.readline(256)
    return found if first.startswith(b"#!") and b"python" in first else None


def environment(gpus: int, backing: str) -> dict[str, str]:
    """Return this process's environment, with what makes a Python started in it simulate ``gpus`` GPUs on ``backing``."""
    return simulating(os.environ, gpus, backing)


def main(argv: list[str]) -> int:
    """Run the program named by ``argv``; returns its exit code (128 + N where signal N ended it), 4 on wrong usage."""
    parser = _parser()
    try:
        own, program = split_program(argv, ("--gpus",))
        given = parser.parse_args(own)
        command = program_command(program, parser, "; name a script, -m and a module, or a program such as torchrun")
    except SystemExit as stop:
        return int(stop.code or 0)
    notice = f"mgpu-check: SIMULATED node, {given.gpus} GPUs on {given.simulate}; this says nothing about hardware"
    print(notice, file=sys.stderr)
    with subprocess.Popen(command, env=environment(given.gpus, given.simulate)) as child:
        # Ctrl-C reaches the whole foreground group: the program decides what it means, we wait for its end.
        kept = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            code = child.wait()
        finally:
            signal.signal(signal.SIGINT, kept)
    return code if code >= 0 else 128 - code
