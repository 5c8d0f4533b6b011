"""Keep, in the script's process, what a trace file has besides the trace: the environment, and values of tensors.

The command writes a request as the first line of a file, and the process appends to the file: for each tensor a line of
JSON, followed by the elements.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from mgpu_check.compare.parameters import NumberedPart, Parameters, parameters_of
from mgpu_check.compare.script_calls import Note
from mgpu_check.compare.summaries import whole
from mgpu_check.compare.trace import write_all
from mgpu_check.torch_hooks.tensors import copied, is_distributed, memory_of, name_of

_VARIABLES = ("CUBLAS_", "CUDNN_", "MKL_", "NCCL_", "NVIDIA_TF32", "OMP_", "PYTORCH_", "TORCH_")
"""Prefixes of environment variables that may change results."""


class KeptSource(Protocol):
    """The recorder of this process."""

    known: Parameters
    done: int

    @property
    def note(self) -> Note:
        """Record an event."""

    def is_stepping(self, optimizer: Any) -> bool:
        """Return whether the current step is that of `optimizer`, and its gradients are recorded."""

    def number_of(self, optimizer: Any) -> int:
        """Return the number of an optimizer."""


def install(recorder: KeptSource, fd: int) -> None:
    """Keep what the request in the file `fd` asks for.

    The request has "bytes", the most bytes of values that this process keeps, and "root", a directory: modules that are
    imported from it are recorded.
    """
    request = json.loads(os.pread(fd, os.fstat(fd).st_size, 0).partition(b"\n")[0])
    os.lseek(fd, 0, os.SEEK_END)
    keeper = _Keeper(recorder, fd, request["bytes"], request["root"], first=os.environ["RANK"] == "0")
    register_optimizer_step_post_hook(keeper.after_step)


class _Keeper:
    def __init__(self, recorder: KeptSource, fd: int, budget: int, root: str, first: bool) -> None:
        self._recorder, self._fd, self._left, self._root, self._first = recorder, fd, budget, root, first
        self._plans: dict[int, tuple[int, set[int]]] = {}
        self._placed: set[str] = set()

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder = self._recorder
        if not recorder.is_stepping(optimizer):
            return
        if not recorder.done:
            recorder.note("environment", **_environment())
            recorder.note("imported", files=sorted(_imported(self._root)))
        number = recorder.number_of(optimizer)
        if number not in self._plans:
            self._plans[number] = self._plan(optimizer)
        steps, some = self._plans[number]
        if not steps:
            return
        self._plans[number] = steps - 1, some
        with torch.no_grad():
            for one in recorder.known.parts(optimizer, number):
                if id(one.parameter) in some:
                    self._keep(one, "gradient", one.parameter.grad)
                    self._keep(one, "parameter", one.parameter)

    def _plan(self, optimizer: Any) -> tuple[int, set[int]]:
        """Return the number of steps whose values are kept, and the ids of the parameters.

        A DTensor is gathered by all of its ranks, so the plan depends only on sizes that they share.
        """
        parameters = parameters_of(optimizer)
        sharded = [parameter for parameter in parameters if is_distributed(parameter)]
        counted = sharded or parameters
        size = 2 * sum(parameter.numel() * parameter.element_size() for parameter in counted)
        if (steps := self._left // max(size, 1)) > 0:
            self._left -= steps * size
            return steps, set(map(id, parameters))
        some = set()
        for parameter in counted:
            self._left -= 2 * parameter.numel() * parameter.element_size()
            if self._left < 0:
                break
            some.add(id(parameter))
        self._left = 0
        return 1, some

    def _keep(self, one: NumberedPart, kind: str, tensor: torch.Tensor | None) -> None:
        if tensor is None or tensor.is_complex() or tensor.layout is not torch.strided:
            return
        cut = one.part.cut
        sharded, value = is_distributed(tensor), whole(tensor)
        if value is None or (not self._first and (cut is None or sharded)):
            return  # rank 0 has the same values
        here = copied(value)
        head = {"step": self._recorder.done + 1, "kind": kind, "name": one.part.label, "dtype": name_of(here.dtype)}
        if cut is None:
            self._write(head | {"shape": list(here.shape)}, here)
            return
        part, again = cut.part, cut.part.whole in self._placed
        self._placed.add(part.whole)
        at = [] if again or part.at is None else [part.at.to(torch.int64).contiguous()]
        head |= {"name": part.whole, "shape": list(part.shape)}
        self._write(head, part.of(here).contiguous(), *at)

    def _write(self, head: Mapping[str, object], *parts: torch.Tensor) -> None:
        line = json.dumps({**head, "bytes": [part.numel() * part.element_size() for part in parts]}).encode() + b"\n"
        write_all(self._fd, line, *(memoryview(memory_of(part)).cast("B") for part in parts))


def _environment() -> dict[str, object]:
    """Return the facts that may change the results of a script."""
    cuda = torch.cuda.is_available()
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "processor": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "default dtype": name_of(torch.get_default_dtype()),
        "float32 precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn benchmark": torch.backends.cudnn.benchmark,
        **{name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
    }


def _imported(root: str) -> Iterator[str]:
    """Yield the files below `root` that this process has imported."""
    for module in list(sys.modules.values()) if root else []:
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and (path := os.path.realpath(file)).startswith(root + os.sep):
            yield path
