"""Record the calls of the code under test in a rank, as evidence for its mistakes.

The interpreter's profiling hook reports the calls. It sees a function under every name and import. The hook is slow,
so it is on only while a failure is diagnosed. Recorded are also the tensors that the code passes to collectives and
models, the seeds that it sets, the labels of its losses (the classes that cross entropy, or a gather in the code,
picks), and the output of each module of the model, with its gradient.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import operator
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd.function import FunctionCtx
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import checkpoint, data
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data.distributed import DistributedSampler
from torch.utils.hooks import RemovableHandle

from mgpu_check.diagnosis.observations import CallEvent, Labels, RankTrace, Result
from mgpu_check.gates.gate_arguments import modules_of
from mgpu_check.gates.run.draws import Notes
from mgpu_check.gates.search.scenarios import samples_in
from mgpu_check.processes.collective_records import relative
from mgpu_check.processes.tracebacks import callers, is_file_under_test
from mgpu_check.torch_hooks.collective_table import OPERATIONS, ROOTS, Form
from mgpu_check.torch_hooks.collectives import Recorder, group_of, option, own_groups
from mgpu_check.torch_hooks.nested import named_modules, named_parameters, tensors_of
from mgpu_check.torch_hooks.patches import temporarily
from mgpu_check.torch_hooks.tensors import as_real, copied, digest_of, is_capturing, name_of, plain

_KEPT = 64  # largest number of elements whose values are kept
_FRAMES = 4  # frames of the code under test that are searched for a tensor that shares memory with an operand


def facts(
    value: torch.Tensor,
    result_in: Callable[[torch.Tensor], Result | None],
    frame: types.FrameType,
    named: Iterable[tuple[str, torch.Tensor]] = (),
) -> dict[str, Any]:
    """Describe an operand as the collective starts: dtype, shape, layout, autograd history, its result.

    `result_in`: returns the gradient or parameter that a tensor shares memory with. `named`: the parameters of the
    model; "upstream" names the ones that the operand depends on.
    """
    description: dict[str, Any] = {
        "dtype": name_of(value.dtype),
        "shape": tuple(value.shape),
        "gaps": not _is_dense(value),
        "layout": layout(value),
        "differentiable": value.requires_grad and torch.is_grad_enabled(),
        "detached": False,
        "result": result_in(value),
    }
    history = _history(value, frame)
    if history is not None:
        description["detached"] = history is not value or not torch.is_grad_enabled()
        description["upstream"] = upstream(history.grad_fn, named)
    if value.numel() == 1:
        description["value"] = float(as_real(value.detach()).sum())
    return description


def arrived(arguments: Sequence[Any]) -> bool:
    """Return whether a collective has put this rank's own operand into the list that it fills."""
    lists = [argument for argument in arguments if isinstance(argument, (list, tuple))]
    own = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    entries = [entry for several in lists for entry in several if isinstance(entry, torch.Tensor)]
    return any(entry.shape == operand.shape and bool((entry == operand).all()) for operand in own for entry in entries)


def contents(value: torch.Tensor) -> dict[str, Any]:
    """Return the sum and the norm of a tensor in float64, and the values of a small tensor."""
    flat = as_real(value.detach()).cpu().double().flatten()
    few = {"values": flat.tolist()} if flat.numel() <= _KEPT else {}
    return {"sum": float(flat.sum()), "norm": float(flat.norm())} | few


def sums_of(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
    """Return the sum of each tensor, but not of a DTensor, because each rank holds its own part."""
    undivided = [(name, value.detach()) for name, value in named if not hasattr(value, "full_tensor")]
    return {name: float(as_real(value).double().sum()) for name, value in undivided}


class Rows:
    """The samples of the global batches, recognized by their values in the inputs of models.

    A traced run makes one from its batches; the recorder of its calls asks it for the samples of each call of a model.
    """

    def __init__(self, batches: Sequence[Any]) -> None:
        of_leaves: dict[int, list[tuple[str, tuple[int, int]]]] = {}
        for step, batch in enumerate(batches):
            count = samples_in(batch)
            for number, leaf in enumerate(tensors_of(batch)):
                if leaf.dim() > 1 and len(leaf) == count:
                    rows = ((digest_of(row), (step, index)) for index, row in enumerate(leaf))
                    of_leaves.setdefault(number, []).extend(rows)
        # A leaf with equal rows cannot identify its samples.
        self._known = [dict(rows) for rows in of_leaves.values() if len(dict(rows)) == len(rows)]

    def samples(self, inputs: torch.Tensor) -> list[tuple[int, int]] | None:
        """Return the samples in `inputs` as (batch, index); None unless all are rows of one leaf of the batches."""
        if inputs.dim() < 2:
            return None
        digests = [digest_of(row) for row in inputs.detach().cpu()]
        for samples_by_digest in self._known:
            if all(digest in samples_by_digest for digest in digests):
                return [samples_by_digest[digest] for digest in digests]
        return None


def layout(value: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions with more than one element, from the outermost in memory to the innermost."""
    sized = [dim for dim, size in enumerate(value.shape) if size > 1]
    return tuple(sorted(sized, key=value.stride, reverse=True))


def _is_dense(value: torch.Tensor) -> bool:
    """Return whether the elements fill a stretch of memory without gaps, in any order of dimensions."""
    sized = sorted((stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1)
    filled = itertools.accumulate((size for _, size in sized), operator.mul, initial=1)
    return all(stride == expected for (stride, _), expected in zip(sized, filled, strict=False))


def _history(value: torch.Tensor, frame: types.FrameType) -> torch.Tensor | None:
    """Return the tensor with an operand's history: itself, or one of the code under test that it was detached from."""
    if value.dim() < 1 or not value.numel() or not (value.is_floating_point() or value.is_complex()):
        return None
    if value.requires_grad:
        return value if value.grad_fn is not None else None
    for caller in itertools.islice(filter(is_under_test, callers(frame)), _FRAMES):
        for tensor in (local for local in caller.f_locals.values() if isinstance(local, torch.Tensor)):
            same_elements = tensor.shape == value.shape and tensor.data_ptr() == value.data_ptr()
            if tensor.grad_fn is not None and same_elements:
                return tensor
    return None


def upstream(start: Any, named: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, ...]:
    """Return the names of the parameters that a node of autograd's graph depends on."""
    leaves = {id(getattr(node, "variable", None)) for node in _nodes_from([start])}
    return tuple(name for name, parameter in named if id(parameter) in leaves)


def _nodes_from(starts: Iterable[Any]) -> Iterator[Any]:
    nodes = list(starts)
    visited = set(nodes)
    while nodes:
        node = nodes.pop()
        yield node
        below = {function for function, _ in node.next_functions if function is not None} - visited
        visited |= below
        nodes += below


def in_function(frame: types.FrameType) -> bool:
    """Return whether a frame is inside a `torch.autograd.Function`, which has its own backward pass."""
    frames_left = _FRAMES
    for caller in callers(frame):
        frames_left -= is_under_test(caller)
        # Functional collectives whose names end so are differentiable (torch/distributed/_functional_collectives.py).
        if isinstance(caller.f_locals.get("ctx"), FunctionCtx) or caller.f_code.co_name.endswith("_autograd"):
            return True
        if not frames_left:
            return False
    return False


def site(frame: types.FrameType) -> str:
    """Return the innermost line of the code under test among the callers of a frame: "train.py:40"."""
    return next((line_of(caller) for caller in callers(frame) if is_under_test(caller)), "")


def line_of(frame: types.FrameType) -> str:
    return f"{relative(frame.f_code.co_filename)}:{frame.f_lineno}"


def is_under_test(frame: types.FrameType) -> bool:
    """Return whether a frame belongs to the code under test, not to an installed package or to the gate."""
    return is_file_under_test(frame.f_code.co_filename)


_SEED = inspect.unwrap(torch.manual_seed).__code__


def profiled(note: Callable[[types.FrameType, str, Any], None]) -> contextlib.AbstractContextManager[Any]:
    """Call `note` at each call and return in this thread."""
    return temporarily(sys.setprofile, note, sys.getprofile())


def noting_seeds(events: list[CallEvent]) -> contextlib.AbstractContextManager[None]:
    def note(frame: types.FrameType, profile_event: str, called: Any) -> None:
        if profile_event == "call" and frame.f_code is _SEED:
            events.append(CallEvent("seed", "manual_seed", site(frame), {"seed": int(frame.f_locals["seed"])}))
        elif profile_event == "c_return" and (event := generator_seeded(frame, called)) is not None:
            events.append(event)

    return profiled(note)


def generator_seeded(frame: types.FrameType, called: Any) -> CallEvent | None:
    """Return the event of a call of `manual_seed` on the code's own generator."""
    generator: Any = getattr(called, "__self__", None)
    is_seed = getattr(called, "__name__", "") == "manual_seed" and isinstance(generator, torch.Generator)
    if not is_seed or not is_under_test(frame):
        return None
    return CallEvent("generator", "Generator.manual_seed", line_of(frame), {"seed": int(generator.initial_seed())})


_MOST_LABELS = 4096  # most labels of one call that are kept, to bound memory
_MOST_CALLS = 64
_aten = torch.ops.aten
_LOSSES = {_aten.nll_loss_forward, _aten.nll_loss2d_forward}


class NotingLabels(TorchDispatchMode):
    """Records the labels of each loss, and the line of the code under test that computes it.

    A traced run enters it around its steps. It appends to the list that it was made with, which outlives it.
    """

    def __init__(self, labels: list[Labels]) -> None:
        super().__init__()
        self._labels = labels

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        with contextlib.suppress(Exception):  # missing evidence must not fail the step
            labels = _labels(func.overloadpacket, args)
            if labels is not None and len(self._labels) < _MOST_CALLS and (line := site(sys._getframe())):
                # Argument 4 of both is `ignore_index` (`torch.ops.aten.nll_loss_forward.default._schema`, torch 2.13).
                ignored = int(args[4]) if func.overloadpacket in _LOSSES and len(args) > 4 else None
                self._labels.append(Labels(line, tuple(plain(labels).flatten().tolist()), ignored))
        return result


def _labels(packet: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    if packet in _LOSSES:
        labels = args[1]
    elif packet is _aten.gather and args[2].dim() == args[0].dim() and args[2].shape[args[1]] == 1:
        labels = args[2]
    else:
        return None
    wanted = isinstance(labels, torch.Tensor) and not labels.is_floating_point() and 1 < labels.numel() <= _MOST_LABELS
    return labels if wanted else None


_MOST_OUTPUTS = 1 << 16  # elements of a recorded output: comparing a larger one by rows would take longer than the step


def noting_outputs(modules: Mapping[str, nn.Module], trace: RankTrace) -> RemovableHandle:
    """Write the first output of each module to `trace`, in the order of calls, with its gradient."""
    inside = [(prefix + name, own) for prefix, module in modules.items() for name, own in named_modules(module)]
    module_names = {id(submodule): name for name, submodule in inside if name}

    def note(noted: dict[str, torch.Tensor], name: str, value: torch.Tensor) -> bool:
        usable = value.is_floating_point() and value.dim() > 0 and 0 < value.numel() <= _MOST_OUTPUTS
        if name in noted or not usable or hasattr(value, "full_tensor"):
            return False
        noted[name] = copied(value)
        return True

    def note_gradient(name: str, gradient: torch.Tensor) -> None:
        note(trace.gradients, name, gradient)

    def called(module: nn.Module, args: Any, output: Any) -> None:
        if (name := module_names.get(id(module))) is None:
            return
        for value in tensors_of(output)[:1]:
            if note(trace.outputs, name, value) and value.requires_grad:
                value.register_hook(functools.partial(note_gradient, name))

    return register_module_forward_hook(called)


@contextlib.contextmanager
def traced(model: Any, trace: RankTrace, rows: Rows) -> Iterator[None]:
    """Write the calls of the code under test to `trace`, in this thread and in threads that it starts."""

    def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        rates = tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)
        trace.events.append(CallEvent("step", type(optimizer).__name__, site(sys._getframe()), {"rates": rates}))

    recorder, notes, of_threads = _EventRecorder(model, trace, rows), Notes(numbers=True), threading.getprofile()
    threading.setprofile(recorder)
    try:
        with register_optimizer_step_post_hook(stepped), profiled(recorder), notes:
            yield
    finally:
        trace.groups = tuple(tuple(dist.get_process_group_ranks(group)) for group in own_groups())
        trace.drawn, trace.numbers, trace.casts = tuple(notes.drawn), tuple(notes.numbers), notes.casts
        threading.setprofile(of_threads)
        recorder.on = False  # stops recording in threads that are still alive


class _NestedCall(threading.local):
    depth: int = 0


class _EventRecorder:
    """Profile function that records the events of one rank.

    `traced` makes one and sets it in this thread. Python calls it at each call and return, also in threads that start
    later and in those of autograd. Once `on` is False, it removes itself from a thread when called.
    """

    def __init__(self, model: Any, trace: RankTrace, rows: Rows) -> None:
        self._trace, self._rows = trace, rows
        self.on = True
        self._modules = list(modules_of(model).values())
        self._asynchronous: list[tuple[Any, CallEvent, list[tuple[torch.Tensor, int]]]] = []
        self._nested = _NestedCall()
        self._following: list[list[RemovableHandle]] = []  # hooks of each running backward pass

    def __call__(self, frame: types.FrameType, profile_event: str, result: Any) -> None:
        if not self.on:
            sys.setprofile(None)  # autograd's threads never end: detach from them here
            return
        if profile_event == "c_return" and (seeded := generator_seeded(frame, result)) is not None:
            self._trace.events.append(seeded)
        if profile_event not in ("call", "return") or is_capturing():
            return
        code = frame.f_code
        if code is _BACKWARD:
            if profile_event == "call":
                self._following.append(self._follow(frame.f_locals["t_outputs"]))
            elif self._following:
                for hook in self._following.pop():
                    hook.remove()
        elif code is _CALL:
            self._collective(frame, profile_event, result)
        elif code is _WAIT:
            self._wait(frame.f_locals["work"], profile_event)
        elif code is _MODULE:
            self._forward(frame, profile_event)
        elif profile_event == "return" and (finish := _FINISHED.get(code)) is not None:
            with contextlib.suppress(Exception):
                finish(self, result)
        elif profile_event == "call" and (watched := _WATCHED.get(code)) is not None:
            event_kind, name, read = watched
            with contextlib.suppress(Exception):  # missing evidence must not fail the run
                self._trace.events.append(CallEvent(event_kind, name, site(frame), read(frame.f_locals, self)))

    def last(self, event_kind: str) -> CallEvent:
        return next(event for event in reversed(self._trace.events) if event.kind == event_kind)

    def _wait(self, work: Any, profile_event: str) -> None:
        for pending, event, versions in self._asynchronous:
            if pending is not work:
                continue
            if profile_event == "return":
                _note_results(event, [tensor for tensor, _ in versions])
                continue
            event.details["waited"] = True
            # A write to the operand before the wait used it too early.
            event.details["touched"] = any(tensor._version != version for tensor, version in versions)

    def _forward(self, frame: types.FrameType, profile_event: str) -> None:
        self._nested.depth += 1 if profile_event == "call" else -1
        if profile_event != "call" or self._nested.depth != 1:
            return
        with contextlib.suppress(Exception):
            module = frame.f_locals["self"]
            inputs = [value for value in frame.f_locals["args"] if isinstance(value, torch.Tensor)]
            details = {
                "parameters": sums_of(named_parameters(module)),
                "samples": self._rows.samples(inputs[0]) if inputs else None,
                "owns": self.names_in(module),
                "training": {name: submodule.training for name, submodule in named_modules(module)},
            }
            self._trace.events.append(CallEvent("model", type(module).__name__, site(frame), details))

    def _follow(self, roots: Sequence[Any]) -> list[RemovableHandle]:
        """Watch the threads that run the backward pass from `roots`."""
        # The engine starts a thread for each GPU in C++ (torch/csrc/autograd/engine.h, thread_init, torch 2.13), which
        # `threading.setprofile` does not reach. Only code that runs inside such a thread can set its profile function.
        candidates = (getattr(root, "node", None) or getattr(root, "grad_fn", None) for root in roots)
        nodes = _nodes_from(node for node in candidates if node is not None)
        return [node.register_prehook(self._enter_thread) for node in nodes]

    def _enter_thread(self, gradients: Any) -> None:
        if self.on and sys.getprofile() is not self:
            sys.setprofile(self)

    def _collective(self, frame: types.FrameType, profile_event: str, result: Any) -> None:
        local = frame.f_locals
        form, args, kwargs = local["form"], local["args"], local["kwargs"]
        if local["self"]._inside.depth:
            return
        if profile_event == "return":
            arguments = [form.argument(name, args, kwargs) for name in form.parameters]
            tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
            event = next((event for event in reversed(self._trace.events) if event.kind == "collective"), None)
            if event is None:
                return
            if isinstance(result, dist.Work):
                event.details |= {"asynchronous": True, "waited": False}
                self._asynchronous.append((result, event, [(tensor, tensor._version) for tensor in tensors]))
            else:
                _note_results(event, tensors)
                event.details["arrived"] = arrived(arguments)
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
                description = facts(value, self._result_in, frame, self.parameters()) | {"before": contents(value)}
                details.setdefault("tensors", []).append(description)
            elif isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
                details["list"] = [facts(tensor, self._result_in, frame, self.parameters()) for tensor in value]
                places = [tensor.data_ptr() for tensor in value if tensor.numel()]
                details["aliased"] = len(set(places)) < len(places)
        return details

    def _result_in(self, value: torch.Tensor) -> Result | None:
        if not value.numel():
            return None
        for name, parameter in self.parameters():
            if parameter.data_ptr() == value.data_ptr():
                return Result("params", name)
            if parameter.grad is not None and parameter.grad.data_ptr() == value.data_ptr():
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


def _backward(local: Mapping[str, Any], recorder: _EventRecorder) -> dict[str, Any]:
    return {
        "parameters": sums_of(recorder.parameters()),
        "layouts": {name: layout(value) for name, value in recorder.parameters()},
        "trained": tuple(name for name, value in recorder.parameters() if value.requires_grad),
    }


def _note_results(event: CallEvent, tensors: Sequence[torch.Tensor]) -> None:
    with contextlib.suppress(Exception):
        event.details["after"] = [contents(tensor) for tensor in tensors]


def _backward_ends(recorder: _EventRecorder, result: Any) -> None:
    undivided = ((name, value.grad) for name, value in recorder.parameters() if not hasattr(value, "full_tensor"))
    dense = ((name, value) for name, value in undivided if value is not None and value.layout == torch.strided)
    recorder.last("backward").details["left"] = {name: contents(value) for name, value in dense}


def _clip_ends(recorder: _EventRecorder, result: Any) -> None:
    if isinstance(result, torch.Tensor) and not hasattr(result, "full_tensor"):
        recorder.last("clip").details["norm"] = float(result)


def _scale(local: Mapping[str, Any], recorder: _EventRecorder) -> dict[str, Any]:
    scaler = local["self"]  # it makes `_scale` in its first call of `scale` (torch/amp/grad_scaler.py, torch 2.13)
    return {"scale": float(scaler._init_scale if scaler._scale is None else scaler._scale)}


def _sampler(local: Mapping[str, Any], recorder: _EventRecorder) -> dict[str, Any]:
    return {
        "samples": len(local["dataset"]),
        "drop_last": bool(local["drop_last"]),
        "seed": int(local["seed"]),
        "replicas": local["num_replicas"] or dist.get_world_size(),
    }


def _iterates(local: Mapping[str, Any], recorder: _EventRecorder) -> dict[str, Any]:
    return {"epoch": int(local["self"].epoch), "shuffle": bool(local["self"].shuffle)}


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
    return {"parameters": recorder.names_in(local["module"]), "find_unused": bool(local.get("find_unused_parameters"))}


def _code(function: Any) -> types.CodeType:
    return inspect.unwrap(function).__code__


Read = Callable[[Mapping[str, Any], _EventRecorder], dict[str, Any]]

_TABLE: tuple[tuple[Any, str, str, Read], ...] = (
    (clip_grad.clip_grad_norm_, "clip", "clip_grad_norm_", _nothing),
    (clip_grad.clip_grad_value_, "clip", "clip_grad_value_", _nothing),
    (torch.manual_seed, "seed", "manual_seed", lambda local, recorder: {"seed": int(local["seed"])}),
    # Fails without a seed, and then nothing is recorded.
    (random.Random.seed, "generator", "random.seed", lambda local, recorder: {"seed": int(local["a"])}),
    (GradScaler.scale, "scale", "GradScaler.scale", _scale),
    (torch.Tensor.backward, "backward", "backward", _backward),
    (DistributedSampler.__init__, "sampler", "DistributedSampler", _sampler),
    (DistributedSampler.__iter__, "iterate", "DistributedSampler", _iterates),
    (DistributedSampler.set_epoch, "epoch", "set_epoch", lambda local, recorder: {"epoch": int(local["epoch"])}),
    (data.random_split, "split", "random_split", _split),
    (data.DataLoader.__iter__, "loader", "DataLoader", _loader),
    (lr_scheduler.ReduceLROnPlateau.step, "schedule", "ReduceLROnPlateau.step", _schedule),
    (lr_scheduler.LRScheduler.step, "schedule", "LRScheduler.step", _schedule),
    (DistributedDataParallel.__init__, "wrap", "DistributedDataParallel", _wrap),
    (DistributedDataParallel.forward, "forward", "DistributedDataParallel", _nothing),
    (DistributedDataParallel.no_sync, "no_sync", "no_sync", _nothing),
    (FSDPModule.set_requires_gradient_sync, "no_sync", "set_requires_gradient_sync", _nothing),
    (checkpoint.checkpoint, "recompute", "checkpoint", _nothing),
    (DataParallel.forward, "forward", "DataParallel", _nothing),
    (nn.Module.load_state_dict, "load", "load_state_dict", _nothing),
    (Optimizer.load_state_dict, "load", "Optimizer.load_state_dict", _nothing),
    (dist.new_group, "group", "new_group", _nothing),
)

_WATCHED: dict[types.CodeType, tuple[str, str, Read]] = {
    _code(function): (event_kind, name, read) for function, event_kind, name, read in _TABLE
}
_FINISHED: dict[types.CodeType, Callable[[_EventRecorder, Any], None]] = {
    _code(torch.Tensor.backward): _backward_ends,
    _code(clip_grad.clip_grad_norm_): _clip_ends,
}
_MODULE = _code(nn.Module._wrapped_call_impl)
_CALL = _code(Recorder.call)
_WAIT = _code(Recorder.wait)
_BACKWARD = _code(torch.autograd.graph._engine_run_backward)
