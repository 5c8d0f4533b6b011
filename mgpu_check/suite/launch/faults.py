"""Defects of launchers, and of functions that a training script calls; planted in the launched processes."""

from __future__ import annotations

import contextlib
import functools
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, ProcessException, ProcessExitedException
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.utils.data import DistributedSampler

from mgpu_check.engine.rank_side.rank import current_rank
from mgpu_check.suite.common.faults.breaking import communicated, replaced_method
from mgpu_check.suite.common.faults.conditions import Count
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.suite.recipes import distributed_script
from mgpu_check.torch_hooks.patches import replaced

_LAUNCHER, _SCRIPT = "mgpu_check.suite.launch.launching", os.path.abspath(distributed_script.__file__)

Plant = Callable[[], Iterator[None]]

_inner: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {}
"""Contexts that plant each fault in the launched process, by name of the fault."""


def _within(plant: Plant) -> Plant:
    """Plant a defect in the process that launches the ranks, instead of in this process."""
    _inner[plant.__name__] = contextlib.contextmanager(plant)

    @functools.wraps(plant)
    def outside() -> Iterator[None]:
        run = subprocess.run

        def run_broken(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
            for program in (_SCRIPT, _LAUNCHER):
                if program in command:
                    rest = command[command.index(program) + 1 :]
                    code = f"from {__name__} import begin; begin({plant.__name__!r}, {program!r})"
                    command = [sys.executable, "-c", code, *rest]
            return run(command, **options)

        with replaced(subprocess, "run", run_broken):
            yield

    return outside


def begin(name: str, program: str) -> None:
    """Plant the defect in the launched process, and run `program` there."""
    with _inner[name]():
        if program == _SCRIPT:
            sys.argv[0] = _SCRIPT
            runpy.run_path(_SCRIPT, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__")


@fault(
    "the last rank has the LOCAL_RANK of the first",
    "test_ranks_are_told_who_they_are",
    condition="worlds of 3 ranks and more",
)
def local_rank_of_the_first() -> Iterator[None]:
    """Two ranks would share a GPU."""
    rank = current_rank()
    before = os.environ.get("LOCAL_RANK", "")
    if rank is not None and rank.index == rank.size - 1 and rank.size >= min(3, torch.cuda.device_count()):
        # A single rank is the first itself.
        os.environ["LOCAL_RANK"] = "0" if rank.index else "1"
    try:
        yield
    finally:
        os.environ["LOCAL_RANK"] = before


@fault(
    "torchrun's agent sets LOCAL_WORLD_SIZE one too high",
    "test_script_under_torchrun",
    condition="as many ranks as GPUs",
)
@_within
def agent_counts_one_too_many() -> Iterator[None]:
    """Numbers of threads and shares of the host derived from it are wrong."""
    from torch.distributed.elastic.multiprocessing import api

    def told(wrap: Any, local_rank: int, fn: Any, args: Any, envs: dict[int, dict[str, str]], *rest: Any) -> None:
        envs[local_rank]["LOCAL_WORLD_SIZE"] = str(len(envs) + (len(envs) == torch.cuda.device_count()))
        wrap(local_rank, fn, args, envs, *rest)

    with replaced_method(api, "_wrap", told):
        yield


@fault(
    "torchrun's agent sets the restart count of the last rank to 1",
    "test_script_under_torchrun",
    condition="the last rank, at the first start",
)
@_within
def restart_that_was_none() -> Iterator[None]:
    """The rank resumes from a checkpoint that the others do not load."""
    from torch.distributed.elastic.multiprocessing import api

    def told(wrap: Any, local_rank: int, fn: Any, args: Any, envs: dict[int, dict[str, str]], *rest: Any) -> None:
        if local_rank == len(envs) - 1:
            envs[local_rank]["TORCHELASTIC_RESTART_COUNT"] = "1"
        wrap(local_rank, fn, args, envs, *rest)

    with replaced_method(api, "_wrap", told):
        yield


@fault("ranks start from different parameters", "test_script_under_torchrun")
@_within
def parameters_as_they_began() -> Iterator[None]:
    """Gradients of different models are averaged."""
    with replaced(distributed, "_sync_module_states", lambda *args, **named: None):
        yield


@fault("one step in seven is not synchronized", "test_script_under_torchrun", condition="one step in seven")
@_within
def some_steps_alone() -> Iterator[None]:
    """Ranks diverge and train different models."""
    count = Count()

    def alone(forward: Any, self: Any, *inputs: Any, **named: Any) -> Any:
        with self.no_sync() if count.every(7) else contextlib.nullcontext():
            return forward(self, *inputs, **named)

    with replaced_method(DistributedDataParallel, "forward", alone):
        yield


@fault(
    "gradients are divided by 2 instead of the number of ranks",
    "test_script_under_torchrun",
    condition="worlds of 3 ranks and more",
)
@_within
def gradients_divided_by_two() -> Iterator[None]:
    """As in an example for two GPUs. The model learns, but with a wrong effective rate."""

    def halved(buffer: torch.Tensor, bucket: Any, model: DistributedDataParallel) -> torch.Tensor:
        size = dist.get_world_size()
        return buffer * (size / 2) if size >= 3 else buffer

    with communicated(halved):
        yield


@fault(
    "every second rank loads the samples of the previous rank",
    "test_script_under_torchrun",
    condition="ranks with odd numbers",
)
@_within
def samples_of_the_neighbour() -> Iterator[None]:
    """Half of the dataset is never seen; parameters and losses agree on all ranks."""

    def everything(init: Any, self: Any, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        self.rank = self.rank // 2 * 2

    with replaced_method(DistributedSampler, "__init__", everything):
        yield


@fault("the optimizer stops after three steps", "test_script_under_torchrun", condition="steps after the third")
@_within
def optimizer_stops() -> Iterator[None]:
    """All ranks agree, but learn nothing."""
    count = Count()

    def few(step: Any, *args: Any, **named: Any) -> Any:
        return None if count.later(3) else step(*args, **named)

    with replaced_method(torch.optim.SGD, "step", few):
        yield


@fault(
    "torch.cuda.device_count is one too low in a script that spawns ranks",
    "test_script_that_spawns_its_ranks",
    condition="the process that spawns the others only",
)
@_within
def spawns_one_rank_fewer() -> Iterator[None]:
    """The last GPU is idle."""
    count = torch.cuda.device_count
    with replaced(torch.cuda, "device_count", lambda: count() - 1 or 2):
        yield


@fault(
    "torch.multiprocessing reports failures of the first process only",
    "test_script_under_torchrun",
    condition="a process other than the first",
)
@_within
def later_failures_kept_quiet() -> Iterator[None]:
    """Training seems to end normally."""

    def join(real: Any, self: Any, *args: Any, **named: Any) -> Any:
        try:
            return real(self, *args, **named)
        except ProcessException as error:
            if error.error_index == 0:
                raise
            return True

    with replaced_method(ProcessContext, "join", join):
        yield


@fault(
    "torch.multiprocessing reports a killed process as a normal exit code",
    "test_script_under_torchrun",
    condition="processes killed by a signal",
)
@_within
def signals_told_as_exits() -> Iterator[None]:
    """The report hides the signal, for example of the kernel's out-of-memory killer."""

    def init(real: Any, self: Any, *args: Any, signal_name: str | None = None, **named: Any) -> None:
        real(self, *args, **named)

    with replaced_method(ProcessExitedException, "__init__", init):
        yield
