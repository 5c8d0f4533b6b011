"""Record the trace in the script's process, through hooks on optimizers, modules and backward.

The trace covers only calls that the script makes itself; see `docs/reference/compare.md`.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from mgpu_check.compare import constants, meeting, meshes, started, watched
from mgpu_check.compare.described import described, forward_of, has_state, in_training, narrowed
from mgpu_check.compare.entered import install as install_count
from mgpu_check.compare.errors import guard_with, watching_errors
from mgpu_check.compare.flow import Flow
from mgpu_check.compare.input_recorder import InputRecorder
from mgpu_check.compare.naming import Names
from mgpu_check.compare.output_recorder import OutputRecorder
from mgpu_check.compare.parameters import NumberedPart, Parameters, numbers_of, parameters_of
from mgpu_check.compare.perturb import Perturbation
from mgpu_check.compare.placements import Files, read_placements
from mgpu_check.compare.placing import Placing
from mgpu_check.compare.states import States
from mgpu_check.compare.summaries import Numbers, summaries, whole
from mgpu_check.compare.trace import FORMAT, VERSION, Writer
from mgpu_check.compare.wholes import read_wholes, write_whole
from mgpu_check.processes.python_environment import rank_and_world
from mgpu_check.torch_hooks import switches
from mgpu_check.torch_hooks.nested import named_parameters, tensors_of
from mgpu_check.torch_hooks.patches import Patches
from mgpu_check.torch_hooks.tensors import is_capturing, is_transforming, readable

_CALLS = 100  # calls of models that are checked for random draws, to bound the time


def install(
    fd: int,
    entered: int | None,
    steps: int | None,
    taped: int | None,
    moved: int | None,
    store: tuple[str, int],
    places: meeting.Places,
    apart: bool,
    files: Files,
) -> None:
    """Record this process from now on.

    Args:
        fd: file descriptor that receives the trace.
        entered: file descriptor that receives the number of entered collectives; None if collectives block, so that
            stacks show the waiting ranks.
        steps: number of optimizer steps until the process waits to be ended; None: the script runs to its end.
        taped: number of steps that the file `tape` receives; None: the usual number.
        moved: seed of perturbations; None: no perturbations.
        store, places: see `mgpu_check.compare.meeting.install`.
        apart: make the elements of constant tensors distinct.
        files: see `mgpu_check.compare.placements.Files`.
    """
    rank, world = rank_and_world()
    # Defaults that the script may change: TF32 and similar modes round too coarsely, and would mask differences.
    switches.exact_precision()
    torch.backends.cudnn.deterministic = True
    recorder = ScriptRecorder(Writer(fd), world, steps, None if moved is None else Perturbation(moved))
    recorder.keep = files.keep
    if files.wholes is not None:
        placed = {} if files.placed is None else read_placements(files.placed)
        recorder.states.shapes = (kept := read_wholes(files.wholes)).states
        recorder.known.placing = Placing(recorder.names, kept.parameters, kept.buffers, placed, files.found)
    if apart:
        constants.install()
    recorder.writer.write("start", format=FORMAT, version=VERSION, rank=rank, world=world, torch=torch.__version__)
    if files.tape is not None or files.replay is not None:
        from mgpu_check.compare import replay

        replay.install(recorder, steps if files.tape is None else taped, rank, files.tape, files.replay)
    if files.kept is not None:  # before the hook after a step, which may end the process
        from mgpu_check.compare.traces import keeping

        keeping.install(recorder, files.kept)
    recorder.watch_modules()
    register_optimizer_step_pre_hook(recorder.guard(recorder.before_step))
    register_optimizer_step_post_hook(recorder.guard(recorder.after_step))
    patches = Patches()  # for as long as the process lives
    raised = recorder.guard(recorder.raised)
    patches.wrap(torch.optim.Optimizer, "profile_hook_step", functools.partial(watching_errors, raised=raised))
    patches.wrap(torch.autograd, "backward", recorder.watched_backward)  # Tensor.backward calls it, too
    watched.install(recorder, world)
    meeting.install(recorder.note, store, places)
    recorder.known.placing.coordinates = meshes.install(recorder.note)
    started.install(fd)
    if world > 1 and torch.distributed.is_available():
        recorder.flow = Flow(recorder.names, recorder.guard, recorder.note)
        recorder.flow.install()
    if entered is not None:
        recorder.count = install_count(entered)
    atexit.register(recorder.at_exit)


class ScriptRecorder:
    """Records the events and tensors of a script, step by step."""

    def __init__(self, writer: Writer, world: int, steps: int | None, perturbation: Perturbation | None) -> None:
        self.writer, self.world, self.last, self.perturbation = writer, world, steps, perturbation
        self.guard = guard_with(self.broken)
        self.names = Names()
        self.known = Parameters(writer, self.names)
        self.outputs = OutputRecorder(writer, self.names)
        self.keep: int | None = None
        self.states = States(writer, self.names, self.known, lambda: self.keep)
        self.count: Callable[[], None] = lambda: None  # the collectives that were entered
        self.finish: Callable[[], None] = lambda: None  # called after the last step
        self.flow: Flow | None = None  # None on one device, which reduces no gradients
        self.backwards = 0  # depth of nested backward passes
        self.passes = 0  # finished ones
        self.done = 0
        self._here = threading.local()  # replicas of DataParallel are called in threads of their own
        self._told: set[str] = set()
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

    def note(self, event: str, **what: object) -> None:
        self.writer.write(event, after=self.done, **what)

    def forked(self) -> bool:
        return os.getpid() != self.writer.pid

    def wait(self, event: str) -> None:
        """Record the event, also in a forked process, and wait until the runner ends all processes together."""
        self.writer.pid = os.getpid()
        self.note(event)
        threading.Event().wait()

    def broken(self, error: str, place: str) -> None:
        """Record an error of the recorder, and wait until all processes are ended."""
        if not self.forked():
            self.note("broken", error=error, place=place)
            self.wait("stopped")

    def at_exit(self) -> None:
        """Record how the script has ended; a crash of the interpreter after "ended" is not a failure of the script."""
        raised = getattr(sys, "last_value", None) is not None  # set by an uncaught exception
        if not raised:
            self.finish()
        self.note("raised" if raised else "ended", at=time.monotonic())

    def watch_modules(self) -> list[RemovableHandle]:
        leave = register_module_forward_hook(self.guard(self.leave), with_kwargs=True, always_call=True)
        return [register_module_forward_pre_hook(self.guard(self.enter)), leave]

    def enter(self, module: nn.Module, args: Any) -> None:
        self._here.depth = getattr(self._here, "depth", 0) + 1
        if module._parameters or module._buffers:
            self._called[module] = True
        if self._here.depth == 1:
            self._enter_outermost(module)
        if self._here.recorded:
            self._inputs.enter(self._here.depth)

    def _enter_outermost(self, module: nn.Module) -> None:
        main = threading.current_thread() is threading.main_thread() and not is_transforming()
        trains = in_training(module) and not is_capturing()
        self._here.recorded = main and trains and torch.is_grad_enabled() and not (self.backwards or self.forked())
        if main:
            with torch.no_grad():
                self.states.begin(module)
        if self._here.recorded:
            self.outputs.begin(module)
        if trains and self._calls < _CALLS:
            self._here.drawn = watched.generators()

    def leave(self, module: nn.Module, args: Any, *rest: Any) -> Any:
        kwargs, output = rest if len(rest) == 2 else ({}, None)  # torch gives no kwargs if forward raises
        if self._here.recorded and len(rest) == 2:
            with torch.no_grad():
                self._inputs.leave(module, self._here.depth, args, kwargs)
        self._here.depth -= 1
        if "narrow" not in self._told and (found := narrowed(module, output)):
            self._told.add("narrow")
            self.note("narrow", **found)
        if output is None or is_transforming():
            return None
        if not self._here.depth and not self.backwards and not is_capturing():
            self._outermost(module)
        moved = None if module._modules or self.perturbation is None else self.perturbation.output(output)
        if self._here.recorded:
            self.outputs.add(module, output if moved is None else moved)
        return moved

    def _notice_draws(self, module: nn.Module) -> None:
        """Record the first model that draws random numbers in a call."""
        before, self._here.drawn = getattr(self._here, "drawn", None), None
        self._calls += 1
        if before is not None and "random" not in self._told and before != watched.generators():
            self._told.add("random")
            self.note("random", **forward_of(module))

    def _outermost(self, module: nn.Module) -> None:
        if not has_state(module) or threading.current_thread() is not threading.main_thread():
            return
        self.names.called(module)
        if not (in_training(module) and torch.is_grad_enabled()) or next(named_parameters(module), None) is None:
            return
        self._notice_draws(module)
        if (kind := f"module {type(module).__name__}") not in self._told:
            self._told.add(kind)
            self.note("module", **(found := described(module)))
            if found["replicas"] > 1 and self.world > 1 and not watched.in_a_group():
                self.wait("alone")

    # backward

    def watched_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
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

        return backward

    def _take_losses(self, roots: Any) -> None:
        losses = [root for root in tensors_of(roots) if root.numel() == 1 and root.is_floating_point()]
        self._losses += [float(value) for loss in losses if (value := readable(loss)) is not None]

    # optimizers

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
            return None
        watched = self._watched_closure(optimizer, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched}
        return (args[0], watched, *args[2:]), kwargs

    def _watched_closure(self, optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap `closure`, which computes gradients within the step; the step records those of its first call."""

        @functools.wraps(closure)
        def watched() -> Any:
            loss = closure()
            self.guard(self._take_gradients)(optimizer)
            return loss

        return watched

    def _take_gradients(self, optimizer: Any) -> None:
        """Perturb the gradients, and record the first ones of the step.

        Not earlier: the model may not have been called.
        """
        with torch.no_grad():
            parts = self.known.parts(optimizer, self.number_of(optimizer))
            if id(optimizer) not in self._optimizers:
                self._optimizers[id(optimizer)] = len(self._optimizers)
                self._held.append(optimizer)
                self._before = {one.number: start for one in parts if (start := self._start_of(one)) is not None}
                self._start = {}
            self.known.note_groups(optimizer, self.number_of(optimizer))
            if self.perturbation is not None:
                self.perturbation.gradients([parameter.grad for parameter in parameters_of(optimizer)])
            if self._gradients is None:
                found = summaries([one.parameter.grad for one in parts], [one.part.cut for one in parts])
                self._gradients = {one.number: numbers for one, numbers in zip(parts, found, strict=True)}
                for one, numbers in zip(parts, found, strict=True):
                    if numbers is None and one.parameter.grad is not None and readable(one.parameter.grad) is None:
                        self.known.note_unread(f"the gradient of {one.part.label}", "", one.parameter.grad)
                self._idle = [one.number for one in parts if one.parameter.grad is None and not self._is_called(one)]

    def number_of(self, optimizer: Any) -> int:
        return self._optimizers.get(id(optimizer), len(self._optimizers))

    def is_stepping(self, optimizer: Any) -> bool:
        return self._stepping is optimizer and self._gradients is not None and not is_capturing()

    def _start_of(self, one: NumberedPart) -> Numbers | None:
        """Return the numbers of a part before the first step of its optimizer; call it before the part changes."""
        if self.keep is not None:
            value = whole(one.parameter)
            if value is not None:
                write_whole(self.keep, one.part.label, value if one.part.cut is None else one.part.cut.whole_of(value))
        if one.part.cut is None:
            return self._start.get(id(one.parameter))
        return summaries([one.parameter], [one.part.cut])[0]

    def _is_called(self, one: NumberedPart) -> bool:
        return self.names.owner(one.parameter) in self._called

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._stepping is not optimizer or is_capturing():
            return
        if self._gradients is None:  # the optimizer did not call its closure
            self._take_gradients(optimizer)
        self._stepping = None
        with torch.no_grad():
            parts = self.known.parts(optimizer, self.number_of(optimizer))
            after = numbers_of(parts)
            states = self.states.after([optimizer, *self._within], parts, self._called)
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
            calls=self._calls_of(parts),
        )
        self._before = {}
        self._forget()
        if self.done == self.last:
            self.finish()
            self.wait("stopped")

    def _calls_of(self, parts: list[NumberedPart]) -> list[tuple[str, dict[int, float]]]:
        """Return the recorded calls that led to the gradients of this step."""
        single = {
            id(one.parameter): one.number for one in parts if one.part.cut is None or one.part.cut.part.within is None
        }
        return [] if self.flow is None else self.flow.taken(single)

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
