"""Defects of launchers, and of functions that a training script calls; planted in the launched processes."""

from __future__ import annotations

import contextlib
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, ProcessException, ProcessExitedException
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.utils.data import DistributedSampler

from mgpu_check.engine.rank_side.rank import current_rank
from mgpu_check.suite.common.faults.planting import around, communicating, counted, given, returned
from mgpu_check.suite.common.faults.registry import FaultRow, Planter, When, caught_by, register
from mgpu_check.suite.recipes import distributed_script
from mgpu_check.torch_hooks.patches import replaced

_LAUNCHER, _SCRIPT = "mgpu_check.suite.launch.launching", os.path.abspath(distributed_script.__file__)
_AGENT = "torch.distributed.elastic.multiprocessing.api"

_inner: dict[str, Callable[[], AbstractContextManager[None]]] = {}
"""Contexts that plant each fault in the launched process, by name of its function."""


def _launched(check: str) -> Callable[..., Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """Return the decorator of `caught_by`, for faults that are planted in the process that launches the ranks."""

    def register(summary: str, by: Planter, when: When | str = "") -> Callable[..., Any]:
        def registered(function: Callable[..., Any]) -> Callable[..., Any]:
            name = function.__name__
            _inner[name] = lambda: by(when.guards(function) if isinstance(when, When) else function)
            return caught_by(check)(summary, lambda function: _planted_in_launched(name), str(when))(function)

        return registered

    return register


@contextlib.contextmanager
def _planted_in_launched(name: str) -> Iterator[None]:
    run = subprocess.run

    def run_broken(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        for program in (_SCRIPT, _LAUNCHER):
            if program in command:
                rest = command[command.index(program) + 1 :]
                code = f"from {__name__} import begin; begin({name!r}, {program!r})"
                command = [sys.executable, "-c", code, *rest]
        return run(command, **options)

    with replaced(subprocess, "run", run_broken):
        yield


def begin(name: str, program: str) -> None:
    """Plant the defect in the launched process, and run `program` there."""
    with _inner[name]():
        if program == _SCRIPT:
            sys.argv[0] = _SCRIPT
            runpy.run_path(_SCRIPT, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__")


identity = caught_by("test_ranks_are_told_who_they_are")
torchrun = _launched("test_script_under_torchrun")
spawned = _launched("test_script_that_spawns_its_ranks")


@identity("the last rank has the LOCAL_RANK of the first", when="worlds of 3 ranks and more")
def local_rank_of_the_first() -> Iterator[None]:
    """Two ranks would share a GPU."""
    rank = current_rank()
    changed = {}
    if rank is not None and rank.index == rank.size - 1 and rank.size >= min(3, torch.cuda.device_count()):
        # A single rank is the first itself.
        changed = {"LOCAL_RANK": "0" if rank.index else "1"}
    with mock.patch.dict(os.environ, changed):
        yield


@torchrun("torchrun's agent sets LOCAL_WORLD_SIZE one too high", given(_AGENT, "_wrap"), "as many ranks as GPUs")
def agent_counts_one_too_many(local_rank: int, fn: Any, args: Any, envs: dict[int, dict[str, str]], *_: Any) -> None:
    """Numbers of threads and shares of the host derived from it are wrong."""
    envs[local_rank]["LOCAL_WORLD_SIZE"] = str(len(envs) + (len(envs) == torch.cuda.device_count()))


@torchrun("torchrun's agent sets the restart count of the last rank to 1", given(_AGENT, "_wrap"),
    "the last rank, at the first start")  # fmt: skip
def restart_that_was_none(local_rank: int, fn: Any, args: Any, envs: dict[int, dict[str, str]], *_: Any) -> None:
    """The rank resumes from a checkpoint that the others do not load."""
    if local_rank == len(envs) - 1:
        envs[local_rank]["TORCHELASTIC_RESTART_COUNT"] = "1"


@torchrun("ranks start from different parameters", around(distributed, "_sync_module_states"))
def parameters_as_they_began(sync: Any, *args: Any, **named: Any) -> None:
    """Gradients of different models are averaged."""


@torchrun("one step in seven is not synchronized", around(DistributedDataParallel, "forward"),
    counted("one step in seven", lambda count: count.every(7)))  # fmt: skip
def some_steps_alone(forward: Any, self: DistributedDataParallel, *inputs: Any, **named: Any) -> Any:
    """Ranks diverge and train different models."""
    with self.no_sync():
        return forward(self, *inputs, **named)


@torchrun("gradients are divided by 2 instead of the number of ranks", communicating(),
    When("worlds of 3 ranks and more", lambda *args: dist.get_world_size() >= 3))  # fmt: skip
def gradients_divided_by_two(buffer: torch.Tensor, *_: Any) -> torch.Tensor:
    """As in an example for two GPUs. The model learns, but with a wrong effective rate."""
    return buffer * (dist.get_world_size() / 2)


@torchrun("every second rank loads the samples of the previous rank", returned(DistributedSampler, "__init__"),
    "ranks with odd numbers")  # fmt: skip
def samples_of_the_neighbour(result: None, self: Any, *args: Any, **named: Any) -> None:
    """Half of the dataset is never seen; parameters and losses agree on all ranks."""
    self.rank = self.rank // 2 * 2


@torchrun("the optimizer stops after three steps", around(torch.optim.SGD, "step"),
    counted("steps after the third", lambda count: count.later(3)))  # fmt: skip
def optimizer_stops(step: Any, *args: Any, **named: Any) -> None:
    """All ranks agree, but learn nothing."""


@spawned("torch.cuda.device_count is one too low in a script that spawns ranks", returned(torch.cuda, "device_count"),
    "the process that spawns the others only")  # fmt: skip
def spawns_one_rank_fewer(count: int) -> int:
    """The last GPU is idle."""
    return count - 1 or 2


@torchrun("torch.multiprocessing reports failures of the first process only", around(ProcessContext, "join"),
    "a process other than the first")  # fmt: skip
def later_failures_kept_quiet(join: Any, *args: Any, **named: Any) -> Any:
    """Training seems to end normally."""
    try:
        return join(*args, **named)
    except ProcessException as error:
        if error.error_index == 0:
            raise
        return True


@torchrun("torch.multiprocessing reports a killed process as a normal exit code",
    around(ProcessExitedException, "__init__"), "processes killed by a signal")  # fmt: skip
def signals_told_as_exits(init: Any, self: Any, *args: Any, signal_name: str | None = None, **named: Any) -> None:
    """The report hides the signal, for example of the kernel's out-of-memory killer."""
    init(self, *args, **named)


register(
    __name__,
    FaultRow("few-samples-not-repeated", "a data set smaller than half of the replicas is repeated once too seldom",
        "test_samples_of_replicas", returned(DistributedSampler, "__iter__"),
        lambda samples, self: iter([*samples][: int(self.rank < 2 * len(self.dataset))]),
        When("replicas more than twice the samples", lambda _, self: self.num_replicas > 2 * len(self.dataset))),
)  # fmt: skip
