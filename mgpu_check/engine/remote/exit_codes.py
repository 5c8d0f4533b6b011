"""Turn the result of the run into the exit codes of its processes.

Under torchrun one process per host exits with the code of the run; elsewhere only rank 0 does. All other processes exit
with 0, so that a launcher reports one failure and not one per rank.

torchrun restarts all processes after a failure, up to ``--max-restarts`` times. A restarted process finds the exit code
in torchrun's error file, and exits at once with it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from mgpu_check.engine.remote.variables import LaunchedProcess

_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""…/attempt_0/2/error.json: of the first attempt, for local rank 2."""

_KEY = "mgpu_check_exit_code"


def share_of(code: int, launched: LaunchedProcess) -> int:
    """Return the exit code of the process `launched`, in a run that ends with `code`."""
    return code if _leads(launched) else 0


def _leads(launched: LaunchedProcess) -> bool:
    return launched.local_rank == 0 if launched.launcher == "torchrun" else launched.rank == 0


def leave(code: int, launched: LaunchedProcess, environment: Mapping[str, str]) -> None:
    """Write the exit code to torchrun's error file, for torchrun's report and for restarted processes."""
    name = environment.get(_VARIABLE)
    if name is None or not _leads(launched):
        return
    text = f"mgpu-check: pytest has ended with exit code {code}; its report is in the output of rank 0"
    extra = {"py_callstack": text, "timestamp": str(int(time.time())), _KEY: code}
    try:
        Path(name).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
    except OSError:
        pass  # torchrun then reports the exit code only


def of_earlier_attempt(environment: Mapping[str, str]) -> int | None:
    """Return the exit code of an earlier attempt of this run, None if no attempt has ended."""
    name = environment.get(_VARIABLE)
    if name is None or len(Path(name).parents) < 3:
        return None
    for path in Path(name).parents[2].glob("attempt_*/*/error.json"):
        try:
            return int(json.loads(path.read_text())["message"]["extraInfo"][_KEY])
        except (OSError, ValueError, LookupError, TypeError):
            pass  # another program's error file
    return None
