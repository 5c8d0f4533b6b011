"""The `mgpu-check` command."""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import traceback
from collections.abc import Sequence

from mgpu_check.cli import launcher
from mgpu_check.cli.codes import INTERNAL_ERROR, WRONG_USAGE
from mgpu_check.version import __version__, without_torch

_COMMANDS = {
    "accept": "accept or reject this node, and name the GPU or the link: accept --gpus=8 --report=node.html",
    "compare": "run a training script on one device and on ranks: compare --gpus=4 -- train.py --args",
    "devices": "list the GPUs that torch sees here",
    "doctor": "say whether ranks can run on this machine, and what to change",
    "init": "write a first test for the training script of this directory, and run it",
    "model": "train a model in each kind of parallelism, and on one device: model transformers:Qwen3ForCausalLM",
    "pytest": "run pytest with these arguments; under torchrun or srun on all the ranks that they launch",
    "record": "write the trace of a run, to compare with: record --gpus=4 --out=a.trace -- train.py --args",
    "selftest": "plant every known fault and show which checks catch it; --quick: 1/15 of them",
    "simulate": "run a script as if this machine had GPUs: simulate --gpus=4 -- script.py --args",
}

_OF_ONE_PROCESS = ("compare", "devices", "doctor", "init", "record", "simulate")
"""They do the same in every process that a launcher launches."""

_HELP = f"""\
usage: mgpu-check [--gpus=N|all] [--simulate[=cpu|cuda:I]] [--gpu-level=quick|standard|long] [--rank-timeout=SECONDS]
                  [--strict-gpus] [pytest arguments] [FILE[::CHECK] ...]
       mgpu-check COMMAND ...

Runs the packaged suite of multi-GPU checks; --simulate makes the GPUs in software, which proves code, never hardware.
--gpu-level: quick (default) takes about a minute; standard draws four times as many examples, long forty times.
Without --gpus it takes all visible GPUs. Every argument of pytest works: -k NAME, -x, -n 2, --junitxml=FILE, ...
A FILE of the suite, such as test_scatter.py, or a CHECK in it, runs that only.

commands:
{chr(10).join(f"  {name:<10}{text}" for name, text in _COMMANDS.items())}

exit codes:
  0 right   1 wrong   2 undecided: not comparable, or interrupted   3 internal error   4 wrong usage
  5 no test was run   130 interrupted; of simulate: the program's own

examples:
  mgpu-check --gpus=4 --simulate        on any machine: is the code right?
  mgpu-check --gpus=8 --gpu-level=standard
                                        on a node with 8 GPUs: are code and hardware right?
  mgpu-check accept --gpus=8            may this node join the fleet, and if not, which part goes back?
  mgpu-check --gpus=8 -k allreduce -x   one property, up to the first failure
  torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT -m mgpu_check --gpus=16
                                        on two nodes with 8 GPUs each
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, default that of this process; its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else ""
    if command in ("-h", "--help"):
        print(_HELP, end="")
        return 0
    if command == "--version":
        print(f"mgpu-check {__version__}")
        return 0
    if command in _COMMANDS:
        if command in _OF_ONE_PROCESS:
            return _command(command, arguments[1:])
        return launcher.run(arguments, lambda: _command(command, arguments[1:]))
    from mgpu_check.cli import suite

    if command and not command.startswith("-") and not suite.names_a_check(command):
        print(
            f"mgpu-check: {command!r} is no command; choose one of {', '.join(_COMMANDS)}, or give options only to run "
            f"the packaged suite, or one of its files: {', '.join(suite.files())}. To run tests of your own, use "
            "pytest: pytest --gpus=4 " + command,
            file=sys.stderr,
        )
        return WRONG_USAGE
    return launcher.run(arguments, lambda: suite.main(arguments))


def _command(name: str, arguments: Sequence[str]) -> int:
    try:
        if name == "pytest":
            import pytest

            return int(pytest.main(list(arguments)))
        return int(importlib.import_module(f"mgpu_check.cli.{name}").main(arguments))
    except SystemExit as stop:  # of an argument parser
        return int(stop.code or 0)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_has_left():
            return 128 + signal.SIGPIPE
        if isinstance(error, ModuleNotFoundError) and (missing := without_torch()):
            print(f"mgpu-check {name}: {missing}", file=sys.stderr)
            return WRONG_USAGE
        # Python would exit with 1, which says that what was looked at is wrong.
        traceback.print_exc()
        print(
            f"mgpu-check {name}: internal error, so there is no verdict; please report the traceback above",
            file=sys.stderr,
        )
        return INTERNAL_ERROR


def _reader_has_left() -> bool:
    """Return whether the reader of the standard output has ended, as after ``| head``; discard what comes, then."""
    poll = select.poll()
    poll.register(1, 0)
    if any(event & select.POLLERR for _, event in poll.poll(0)):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
