"""Record in a rank what the code under test calls while it runs, as evidence for what is wrong with it.

The interpreter's own profiling hook tells of calls, so that it does not matter by which name, and from where, the code
under test has imported a function. It is slow, and on only while a failure is looked into.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import data
from torch.utils.data.distributed import DistributedSampler
from torch.utils.hooks import RemovableHandle

from mgpu_check.gates.draws import Notes
from mgpu_check.gates.program import modules_of
from mgpu_check.mistakes.observed import Event, Trace
from mgpu_check.mistakes.results import Result
from mgpu_check.processes.frames import is_engine, is_installed
from mgpu_check.processes.record import relative
from mgpu_check.torch_hooks.arguments import group_of, option
from mgpu_check.torch_hooks.collectives import Recorder
from mgpu_check.torch_hooks.forms import Form
from mgpu_check.torch_hooks.table import OPERATIONS, ROOTS
from mgpu_check.torch_hooks.tensors import as_real

__all__ = ["traced"]


@contextlib.contextmanager
def traced(model: Any, trace: Trace) -> Iterator[None]:
    """Write to `trace` what the code under test calls, in this thread and those that it starts."""

    def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        rates = tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)
        trace.events.append(Event("step", type(optimizer).__name__, "", {"rates": rates}))

    recorder = _EventRecorder(model, trace)
    hook = register_optimizer_step_post_hook(stepped)
    before, of_threads = sys.getprofile(), threading.getprofile()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    notes = Notes()
    try:
        with notes:
            yield
    finally:
        trace.drawn = tuple(notes.drawn)
        sys.setprofile(before)
        threading.setprofile(of_threads)
        recorder.on = False  # in threads that are still there
        hook.remove()


class _EventRecorder:
    """Records events of one rank, as a profile function."""

    def __init__(self, model: Any, trace: Trace) -> None:
        self._trace = trace
        self.on = True
        self._modules = list(modules_of(model).values())
        self._asynchronous: list[tuple[Any, Event, list[tuple[torch.Tensor, int]]]] = []
        self._following: list[list[RemovableHandle]] = []  # of each backward pass that is under way

    def __call__(self, frame: types.FrameType, what: str, result: Any) -> None:
        if not self.on:
            sys.setprofile(None)  # in a thread of autograd's, which is there for good
            return
        if what not in ("call", "return"):
            return
        code = frame.f_code
        if code is _BACKWARD:
            if what == "call":
                self._following.append(self._follow(frame.f_locals["t_outputs"]))
            elif self._following:
                for hook in self._following.pop():
                    hook.remove()
        elif code is _CALL:
            self._collective(frame, what, result)
        elif code is _WAIT and what == "call":
            work = frame.f_locals["work"]
            for pending, event, versions in self._asynchronous:
                if pending is work:
                    event.details["waited"] = True
                    # Whoever writes to the operand before the wait has not waited for it.
                    event.details["touched"] = any(tensor._version != version for tensor, version in versions)
        elif what == "call" and (watched := _WATCHED.get(code)) is not None:
            kind, name, read = watched
            with contextlib.suppress(Exception):  # evidence that cannot be had is not worth a failure
                self._trace.events.append(Event(kind, name, _site(frame), read(frame.f_locals, self)))

    def _follow(self, roots: Sequence[Any]) -> list[RemovableHandle]:
        """Watch the threads in which autograd is about to go back from `roots`: it has one for each GPU.

        They are not Python's, so no profile function reaches them but from within.
        """
        found = (getattr(root, "node", None) or getattr(root, "grad_fn", None) for root in roots)
        nodes = [node for node in found if node is not None]
        known, hooks = set(nodes), []
        while nodes:
            node = nodes.pop()
            hooks.append(node.register_prehook(self._enter_thread))
            below = {one for one, _ in node.next_functions if one is not None} - known
            known |= below
            nodes += below
        return hooks

    def _enter_thread(self, gradients: Any) -> None:
        if self.on and sys.getprofile() is not self:
            sys.setprofile(self)

    def _collective(self, frame: types.FrameType, what: str, result: Any) -> None:
        local = frame.f_locals
        if what == "return":
            outermost = not local["self"]._inside.depth
            if outermost and isinstance(result, dist.Work) and self._trace.events:
                event = next(event for event in reversed(self._trace.events) if event.kind == "collective")
                event.details |= {"asynchronous": True, "waited": False}
                tensors = [
                    value for value in (*local["args"], *local["kwargs"].values()) if isinstance(value, torch.Tensor)
                ]
                self._asynchronous.append((result, event, [(tensor, tensor._version) for tensor in tensors]))
            return
        if local["self"]._inside.depth:
            return
        with contextlib.suppress(Exception):
            details = self._operands(local["form"], local["args"], local["kwargs"])
            self._trace.events.append(Event("collective", local["form"].name, _site(frame), details))

    def _operands(self, form: Form, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        group = group_of(form.argument(form.group, args, kwargs))
        details: dict[str, Any] = {} if group is None else {"group": group.ranks}
        for name in form.parameters:
            value = form.argument(name, args, kwargs)
            if value is None or name == form.group:
                continue
            if name in OPERATIONS:
                details["op"] = option(name, value)
            elif name in ROOTS:
                details[name.removeprefix("group_")] = (
                    int(value) if name in ("src", "dst") or group is None else group.ranks[value]
                )
            elif isinstance(value, torch.Tensor):
                details.setdefault("tensors", []).append(self._tensor(value))
            elif isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
                details["list"] = [self._tensor(one) for one in value]
                places = [one.data_ptr() for one in value if one.numel()]
                details["aliased"] = len(set(places)) < len(places)
        return details

    def _tensor(self, value: torch.Tensor) -> dict[str, Any]:
        said: dict[str, Any] = {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": tuple(value.shape),
            "gaps": not _is_dense(value),
            "differentiable": value.requires_grad and torch.is_grad_enabled(),
            "result": self._result_in(value),
        }
        if value.numel() == 1:
            said["value"] = float(as_real(value.detach()).sum())
        return said

    def _result_in(self, value: torch.Tensor) -> Result | None:
        """Return the gradient or parameter in whose memory a tensor is."""
        if not value.numel():
            return None
        start = value.data_ptr()
        for name, parameter in self.parameters():
            if parameter.data_ptr() == start:
                return Result("params", name)
            if parameter.grad is not None and parameter.grad.data_ptr() == start:
                return Result("grads", name)
        return None

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for module in self._modules:
            yield from module.named_parameters()

    def names_in(self, module: nn.Module) -> tuple[str, ...]:
        """Name those of the model's parameters that are in `module`, by their names in the model."""
        inside = {id(parameter) for parameter in module.parameters()}
        return tuple(name for name, parameter in self.parameters() if id(parameter) in inside)


def _is_dense(value: torch.Tensor) -> bool:
    """Return whether the elements fill a stretch of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def _site(frame: types.FrameType) -> str:
    """Return the innermost line of the code under test."""
    caller = frame.f_back
    while caller is not None:
        file = caller.f_code.co_filename
        if not is_engine(file) and not is_installed(file) and not file.startswith("<"):
            return f"{relative(file)}:{caller.f_lineno}"
        caller = caller.f_back
    return ""


def _nothing(local: Mapping[str, Any], recorder: _EventRecorder) -> dict[str, Any]:
    return {}


def _seed(local: Mapping[str, Any], recorder: _EventRecorder) -> dict[str, Any]:
    return {"seed": int(local["seed"])}


def _backward(local: Mapping[str, Any], recorder: _EventRecorder) -> dict[str, Any]:
    loss = local["self"].detach()
    said: dict[str, Any] = {"loss": float(loss)} if loss.numel() == 1 else {}
    # By what ranks can tell whether they hold the same parameters; of a DTensor each holds its own part.
    whole = [(name, value.detach()) for name, value in recorder.parameters() if not hasattr(value, "full_tensor")]
    return said | {"parameters": {name: float(as_real(value).double().sum()) for name, value in whole}}


def _sampler(local: Mapping[str, Any], recorder: _EventRecorder) -> dict[str, Any]:
    dataset = local["dataset"]
    return {
        "samples": len(dataset),
        "shuffle": bool(local["shuffle"]),
        "drop_last": bool(local["drop_last"]),
        "seed": int(local["seed"]),
        "replicas": local["num_replicas"] or dist.get_world_size(),
    }


def _iterates(local: Mapping[str, Any], recorder: _EventRecorder) -> dict[str, Any]:
    sampler = local["self"]
    return {"epoch": int(sampler.epoch), "shuffle": bool(sampler.shuffle), "seed": int(sampler.seed)}


def _epoch(local: Mapping[str, Any], recorder: _EventRecorder) -> dict[str, Any]:
    return {"epoch": int(local["epoch"])}


def _split(local: Mapping[str, Any], recorder: _EventRecorder) -> dict[str, Any]:
    own = local["generator"]
    return {"own_generator": own is not None and own is not torch.default_generator}


def _loader(local: Mapping[str, Any], recorder: _EventRecorder) -> dict[str, Any]:
    loader = local["self"]
    streams = isinstance(loader.dataset, data.IterableDataset)
    return {
        "streams": streams,
        "sampler": type(getattr(loader, "sampler", None)).__name__,
        "samples": None if streams else len(loader.dataset),
    }


def _schedule(local: Mapping[str, Any], recorder: _EventRecorder) -> dict[str, Any]:
    metric = local.get("metrics")
    return {} if metric is None else {"metric": float(metric)}


def _wrap(local: Mapping[str, Any], recorder: _EventRecorder) -> dict[str, Any]:
    return {
        "parameters": recorder.names_in(local["module"]),
        "find_unused": bool(local.get("find_unused_parameters")),
        "static": bool(local.get("static_graph")),
    }


def _forward(local: Mapping[str, Any], recorder: _EventRecorder) -> dict[str, Any]:
    inputs = local.get("inputs", ())
    return {"lists": any(isinstance(value, (list, tuple)) for value in inputs)}


def _code(function: Any) -> types.CodeType:
    code: types.CodeType = inspect.unwrap(function).__code__
    return code


Read = Callable[[Mapping[str, Any], _EventRecorder], dict[str, Any]]

_TABLE: tuple[tuple[Any, str, str, Read], ...] = (
    (clip_grad.clip_grad_norm_, "clip", "clip_grad_norm_", _nothing),
    (clip_grad.clip_grad_value_, "clip", "clip_grad_value_", _nothing),
    (torch.manual_seed, "seed", "manual_seed", _seed),
    (torch.Tensor.backward, "backward", "backward", _backward),
    (DistributedSampler.__init__, "sampler", "DistributedSampler", _sampler),
    (DistributedSampler.__iter__, "iterate", "DistributedSampler", _iterates),
    (DistributedSampler.set_epoch, "epoch", "set_epoch", _epoch),
    (data.random_split, "split", "random_split", _split),
    (data.DataLoader.__iter__, "loader", "DataLoader", _loader),
    (lr_scheduler.ReduceLROnPlateau.step, "schedule", "ReduceLROnPlateau.step", _schedule),
    (lr_scheduler.LRScheduler.step, "schedule", "LRScheduler.step", _schedule),
    (DistributedDataParallel.__init__, "wrap", "DistributedDataParallel", _wrap),
    (DistributedDataParallel.forward, "forward", "DistributedDataParallel", _nothing),
    (DistributedDataParallel.no_sync, "no_sync", "no_sync", _nothing),
    (DataParallel.forward, "forward", "DataParallel", _forward),
    (nn.Module.load_state_dict, "load", "load_state_dict", _nothing),
    (dist.new_group, "group", "new_group", _nothing),
)

_WATCHED: dict[types.CodeType, tuple[str, str, Read]] = {
    _code(function): (kind, name, read) for function, kind, name, read in _TABLE
}
_CALL = _code(Recorder.call)
_WAIT = _code(Recorder.wait)
_BACKWARD = _code(torch.autograd.graph._engine_run_backward)
