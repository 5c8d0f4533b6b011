"""Record the calls of the code under test in a rank, as evidence for its mistakes.

The interpreter's profiling hook reports the calls. It sees a function under every name and import. The hook is slow, so
it is on only while a failure is diagnosed.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import data
from torch.utils.data.distributed import DistributedSampler
from torch.utils.hooks import RemovableHandle

from mgpu_check.diagnosis.observed import CallEvent, RankTrace
from mgpu_check.diagnosis.results import Result
from mgpu_check.gates.draws import Notes
from mgpu_check.gates.operands import Rows, arrived, contents, facts, in_function, layout, site, sums_of
from mgpu_check.gates.program import modules_of
from mgpu_check.gates.seeds_set import generator_seeded
from mgpu_check.torch_hooks.arguments import group_of, option, own_groups
from mgpu_check.torch_hooks.collectives import Recorder
from mgpu_check.torch_hooks.forms import Form
from mgpu_check.torch_hooks.graphs import is_capturing
from mgpu_check.torch_hooks.members import named_modules, named_parameters
from mgpu_check.torch_hooks.table import OPERATIONS, ROOTS


@contextlib.contextmanager
def traced(model: Any, trace: RankTrace, rows: Rows) -> Iterator[None]:
    """Write the calls of the code under test to `trace`, in this thread and in threads that it starts."""

    def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        rates = tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)
        line = site(sys._getframe())
        trace.events.append(CallEvent("step", type(optimizer).__name__, line, {"rates": rates}))

    recorder = _EventRecorder(model, trace, rows)
    hook = register_optimizer_step_post_hook(stepped)
    before, of_threads = sys.getprofile(), threading.getprofile()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    notes = Notes(numbers=True)
    try:
        with notes:
            yield
    finally:
        trace.groups = tuple(tuple(dist.get_process_group_ranks(group)) for group in own_groups())
        trace.drawn, trace.numbers = tuple(notes.drawn), tuple(notes.numbers)
        sys.setprofile(before)
        threading.setprofile(of_threads)
        recorder.on = False  # stops recording in threads that are still alive
        hook.remove()


class _NestedCall(threading.local):
    depth: int = 0


class _EventRecorder:
    """Profile function that records the events of one rank."""

    def __init__(self, model: Any, trace: RankTrace, rows: Rows) -> None:
        self._trace, self._rows = trace, rows
        self.on = True
        self._modules = list(modules_of(model).values())
        self._asynchronous: list[tuple[Any, CallEvent, list[tuple[torch.Tensor, int]]]] = []
        self._nested = _NestedCall()
        self._following: list[list[RemovableHandle]] = []  # hooks of each running backward pass

    def __call__(self, frame: types.FrameType, what: str, result: Any) -> None:
        if not self.on:
            sys.setprofile(None)  # autograd's threads never end: detach from them here
            return
        if what == "c_return" and (seeded := generator_seeded(frame, result)) is not None:
            self._trace.events.append(seeded)
        if what not in ("call", "return") or is_capturing():
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
        elif code is _WAIT:
            self._wait(frame.f_locals["work"], what)
        elif code is _MODULE:
            self._forward(frame, what)
        elif what == "return" and (finish := _FINISHED.get(code)) is not None:
            with contextlib.suppress(Exception):
                finish(self, result)
        elif what == "call" and (watched := _WATCHED.get(code)) is not None:
            kind, name, read = watched
            with contextlib.suppress(Exception):  # missing evidence must not fail the run
                self._trace.events.append(CallEvent(kind, name, site(frame), read(frame.f_locals, self)))

    def last(self, kind: str) -> CallEvent:
        return next(event for event in reversed(self._trace.events) if event.kind == kind)

    def _wait(self, work: Any, what: str) -> None:
        for pending, event, versions in self._asynchronous:
            if pending is not work:
                continue
            if what == "return":
                _note_results(event, [tensor for tensor, _ in versions])
                continue
            event.details["waited"] = True
            # A write to the operand before the wait used it too early.
            event.details["touched"] = any(tensor._version != version for tensor, version in versions)

    def _forward(self, frame: types.FrameType, what: str) -> None:
        self._nested.depth += 1 if what == "call" else -1
        if what != "call" or self._nested.depth != 1:
            return
        with contextlib.suppress(Exception):
            module = frame.f_locals["self"]
            inputs = [value for value in frame.f_locals["args"] if isinstance(value, torch.Tensor)]
            said = {
                "parameters": sums_of(named_parameters(module)),
                "samples": self._rows.samples(inputs[0]) if inputs else None,
                "owns": self.names_in(module),
                "training": {name: part.training for name, part in named_modules(module)},
            }
            self._trace.events.append(CallEvent("model", type(module).__name__, site(frame), said))

    def _follow(self, roots: Sequence[Any]) -> list[RemovableHandle]:
        """Watch the threads that run the backward pass from `roots`; autograd has a thread for each GPU.

        Python did not start those threads, so only code that runs inside them can set a profile function.
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
        form, args, kwargs = local["form"], local["args"], local["kwargs"]
        if local["self"]._inside.depth:
            return
        if what == "return":
            given = [form.argument(name, args, kwargs) for name in form.parameters]
            tensors = [value for value in given if isinstance(value, torch.Tensor)]
            event = next((event for event in reversed(self._trace.events) if event.kind == "collective"), None)
            if event is None:
                return
            if isinstance(result, dist.Work):
                event.details |= {"asynchronous": True, "waited": False}
                self._asynchronous.append((result, event, [(tensor, tensor._version) for tensor in tensors]))
            else:
                _note_results(event, tensors)
                event.details["arrived"] = arrived(given)
            return
        with contextlib.suppress(Exception):
            details = self._operands(frame, form, args, kwargs)
            self._trace.events.append(CallEvent("collective", form.name, site(frame), details))

    def _operands(
        self, frame: types.FrameType, form: Form, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        group = group_of(form.argument(form.group, args, kwargs))
        details: dict[str, Any] = {} if group is None else {"group": group.ranks}
        details["in_function"] = in_function(frame)
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
                said = facts(value, self._result_in, frame, self.parameters()) | {"before": contents(value)}
                details.setdefault("tensors", []).append(said)
            elif isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
                details["list"] = [facts(one, self._result_in, frame, self.parameters()) for one in value]
                places = [one.data_ptr() for one in value if one.numel()]
                details["aliased"] = len(set(places)) < len(places)
        return details

    def _result_in(self, value: torch.Tensor) -> Result | None:
        """Return the gradient or parameter that starts at the same memory as a tensor."""
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
            yield from named_parameters(module)

    def names_in(self, module: nn.Module) -> tuple[str, ...]:
        inside = {id(parameter) for _, parameter in named_parameters(module)}
        return tuple(name for name, parameter in self.parameters() if id(parameter) in inside)


def _nothing(local: Mapping[str, Any], recorder: _EventRecorder) -> dict[str, Any]:
    return {}


def _seed(local: Mapping[str, Any], recorder: _EventRecorder) -> dict[str, Any]:
    return {"seed": int(local["seed"])}


def _python_seed(local: Mapping[str, Any], recorder: _EventRecorder) -> dict[str, Any]:
    return {"seed": int(local["a"])}  # fails without a seed, and then nothing is recorded


def _backward(local: Mapping[str, Any], recorder: _EventRecorder) -> dict[str, Any]:
    loss = local["self"].detach()
    said: dict[str, Any] = {"loss": float(loss)} if loss.numel() == 1 else {}
    return said | {
        "parameters": sums_of(recorder.parameters()),
        "layouts": {name: layout(value) for name, value in recorder.parameters()},
        "trained": tuple(name for name, value in recorder.parameters() if value.requires_grad),
    }


def _note_results(event: CallEvent, tensors: Sequence[torch.Tensor]) -> None:
    with contextlib.suppress(Exception):
        event.details["after"] = [contents(tensor) for tensor in tensors]


def _backward_ends(recorder: _EventRecorder, result: Any) -> None:
    whole = ((name, value.grad) for name, value in recorder.parameters() if not hasattr(value, "full_tensor"))
    left = {name: contents(value) for name, value in whole if value is not None and value.layout == torch.strided}
    recorder.last("backward").details["left"] = left


def _clip_ends(recorder: _EventRecorder, result: Any) -> None:
    if isinstance(result, torch.Tensor) and not hasattr(result, "full_tensor"):
        recorder.last("clip").details["norm"] = float(result)


def _scale(local: Mapping[str, Any], recorder: _EventRecorder) -> dict[str, Any]:
    scaler = local["self"]
    return {"scale": float(scaler._init_scale if scaler._scale is None else scaler._scale)}


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
        "dropped": 0 if streams or not loader.drop_last else len(loader.sampler) % (loader.batch_size or 1),
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
    (random.Random.seed, "generator", "random.seed", _python_seed),
    (GradScaler.scale, "scale", "GradScaler.scale", _scale),
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
    (Optimizer.load_state_dict, "load", "Optimizer.load_state_dict", _nothing),
    (dist.new_group, "group", "new_group", _nothing),
)

_WATCHED: dict[types.CodeType, tuple[str, str, Read]] = {
    _code(function): (kind, name, read) for function, kind, name, read in _TABLE
}
_FINISHED: dict[types.CodeType, Callable[[_EventRecorder, Any], None]] = {
    _code(torch.Tensor.backward): _backward_ends,
    _code(clip_grad.clip_grad_norm_): _clip_ends,
}
_MODULE = _code(nn.Module._wrapped_call_impl)
_CALL = _code(Recorder.call)
_WAIT = _code(Recorder.wait)
_BACKWARD = _code(torch.autograd.graph._engine_run_backward)
