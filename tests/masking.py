"""Cases of processes that set `CUDA_VISIBLE_DEVICES` themselves, before or after they use CUDA, on four
devices.

Run as a program, this file prints what torch does here, as JSON. The simulated node must do the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

VARIABLE = "CUDA_VISIBLE_DEVICES"

# Code -> what it notes. `mask` sets the variable, `which(i)` is cuda:i as a device of the machine, `uuids` is of all
# devices, `error(call)` the last word of what it raises.
CASES: dict[str, list[object]] = {
    "note(count(), which(0), which(3))": [4, 0, 3],
    "mask('2,1'); note(count(), which(0), which(1), count())": [2, 2, 1, 2],
    "note(count()); mask('1'); note(count(), which(0))": [4, 1, 1],
    "torch.cuda.init(); mask('1'); note(count(), which(0))": [4, 0],
    "torch.cuda.set_device(1); mask('1'); note(count(), which(0))": [4, 0],
    "torch.cuda.current_device(); mask('1'); note(which(0))": [0],
    # The driver reads the variable when it is first asked. Until CUDA is used, it is NVML that counts.
    "torch.cuda.is_available(); mask('1'); note(torch.cuda.is_initialized(), count(), which(0), count())": [False, 1, 0, 4],
    "torch.accelerator.is_available(); mask('1'); note(which(0))": [0],
    "os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] = '1'; note(torch.cuda.is_available()); mask('1'); note(which(0))": [True, 1],
    "torch.manual_seed(1); torch.cuda.manual_seed_all(2); torch.cuda.manual_seed(3); mask('3'); note(which(0))": [3],
    "torch.cuda.memory_allocated(); torch.cuda.empty_cache(); torch.ones(2).sum().item(); mask('3'); note(which(0))": [3],
    "mask(''); note(count(), torch.cuda.is_available(), error(torch.cuda.init))": [0, False, "available"],
    "mask('1'); note(error(lambda: torch.empty(1, device='cuda:1')), error(lambda: torch.cuda.set_device(1)))": ["ordinal"] * 2,
    "mask(f'{uuids[3]},{uuids[0]}'); note(count(), which(0), which(1))": [2, 3, 0],
    "mask('2,9,0'); note(count(), which(0))": [1, 2],
    "mask('2,-1,0'); note(count(), which(0))": [1, 2],
    "mask('1,1'); note(count(), error(torch.cuda.init))": [0, "available"],
    "torch.cuda.is_available(); note(*forked('note(torch.cuda._is_in_bad_fork(), error(torch.cuda.init))'))": [True, "method"],
    "count(); note(*forked('mask(str(2)); note(torch.cuda._is_in_bad_fork(), which(0))')); mask('1'); note(which(0))": [False, 2, 1],
}  # fmt: skip

Enter = Callable[[], AbstractContextManager[None]]


def answers(enter: Enter = contextlib.nullcontext) -> dict[str, object]:
    """Return the notes of each case, run in a process of its own, within the context that `enter` makes."""
    import torch  # noqa: F401  # here, and not in each of the processes: it takes seconds

    return {code: in_child(code, enter) for code in CASES}


def in_child(code: str, enter: Enter) -> object:
    """Return the notes of `code`, run in a fork of this process; the text of the error, if there is one."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            told: object = noted(code, enter)
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writing, json.dumps(told).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text)


def noted(code: str, enter: Enter) -> list[object]:
    import torch

    found: list[object] = []

    def which(index: int) -> int:
        return uuids.index(f"GPU-{torch.cuda.get_device_properties(index).uuid}")

    def error(call: Callable[[], object]) -> str:
        try:
            return f"none, but {call()}"
        except RuntimeError as raised:
            return str(raised).splitlines()[0].split()[-1]

    with enter():
        uuids = torch.cuda._raw_device_uuid_nvml()  # of the machine, whatever is visible
        names = {
            "count": torch.cuda.device_count,
            "error": error,
            "forked": lambda code: in_child(code, contextlib.nullcontext),
            "mask": lambda value: os.environ.__setitem__(VARIABLE, value),
            "note": lambda *values: found.extend(values),
            "os": os,
            "torch": torch,
            "uuids": uuids,
            "which": which,
        }
        exec(code, names)
    return found


if __name__ == "__main__":
    os.environ.pop(VARIABLE, None)
    json.dump(answers(), sys.stdout)
