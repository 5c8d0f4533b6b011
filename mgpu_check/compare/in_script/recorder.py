"""Record the trace in the script's process, through hooks on optimizers, modules and backward.

The trace covers only calls that the script makes itself; see `docs/reference/compare.md`. Recorded are the inputs of
the first calls of each micro-batch, which show its samples; the outputs of modules in the forward passes of a step; and
the gradients after backward and after each reduction before the optimizer's step. If a gradient has a wrong factor, one
of these calls caused it, and the report names the line of the call.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from mgpu_check.compare.in_script import models, perturbations, script_calls
from mgpu_check.compare.in_script.parameters import NumberedPart, Parameters, States, numbers_of, parameters_of
from mgpu_check.compare.in_script.perturbations import Perturbation
from mgpu_check.compare.in_script.placements import Files, Placing, read_placements, read_wholes, write_tensor
from mgpu_check.compare.in_script.script_calls import Guard, guard_with
from mgpu_check.compare.in_script.summaries import (
    Numbers,
    digests,
    host_copy,
    inputs_of,
    on_host_together,
    short,
    statistics,
    summaries,
    whole,
)
from mgpu_check.compare.process_watch import install_count
from mgpu_check.compare.trace import FORMAT, HEAD, VERSION, Inputs, OutputSummary, Writer, joined_outputs, total
from mgpu_check.processes.collective_records import relative
from mgpu_check.processes.environments import rank_and_world
from mgpu_check.processes.tracebacks import calling_line
from mgpu_check.torch_hooks import switches
from mgpu_check.torch_hooks.collective_table import COLLECTIVES, FunctionForm
from mgpu_check.torch_hooks.collectives import group_of, option
from mgpu_check.torch_hooks.nested import leaves, named_modules, named_parameters, tensors_of
from mgpu_check.torch_hooks.patches import Patches, around, replaced
from mgpu_check.torch_hooks.tensors import (
    as_real,
    is_capturing,
    is_distributed,
    is_pending,
    is_tracing,
    is_transforming,
    name_of,
    readable,
)

_COLUMNS = 2**22  # larger inputs are not hashed along the second dimension, to bound the time
_DEPTH_OF_CALLS = 8  # nested calls; wrappers are rarely deeper


class InputRecorder:
    """Records the first call of a model in a micro-batch, and the first call within each recorded call.

    `ScriptRecorder` makes it, and calls it as modules are entered and left. Each step takes its calls, and then forgets
    them.

    One device and the ranks may call a model by another wrapper, so that only an inner call is common.
    """

    def __init__(self) -> None:
        self.in_evaluation = False  # the model of this call trains in evaluation mode
        self.forget()

    def forget(self) -> None:
        """Discard the inputs since the last step."""
        self.calls: list[list[Inputs]] = []
        self.next_micro_batch()

    def next_micro_batch(self) -> None:
        self._waiting = True  # for the first call of a model
        self.next_call()

    def next_call(self) -> None:
        """Forget the calls within a model that has returned, which may not be one with samples."""
        self._entered = self._open = 0  # depth of the first calls: all of them, and those that have not returned
        self._found: list[Inputs] = []
        self._hashed: dict[tuple[int, int], tuple[torch.Tensor, tuple[list[int], list[int]]]] = {}

    def enter(self, depth: int) -> None:
        """Note that a call begins. `depth`: 1 for a call outside of others."""
        if depth == 1:
            self.next_call()
        if self._waiting and depth <= _DEPTH_OF_CALLS and self._entered == self._open == depth - 1:
            self._entered = self._open = depth

    def leave(self, module: nn.Module, depth: int, args: Any, kwargs: Any) -> None:
        """Record the inputs of a call that returns, if it is one of the first ones."""
        if not self._waiting or depth != self._open:
            return
        self._open -= 1
        arguments = inputs_of(args, kwargs)
        computed = any(tensor.grad_fn is not None for tensor in arguments)  # such a tensor is not a sample
        # FullyShardedDataParallel takes the parameters of the modules within it.
        trains = self.in_evaluation or models.in_training(module)
        trains = trains and (depth > 1 or next(named_parameters(module), None) is not None)
        if computed or not trains:
            return
        name = type(models.unwrapped(module)).__name__
        if any(base.__name__ == "FSDPModule" for base in type(models.unwrapped(module)).__mro__):
            name = name.removeprefix("FSDP")  # `fully_shard` makes a subclass of this name of the user's class
        hashes = [self._hashes(tensor) for tensor in arguments]
        inputs = Inputs(name, [rows for rows, _ in hashes], [columns for _, columns in hashes])
        self._found = [inputs, *(call for call in self._found if call.module != name)]
        if depth == 1:
            self.calls.append(self._found)
            self._waiting = False
            self.next_call()

    def _hashes(self, tensor: torch.Tensor) -> tuple[list[int], list[int]]:
        key = id(tensor), -1 if tensor.is_inference() else tensor._version
        if key not in self._hashed:
            value = host_copy(tensor)
            few = value is not None and value.numel() <= _COLUMNS
            self._hashed[key] = tensor, (digests(value), digests(value, 1) if few else [])  # keeps its id
        return self._hashed[key][1]


_MODULES = 256
"""Most recorded modules of a model, to bound time and the size of the trace; the deepest are left out first."""
_KEY = "output"  # takes the place of a parameter's name within its module
_OUTPUT_CALLS = 4096
"""Most recorded calls in a step. Further ones are left out, and then the modules have other counts on ranks."""


class OutputRecorder:
    """Sums the outputs of each module until the step of the optimizer. `ScriptRecorder` makes it, chooses modules
    before a model's first call, and adds each output. A step takes the sums."""

    def __init__(self, writer: Writer, parameter_names: models.Names) -> None:
        self._writer, self._names = writer, parameter_names
        self._models, self._chosen, self._known = WeakIdKeyDictionary(), WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self._count = 0
        self.forget()

    def forget(self) -> None:
        """Discard the outputs since the last step."""
        self._calls: list[tuple[nn.Module, torch.dtype, int]] = []  # of each part
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self, model: nn.Module) -> None:
        """Choose the modules of a model to record, before its first call."""
        if model in self._models:
            return
        self._models[model] = True
        if not models.has_state(model):
            return
        outer_first = sorted(named_modules(model), key=lambda named: named[0].count("."))
        self._chosen.update((module, True) for _, module in outer_first[:_MODULES])

    def add(self, module: nn.Module, output: Any) -> None:
        """Add the outputs of a call. Outputs that cannot be summed are left out: they decide no verdict."""
        if module not in self._chosen or len(self._parts) >= _OUTPUT_CALLS:
            return
        with torch.no_grad(), contextlib.suppress(Exception):  # such as a tensor subclass without these operators
            for value in [output] if isinstance(output, torch.Tensor) else leaves(output):
                elements = _local(value) if isinstance(value, torch.Tensor) else None
                if elements is not None:
                    numbers = statistics(elements)
                    self._calls.append((module, elements.dtype, elements.numel()))
                    self._parts.append(numbers)

    def taken(self) -> dict[int, Numbers]:
        """Return bits, norm, sum and count of the outputs since the last step, by number of the module."""
        calls_by_module: dict[int, list[OutputSummary]] = {}
        for (module, dtype, count), (bits, own) in zip(self._calls, on_host_together(self._parts), strict=True):
            number = self._number(module, dtype)
            if number is not None:
                calls_by_module.setdefault(number, []).append(OutputSummary(bits, own[0], total(own[1:]), count))
        totals = {number: joined_outputs(pieces) for number, pieces in calls_by_module.items()}
        return {number: [own.bits, short(own.norm), short(own.sum), own.count] for number, own in totals.items()}

    def _number(self, module: nn.Module, dtype: torch.dtype) -> int | None:
        """Return the number of a module, which is recorded on first use; None for a module outside of all models."""
        if module not in self._known:
            named = self._names.of_key(module, _KEY)
            if named is None:
                self._known[module] = None
            else:
                self._known[module], self._count = self._count, self._count + 1
                name = named[0].removesuffix(_KEY).removesuffix(".")
                self._writer.write("output", name=name, dtype=name_of(dtype))
        return self._known[module]


def _local(output: Any) -> torch.Tensor | None:
    """Return the elements of an output on this rank, flattened; None if they are partial results, or unreadable."""
    if is_distributed(output):
        if any(placed.is_partial() for placed in output.placements):
            return None
        output = output.to_local()
    value = readable(output) if output.layout is torch.strided else None
    if value is None or not (value.is_floating_point() or value.is_complex()):
        return None
    return as_real(value).reshape(-1) if value.element_size() > 1 and value.numel() else None


_REDUCTIONS = tuple(name for name, row in COLLECTIVES.items() if row.reduces)
_JOINING = tuple(name for name, row in COLLECTIVES.items() if row.transfer is not None and row.transfer.joins)
_STEPS = 4  # number of recorded steps: a wrong factor shows from the first step on
_CALLS = 256  # largest number of recorded calls per step, to bound time and the size of the trace


class Flow:
    """Records the calls since the last step, with the norms of the gradients after each.
    The function `install` makes it for a run of several ranks. Patched reductions and the recorder's `backward` add
    calls; each step takes them. It records the first `_STEPS` steps only."""

    def __init__(self, parameter_names: models.Names, guard: Guard, note: Callable[..., None]) -> None:
        self._names, self._guard, self._note_event = parameter_names, guard, note
        self._steps = 0
        self._calls: list[tuple[str, dict[int, float]]] = []
        self._within = False
        self._cut: set[str] = set()  # calls that join tensors, although gradients flow to them

    def install(self) -> None:
        """Record reductions from now on."""
        from torch.distributed import distributed_c10d as c10d

        patches = Patches(sparing="mgpu_check")
        for name in (*_REDUCTIONS, *_JOINING):
            function = getattr(c10d, name, None)
            if function is not None:
                watch = functools.partial(self._watched, FunctionForm(function))
                patches.replace(function, around(watch)(function))
        patches.apply()

    def after_backward(self) -> None:
        """Record the gradients after a backward pass."""
        if self._is_noted():
            parameters = {id(p): p for module in self._names.modules() for p in module._parameters.values()}
            self._note("backward", (p for p in parameters.values() if p is not None))

    def taken(self, numbers: Mapping[int, int]) -> list[tuple[str, dict[int, float]]]:
        """Return the recorded calls of this step in order, and start the next step.

        A call is a backward pass or a reduction. Each has a description with its file and line, and norms of gradients
        after it, by number of the parameter. A backward pass has the norms of all gradients, a reduction that of the
        reduced gradient, and an asynchronous reduction none. Only `_STEPS` steps are recorded, and `_CALLS` calls of
        each.

        `numbers`: id of a parameter -> its number in the trace; other parameters are left out.
        """
        calls, self._calls = self._calls, []
        self._steps += 1
        return [(call, {numbers[i]: n for i, n in norms.items() if i in numbers}) for call, norms in calls]

    def _is_noted(self) -> bool:
        return self._steps < _STEPS and len(self._calls) < _CALLS and not self._within

    def _watched(self, form: FunctionForm, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._is_noted():
            return function(*args, **kwargs)
        with replaced(self, "_within", True):
            result = function(*args, **kwargs)
        self._guard(self._reduced)(form, result, args, kwargs)
        return result

    def _reduced(self, form: FunctionForm, result: Any, args: Any, kwargs: Any) -> None:
        operand = form.argument(form.operand, args, kwargs) if form.operand else None
        if form.name in _JOINING:
            if torch.is_grad_enabled() and isinstance(operand, torch.Tensor) and operand.grad_fn is not None:
                file, line = calling_line()
                if (description := f"{form.name} at {relative(file)}:{line}") not in self._cut:
                    self._cut.add(description)
                    self._note_event("cut", call=description)
            return
        group = group_of(form.argument(form.group, args, kwargs))
        values = ((name, form.argument(name, args, kwargs)) for name in form.options)
        options = [option(name, value) for name, value in values if value is not None]
        description = f"{form.name} ({', '.join([*options, f'{len(group.ranks)} ranks' if group else ''])})"
        # An asynchronous call may not have changed its operand yet.
        owners = [] if isinstance(result, torch.distributed.Work) else self._owners(operand)
        self._note(description, owners)

    def _owners(self, operand: Any) -> Sequence[torch.Tensor]:
        if not isinstance(operand, torch.Tensor):
            return []
        parameters = (p for module in self._names.modules() for p in module._parameters.values() if p is not None)
        return [p for p in parameters if p.grad is not None and _is_same(p.grad, operand)][:1]

    def _note(self, description: str, parameters: Iterable[torch.Tensor]) -> None:
        file, line = calling_line()
        gradients = {id(p): value for p in parameters if (value := _plain(p.grad)) is not None}
        norms = [torch.linalg.vector_norm(value, dtype=torch.float64).cpu() for value in gradients.values()]
        values = torch.stack(norms).tolist() if norms else []
        self._calls.append((f"{description} at {relative(file)}:{line}", dict(zip(gradients, values, strict=True))))


def _is_same(gradient: torch.Tensor, operand: torch.Tensor) -> bool:
    if gradient is operand or gradient.shape != operand.shape:
        return gradient is operand
    own, reduced = _plain(gradient), _plain(operand)
    return own is not None and reduced is not None and own.data_ptr() == reduced.data_ptr()


def _plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the floating-point numbers of a strided tensor; None for any other tensor."""
    if tensor is None or is_distributed(tensor) or is_pending(tensor) or tensor.layout is not torch.strided:
        return None
    value = readable(tensor)
    real = value is not None and bool(value.numel()) and (value.is_floating_point() or value.is_complex())
    return value if real else None


_CHECKED_CALLS = 100  # calls of models that are checked for random draws, to bound the time
_CHECKED_STEPS = 2  # the same of optimizers: the first makes the state


def _watching_errors(hooked: Callable[..., Any], raised: Callable[[Any], None]) -> Callable[..., Any]:
    """Wrap `hooked`, which adds the hooks around a step, to call `raised` with the optimizer if the step raises."""

    def watched(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except BaseException:  # no hook after the step runs then: torch/optim/optimizer.py, profile_hook_step, 2.13
            raised(args[0])
            raise

    return functools.wraps(hooked)(lambda func: around(watched)(hooked(func)))


def install(
    fd: int,
    entered: int | None,
    steps: int | None,
    taped: int | None,
    moved: int | None,
    store: tuple[str, int] | None,
    places: script_calls.Places,
    distinct: bool,
    files: Files,
    held: bool = False,
) -> ScriptRecorder:
    """Record this process from now on, and return its recorder.

    Args:
        fd: file descriptor that receives the trace.
        entered: file descriptor that receives the number of entered collectives; None if collectives block, so that
            stacks show the waiting ranks.
        steps: number of optimizer steps until the process waits to be ended; None: the script runs to its end.
        taped: number of steps that the file `tape` receives; None: the usual number.
        moved: seed of perturbations; None: no perturbations.
        store, places: see `mgpu_check.compare.in_script.script_calls.install_meeting`; None: ranks meet on their own.
        distinct: make the elements of constant tensors distinct.
        files: see `mgpu_check.compare.in_script.placements.Files`.
        held: the script has started this process, so its recorder waits for `ScriptRecorder.take_over`.
    """
    rank, world = rank_and_world()
    # Defaults that the script may change: TF32 and similar modes round too coarsely, and would mask differences.
    switches.exact_precision()
    torch.backends.cudnn.deterministic = True
    recorder = ScriptRecorder(Writer(fd, held), world, steps, None if moved is None else Perturbation(moved))
    recorder.keep = files.keep
    if files.wholes is not None:
        placed = {} if files.placed is None else read_placements(files.placed)
        recorder.states.shapes = (kept := read_wholes(files.wholes)).states
        recorder.known.placing = Placing(recorder.names, kept.parameters, kept.buffers, placed, files.found)
    if distinct:
        perturbations.make_constants_distinct()
    recorder.writer.write("start", format=FORMAT, version=VERSION, rank=rank, world=world, torch=torch.__version__)
    if files.tape is not None or files.replay is not None:
        from mgpu_check.compare.in_script import replay

        replay.install(recorder, steps if files.tape is None else taped, rank, files.tape, files.replay)
    if files.kept is not None:  # before the hook after a step, which may end the process
        from mgpu_check.compare.traces import attachments

        attachments.install(recorder, files.kept)
    recorder.watch_modules()
    register_optimizer_step_pre_hook(recorder.guard(recorder.before_step))
    register_optimizer_step_post_hook(recorder.guard(recorder.after_step))
    patches = Patches()  # for as long as the process lives
    raised = recorder.guard(recorder.raised)
    patches.wrap(torch.optim.Optimizer, "profile_hook_step", functools.partial(_watching_errors, raised=raised))
    patches.wrap(torch.optim.Optimizer, "__init__", around(recorder.make_optimizer))
    patches.wrap(torch.autograd, "backward", around(recorder.backward))  # called by torch/_tensor.py, backward
    script_calls.install(recorder, world)
    if store is not None:
        script_calls.install_meeting(recorder.note, store, places)
    recorder.known.placing.coordinates = script_calls.install_meshes(recorder.note)
    if world > 1 and torch.distributed.is_available():
        recorder.flow = Flow(recorder.names, recorder.guard, recorder.note)
        recorder.flow.install()
    if entered is not None:
        recorder.count = install_count(entered)
    atexit.register(recorder.at_exit)
    return recorder


class ScriptRecorder:
    """Records the events and tensors of a script, step by step.

    `install` makes one in each recorded process, after torch is imported. The hooks and patches of `install` call it
    until the interpreter exits; `at_exit` then writes the last event. After the last requested step, or an error of its
    own, it waits until the runner kills the process.
    """

    def __init__(self, writer: Writer, world: int, steps: int | None, perturbation: Perturbation | None) -> None:
        self.writer, self.world, self.last, self.perturbation = writer, world, steps, perturbation
        self._thread: int | None = None
        self._drawn: tuple[list[int], ...] | None = None  # states of generators before a step of an optimizer
        self._meshes: set[Any] = set()  # of the parameters of optimizers
        self.guard = guard_with(self.broken)
        self.names = models.Names()
        self.known = Parameters(writer, self.names)
        self.outputs = OutputRecorder(writer, self.names)
        self.keep: int | None = None
        self.states = States(writer, self.names, self.known, lambda: self.keep)
        self.count: Callable[[], None] = lambda: None  # the collectives that were entered
        self.finish: Callable[[], None] = lambda: None  # called after the last step
        self.resume: Callable[[], None] = lambda: None  # called when a forked process takes over
        self.flow: Flow | None = None  # None on one device, which reduces no gradients
        self.backwards = 0  # depth of nested backward passes
        self.passes = 0  # finished ones
        self.done = 0
        self._here = threading.local()  # replicas of DataParallel are called in threads of their own
        self._told: set[str] = set()
        self._exited = False
        self._mode_of_training = False  # a model was called in training mode
        self._calls = 0
        self._called = WeakIdKeyDictionary()  # modules
        self._optimizers: dict[int, int] = {}
        self._held: list[Any] = []  # keeps objects alive whose ids are keys
        self._losses: list[float] = []
        self._inputs = InputRecorder()
        self.labels: list[torch.Tensor] = []
        self._before: dict[int, Numbers] = {}
        self._gradients: dict[int, Numbers | None] | None = None
        self._idle: list[int] = []
        self._start: dict[int, Numbers | None] = {}  # by id, the parameters before an optimizer's first step
        self._stepping: Any = None
        self._within: list[Any] = []  # the optimizers that the stepping one uses

    def note(self, event: str, **fields: object) -> None:
        self.writer.write(event, after=self.done, **fields)

    def forked(self) -> bool:
        return os.getpid() != self.writer.pid

    def take_over(self) -> bool:
        """Record this process, which the script has started. Return False if another one has trained already."""
        start = os.pread(self.writer.fd, HEAD, 0)
        if any(f'{{"event":"{event}"'.encode() in start for event in ("group", "started", "step")):
            return False
        self.writer.take_over()
        self.resume()
        if multiprocessing.parent_process() is not None:
            # A forked process of multiprocessing leaves without `atexit`: Lib/multiprocessing/popen_fork.py, _launch.
            multiprocessing.util.Finalize(None, self.at_exit, exitpriority=0)
        return True

    def wait(self, event: str, **fields: object) -> None:
        """Record the event, also in a forked process, and wait until the runner ends all processes together."""
        if self.forked():
            self.writer.take_over()
        self.note(event, **fields)
        threading.Event().wait()

    def broken(self, error: str, location: str) -> None:
        """Record an error of the recorder, and wait until all processes are ended."""
        if not self.forked():
            self.note("broken", error=error, place=location)
            self.wait("stopped")

    def at_exit(self) -> None:
        """Record how the script has ended; a crash of the interpreter after "ended" is not a failure of the script."""
        if self._exited or self.forked() or self.writer.taken_over():
            return
        self._exited = True
        # Python sets `last_value` for an uncaught exception; in a process of multiprocessing it is still on its way.
        error = getattr(sys, "last_value", None) or sys.exc_info()[1]
        raised = error is not None and not (isinstance(error, SystemExit) and not error.code)
        if not raised:
            self.finish()
        fields = {"unimported": error.name or ""} if isinstance(error, ImportError) else {}
        self.note("raised" if raised else "ended", at=time.monotonic(), **fields)

    def watch_modules(self) -> list[RemovableHandle]:
        leave = register_module_forward_hook(self.guard(self.leave), with_kwargs=True, always_call=True)
        return [register_module_forward_pre_hook(self.guard(self.enter)), leave]

    def make_optimizer(self, original: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._thread = self._thread or threading.get_ident()
        trained = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self._meshes |= {parameter.device_mesh for parameter in trained if is_distributed(parameter)}

    def in_training_thread(self) -> bool:
        """Return whether this thread trains: the one that makes the first optimizer; until then, the main thread."""
        return threading.get_ident() == (self._thread or threading.main_thread().ident)

    def enter(self, module: nn.Module, args: Any) -> None:
        self._here.depth = getattr(self._here, "depth", 0) + 1
        if module._parameters or module._buffers:
            self._called[module] = True
        if self._here.depth == 1:
            self._enter_outermost(module)
        if self._here.recorded:
            self._inputs.enter(self._here.depth)

    def _enter_outermost(self, module: nn.Module) -> None:
        main = self.in_training_thread() and not is_transforming() and not is_tracing()
        self._here.trains = self._trains(module)
        trains = self._here.trains and not is_capturing()
        if main and trains and self.forked() and self.world == 1 and script_calls.trains_alone(module):
            self.take_over()
        if main and trains and torch.is_grad_enabled() and not self.forked() and self.writer.taken_over():
            self.writer.reclaim()
        self._here.recorded = main and trains and torch.is_grad_enabled() and not (self.backwards or self.forked())
        if main:
            with torch.no_grad():
                self.states.begin(module)
        if self._here.recorded:
            self.outputs.begin(module)
        if trains and self._calls < _CHECKED_CALLS:
            self._here.drawn = script_calls.generators()

    def _trains(self, module: nn.Module) -> bool:
        """Return whether a call of a model is one of training: in training mode, or with gradients if none has been.
        Models of `from_pretrained` start in evaluation mode, and scripts may leave them there."""
        if models.in_training(module):
            if not self._mode_of_training:
                self._inputs.forget()  # of a validation
                self.outputs.forget()
            self._mode_of_training, self._inputs.in_evaluation = True, False
            return True
        may_train = torch.is_grad_enabled() and not self._mode_of_training
        trainable = (parameter.requires_grad for _, parameter in named_parameters(module))
        self._inputs.in_evaluation = may_train and any(trainable)
        return self._inputs.in_evaluation

    def leave(self, module: nn.Module, args: Any, *rest: Any) -> Any:
        # If forward raises, a global hook gets no kwargs: torch/nn/modules/module.py, _call_impl, torch 2.13.
        kwargs, output = rest if len(rest) == 2 else ({}, None)
        if self._here.recorded and len(rest) == 2:
            with torch.no_grad():
                self._inputs.leave(module, self._here.depth, args, kwargs)
        self._here.depth -= 1
        if "narrow" not in self._told and (narrowing := models.narrowed(module, output)):
            self._told.add("narrow")
            self.note("narrow", **narrowing)
        if output is None or is_transforming() or is_tracing():
            return None
        if not self._here.depth and not self.backwards and not is_capturing():
            self._outermost(module)
        moved = None if module._modules or self.perturbation is None else self.perturbation.output(output)
        if self._here.recorded:
            self.outputs.add(module, output if moved is None else moved)
        return moved

    def _outermost(self, module: nn.Module) -> None:
        if not models.has_state(module) or not self.in_training_thread():
            return
        self.names.called(module)
        if not (self._here.trains and torch.is_grad_enabled()) or next(named_parameters(module), None) is None:
            return
        before, self._here.drawn = getattr(self._here, "drawn", None), None
        self._calls += 1
        if before is not None and "random" not in self._told and before != script_calls.generators():
            self._told.add("random")
            self.note("random", **models.method_of(type(models.unwrapped(module)), "forward"))
        if (key := f"module {type(module).__name__}") not in self._told:
            self._told.add(key)
            sharded = models.is_fully_sharded(module, self._meshes, self.world)
            self.note("module", **(facts := models.described(module)), fully_sharded=sharded)
            if facts["replicas"] > 1 and self.world > 1 and not script_calls.in_a_group():
                self.wait("alone")

    def backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = tuple(tensors) if isinstance(tensors, Iterator) else tensors
        if not self.backwards and not is_capturing():  # a nested backward recomputes a checkpointed part
            self.guard(self._take_losses)(tensors)
        self.backwards += 1
        try:
            return original(tensors, *args, **kwargs)
        finally:
            self.backwards -= 1
            self.passes += not self.backwards
            if not self.backwards:
                self._inputs.next_micro_batch()
            self.count()
            if self.flow is not None and not self.backwards:
                self.guard(self.flow.after_backward)()

    def _take_losses(self, roots: Any) -> None:
        losses = [root for root in tensors_of(roots) if root.numel() == 1 and root.is_floating_point()]
        self._losses += [float(value) for loss in losses if (value := readable(loss)) is not None]

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if is_capturing():
            return None  # a captured step runs when its graph is replayed, and calls no hooks then
        if self._stepping is not None and self._stepping is not optimizer:
            self._within.append(optimizer)  # an inner optimizer, as in ZeroRedundancyOptimizer
            return None
        self._stepping, self._within = optimizer, []
        if id(optimizer) not in self._optimizers:
            with torch.no_grad():
                parameters = parameters_of(optimizer)
                self._start = dict(zip(map(id, parameters), summaries(parameters), strict=True))
        self._gradients = None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._take_gradients(optimizer)
            self._drawn = script_calls.generators() if self.done < _CHECKED_STEPS else None
            return None

        @functools.wraps(closure)
        def watched() -> Any:
            """Compute gradients within the step, which records those of its first call."""
            loss = closure()
            self.guard(self._take_gradients)(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched}
        return (args[0], watched, *args[2:]), kwargs

    def _take_gradients(self, optimizer: Any) -> None:
        """Perturb the gradients, and record the first ones of the step.
        Not earlier: the model may not have been called."""
        with torch.no_grad():
            pieces = self.known.parts(optimizer, self.number_of(optimizer))
            if id(optimizer) not in self._optimizers:
                self._optimizers[id(optimizer)] = len(self._optimizers)
                self._held.append(optimizer)
                self._before = {piece.number: start for piece in pieces if (start := self._start_of(piece)) is not None}
                self._start = {}
            self.known.note_groups(optimizer, self.number_of(optimizer))
            if self.perturbation is not None:
                self.perturbation.gradients([parameter.grad for parameter in parameters_of(optimizer)])
            if self._gradients is not None:
                return
            gradients = summaries([piece.parameter.grad for piece in pieces], [piece.part.cut for piece in pieces])
            self._gradients = {piece.number: numbers for piece, numbers in zip(pieces, gradients, strict=True)}
            self._idle = []
            for piece in pieces:
                gradient = piece.parameter.grad
                if gradient is None:
                    if self.names.owner(piece.parameter) not in self._called:
                        self._idle.append(piece.number)
                elif self._gradients[piece.number] is None and readable(gradient) is None:
                    self.known.note_unread(f"the gradient of {piece.part.label}", "", gradient)

    def number_of(self, optimizer: Any) -> int:
        return self._optimizers.get(id(optimizer), len(self._optimizers))

    def is_stepping(self, optimizer: Any) -> bool:
        return self._stepping is optimizer and self._gradients is not None and not is_capturing()

    def _start_of(self, piece: NumberedPart) -> Numbers | None:
        """Return the numbers of a part before the first step of its optimizer; call it before the part changes."""
        cut = piece.part.cut
        if self.keep is not None and (value := whole(piece.parameter)) is not None:
            own = value if cut is None else cut.part.of(value).reshape(cut.part.shape)
            write_tensor(self.keep, "parameter", piece.part.label, own)
        return self._start.get(id(piece.parameter)) if cut is None else summaries([piece.parameter], [cut])[0]

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._stepping is not optimizer or is_capturing():
            return
        if self._gradients is None:  # the optimizer did not call its closure
            self._take_gradients(optimizer)
        self._stepping = None
        if self._drawn is not None and self._drawn != script_calls.generators():
            self.note("update", **models.method_of(type(optimizer), "step"))
        self._drawn = None
        with torch.no_grad():
            pieces = self.known.parts(optimizer, self.number_of(optimizer))
            after = numbers_of(pieces)
            states = self.states.after([optimizer, *self._within], pieces, self._called)
            cuts = [(piece, piece.part.cut) for piece in pieces]
            single = {id(p.parameter): p.number for p, cut in cuts if cut is None or cut.part.within is None}
        self.done += 1
        self.writer.write(
            "step",
            step=self.done,
            optimizer=self._optimizers[id(optimizer)],
            losses=self._losses,
            inputs=self._inputs.calls,
            labels=[float(count) for count in self.labels],
            before=self._before,
            gradients=self._gradients,
            parameters=after,
            states=states,
            outputs=self.outputs.taken(),
            **({"idle": self._idle} if self._idle else {}),
            calls=[] if self.flow is None else self.flow.taken(single),
        )
        self._before = {}
        self._forget()
        if self.done == self.last:
            self.finish()
            self.wait("stopped")

    def raised(self, optimizer: Any) -> None:
        """Discard the step of `optimizer`, which raised, with its losses and samples."""
        if self._stepping is not optimizer or is_capturing():
            return
        self._stepping = None
        if self._before:
            # It was the first step of the optimizer, so the next one counts as the first.
            self._before = {}
            del self._optimizers[id(optimizer)]
        self._forget()

    def scaled_step(self, step: Callable[[], Any]) -> Any:
        """Run a `GradScaler` step; if it skips the optimizer step, record that, and discard its losses and samples."""
        before = self.done
        result = step()
        if self.done == before:
            self.note("skipped")
            self._forget()
        return result

    def _forget(self) -> None:
        self._losses, self.labels = [], []
        self._inputs.forget()
        self.outputs.forget()
