"""`mgpu-check` as one of many processes that a launcher has launched: torchrun, srun, or who sets the classic variables.

Each process is an agent, which has ranks as its children. That of rank 0 starts the driver, one more process, which runs
the command line as it would run on one machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from mgpu_check.command.codes import WRONG_USAGE
from mgpu_check.ranks.agents.variables import place_of
from mgpu_check.session import PRELOAD
from mgpu_check.settings import OPTIONS

__all__ = ["run"]


def run(arguments: Sequence[str], command: Callable[[], int]) -> int:
    """Do the part of this process in `command`, which `arguments` stand for; the exit code.

    That is all of it, where the process was not launched with others.
    """
    from mgpu_check.ranks.agents.driver import is_driver, take_over

    if is_driver():
        with take_over() as driver:
            driver.exit_code = command()
            sys.stdout.flush()
        return driver.exit_code
    try:
        place = place_of(os.environ)
    except ValueError as error:
        print(f"mgpu-check: {error}", file=sys.stderr)
        return WRONG_USAGE
    if place is None:
        return command()
    from mgpu_check.ranks.agents import agent

    simulated = any(argument.startswith("--simulate") for argument in arguments)
    return agent.main(place, arguments, PRELOAD, simulated or OPTIONS["simulate"].variable in os.environ)
