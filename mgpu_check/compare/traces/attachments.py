"""Keep, in the script's process, what a trace file has besides the trace: the environment, and values of tensors.

The command writes a request as the first line of a file, and the process appends to the file: for each tensor a line of
JSON, followed by the elements.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from mgpu_check.compare.in_script.parameters import NumberedPart, parameters_of
from mgpu_check.compare.in_script.summaries import whole
from mgpu_check.compare.trace import write_all
from mgpu_check.torch_hooks.tensors import copied, is_distributed, memory_of, name_of

if TYPE_CHECKING:
    from mgpu_check.compare.in_script.recorder import ScriptRecorder

_VARIABLES = ("CUBLAS_", "CUDNN_", "MKL_", "NCCL_", "NVIDIA_TF32", "OMP_", "PYTORCH_", "TORCH_")
"""Prefixes of environment variables that may change results."""


def install(recorder: ScriptRecorder, fd: int) -> None:
    """Keep what the request in the file `fd` asks for.
    The request has "bytes", the most bytes of values that this process keeps, and "root", a directory: modules that are
    imported from it are recorded."""
    request = json.loads(os.pread(fd, os.fstat(fd).st_size, 0).partition(b"\n")[0])
    os.lseek(fd, 0, os.SEEK_END)
    keeper = _Keeper(recorder, fd, request["bytes"], request["root"], is_first_rank=os.environ["RANK"] == "0")
    register_optimizer_step_post_hook(keeper.after_step)


class _Keeper:
    """Writes values of parameters and gradients after each step, until its budget of bytes is spent.
    `install` makes it in a process whose run is written to a trace file; torch calls `after_step` after each step."""

    def __init__(self, recorder: ScriptRecorder, fd: int, budget: int, root: str, is_first_rank: bool) -> None:
        self._recorder, self._fd, self._left, self._root, self._first = recorder, fd, budget, root, is_first_rank
        self._plans: dict[int, tuple[int, set[int]]] = {}
        self._placed: set[str] = set()

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder = self._recorder
        if not recorder.is_stepping(optimizer):
            return
        if not recorder.done:
            recorder.note("environment", **_environment())
            files = [getattr(module, "__file__", None) for module in list(sys.modules.values()) if self._root]
            paths = {os.path.realpath(file) for file in files if isinstance(file, str)}
            recorder.note("imported", files=sorted(path for path in paths if path.startswith(self._root + os.sep)))
        number = recorder.number_of(optimizer)
        if number not in self._plans:
            self._plans[number] = self._plan(optimizer)
        steps, chosen = self._plans[number]
        if not steps:
            return
        self._plans[number] = steps - 1, chosen
        with torch.no_grad():
            for piece in recorder.known.parts(optimizer, number):
                if id(piece.parameter) in chosen:
                    self._keep(piece, "gradient", piece.parameter.grad)
                    self._keep(piece, "parameter", piece.parameter)

    def _plan(self, optimizer: Any) -> tuple[int, set[int]]:
        """Return the number of steps whose values are kept, and the ids of the parameters.
        A DTensor is gathered by all of its ranks, so the plan depends only on sizes that they share."""
        parameters = parameters_of(optimizer)
        sharded = [parameter for parameter in parameters if is_distributed(parameter)]
        counted = sharded or parameters
        size = 2 * sum(parameter.numel() * parameter.element_size() for parameter in counted)
        if (steps := self._left // max(size, 1)) > 0:
            self._left -= steps * size
            return steps, set(map(id, parameters))
        chosen = set()
        for parameter in counted:
            self._left -= 2 * parameter.numel() * parameter.element_size()
            if self._left < 0:
                break
            chosen.add(id(parameter))
        self._left = 0
        return 1, chosen

    def _keep(self, piece: NumberedPart, quantity: str, tensor: torch.Tensor | None) -> None:
        if tensor is None or tensor.is_complex() or tensor.layout is not torch.strided:
            return
        cut = piece.part.cut
        sharded, value = is_distributed(tensor), whole(tensor)
        if value is None or (not self._first and (cut is None or sharded)):
            return  # rank 0 has the same values
        local = copied(value)
        head = {"step": self._recorder.done + 1, "kind": quantity, "name": piece.part.label}
        head["dtype"] = name_of(local.dtype)
        if cut is None:
            self._write(head | {"shape": list(local.shape)}, local)
            return
        slice_, is_repeated = cut.part, cut.part.whole in self._placed
        self._placed.add(slice_.whole)
        at = [] if is_repeated or slice_.at is None else [slice_.at.to(torch.int64).contiguous()]
        head |= {"name": slice_.whole, "shape": list(slice_.shape)}
        self._write(head, slice_.of(local).contiguous(), *at)

    def _write(self, head: Mapping[str, object], *tensors: torch.Tensor) -> None:
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        line = json.dumps({**head, "bytes": sizes}) + "\n"
        write_all(self._fd, line.encode(), *(memoryview(memory_of(tensor)).cast("B") for tensor in tensors))


def _environment() -> dict[str, object]:
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
