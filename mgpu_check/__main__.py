"""The `mgpu-check` command."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from mgpu_check.version import __version__

__all__ = ["main"]

_COMMANDS = {
    "devices": "list the GPUs that torch sees here",
    "selftest": "plant every known fault and show which check catches it",
    "simulate": "run a script as if this machine had GPUs: simulate --gpus=4 -- script.py --args",
}

_HELP = f"""\
usage: mgpu-check [--gpus=N|all] [--simulate[=cpu|cuda:I]] [--rank-timeout=SECONDS] [--strict-gpus] [pytest arguments]
       mgpu-check COMMAND ...

Runs the packaged suite of multi-GPU checks; --simulate makes the GPUs in software, which proves code, never hardware.
Without --gpus it takes all visible GPUs. Every argument of pytest works: -k NAME, -x, -n 2, --junitxml=FILE, ...

commands:
{chr(10).join(f"  {name:<10}{text}" for name, text in _COMMANDS.items())}

examples:
  mgpu-check --gpus=4 --simulate        on any machine: is the code right?
  mgpu-check --gpus=8                   on a node with 8 GPUs: are code and hardware right?
  mgpu-check --gpus=8 -k allreduce -x   one property, up to the first failure
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, default that of this process; its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    first = arguments[0] if arguments else ""
    if first in ("-h", "--help"):
        print(_HELP, end="")
        return 0
    if first == "--version":
        print(f"mgpu-check {__version__}")
        return 0
    if first in _COMMANDS:
        command = importlib.import_module(f"mgpu_check.command.{first}")
        return int(command.main(arguments[1:]))
    if first and not first.startswith("-"):
        print(
            f"mgpu-check: {first!r} is no command; choose one of {', '.join(_COMMANDS)}, or give options only to run "
            "the packaged suite. To run tests of your own, use pytest: pytest --gpus=4 " + first,
            file=sys.stderr,
        )
        return 4
    from mgpu_check.command import suite

    return suite.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
