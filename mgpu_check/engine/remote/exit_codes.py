"""Turn the result of the run into the exit codes of many processes.

One process per host under torchrun, and the one of rank 0 elsewhere, exits with the code of the run; all others with 0,
so that a launcher reports one failure and not as many as there are ranks. To torchrun every failure is a reason to start
all processes again, as often as ``--max-restarts`` says: those then leave at once, with the code that they find where
torchrun wants errors described.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from mgpu_check.engine.remote.variables import LaunchedProcess

__all__ = ["leave", "of_earlier_attempt", "share_of"]

_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""…/attempt_0/2/error.json: of the first attempt, for local rank 2."""

_KEY = "mgpu_check_exit_code"


def share_of(code: int, launched: LaunchedProcess) -> int:
    """Return the exit code of the process `launched`, in a run that ends with `code`."""
    return code if _leads(launched) else 0


def _leads(launched: LaunchedProcess) -> bool:
    return launched.local_rank == 0 if launched.launcher == "torchrun" else launched.rank == 0


def leave(code: int, launched: LaunchedProcess, environment: Mapping[str, str]) -> None:
    """Tell torchrun, and the processes that it may start next, why this one exits with `code`."""
    name = environment.get(_VARIABLE)
    if name is None or not _leads(launched):
        return
    text = f"mgpu-check: pytest has ended with exit code {code}; its report stands in the output of rank 0"
    extra = {"py_callstack": text, "timestamp": str(int(time.time())), _KEY: code}
    try:
        Path(name).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
    except OSError:
        pass  # then torchrun says less


def of_earlier_attempt(environment: Mapping[str, str]) -> int | None:
    """Return the code with which this run has ended already, None if it has not."""
    name = environment.get(_VARIABLE)
    if name is None or len(Path(name).parents) < 3:
        return None
    for path in Path(name).parents[2].glob("attempt_*/*/error.json"):
        try:
            return int(json.loads(path.read_text())["message"]["extraInfo"][_KEY])
        except (OSError, ValueError, LookupError, TypeError):
            pass  # it says something else
    return None
