"""Record the optimizers that step in a rank, and the buffers that DistributedDataParallel broadcasts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mgpu_check.diagnosis.observed import HeldPiece, ObservedRun, Outside
from mgpu_check.diagnosis.results import Kind, Result
from mgpu_check.gates.applied_gradients import AppliedGradients
from mgpu_check.gates.holdings import Held, Holdings, named_tensors, parameters_of
from mgpu_check.gates.presence import least_anywhere
from mgpu_check.torch_hooks.graphs import is_capturing
from mgpu_check.torch_hooks.members import named_buffers
from mgpu_check.torch_hooks.patches import Patches, around
from mgpu_check.torch_hooks.tensors import as_real, digest_of, plain_copy

_STEPS = "_mgpu_check_steps"  # attribute of a graph
_OWN_COPY: tuple[Kind, str] = "optimizer", "own copy of {}"  # the model computes with another tensor


class CapturedSteps:
    """The optimizer steps in CUDA graphs: torch calls hooks only during the capture, and not in replays."""

    def __init__(self, replayed: Callable[[Optimizer], None]) -> None:
        """Call `replayed` after each replay with each optimizer that has stepped in it."""
        self._replayed = replayed
        self._captured: list[Optimizer] = []

    def add(self, optimizer: Optimizer) -> None:
        self._captured.append(optimizer)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with Patches() as patches:
            for name, new in (("capture_end", self._capture_end), ("replay", self._replay)):
                patches.wrap(torch.cuda.CUDAGraph, name, around(new))
            yield

    def _capture_end(self, original: Callable[[Any], None], graph: Any) -> None:
        captured, self._captured = self._captured, []
        original(graph)
        graph.__dict__[_STEPS] = captured

    def _replay(self, original: Callable[[Any], None], graph: Any) -> None:
        original(graph)
        for optimizer in graph.__dict__.get(_STEPS, ()):
            self._replayed(optimizer)


Nudge = Callable[[int, Result, torch.Tensor], None]


@dataclass(frozen=True)
class _TensorCopy:
    """A copy of the gradient or value of a parameter at an optimizer step."""

    kind: Kind
    of: torch.Tensor
    value: torch.Tensor


class StepRecorder:
    """Context that records the optimizers that step, and the buffers that DistributedDataParallel broadcasts.

    Args:
        several: there are other ranks, so the first step of each optimizer is compared with theirs.
        all_parameters: compare all parameters, not only parameters outside of the model.
        rewritten: gradients are read after the optimizer's step.
        histories: keep the histories of all parameters, not only of those outside of the model.

    Attributes:
        applied: the gradients that the optimizers applied.
        late: the first call of the step under test has ended.
    """

    def __init__(
        self,
        holdings: Holdings,
        modules: dict[str, nn.Module],
        seen: ObservedRun,
        deep: bool | str,
        nudge: Nudge | None,
        several: bool,
        all_parameters: bool,
        rewritten: bool,
        histories: bool,
    ) -> None:
        self._holdings, self._modules, self._seen, self._deep, self._nudge = holdings, modules, seen, deep, nudge
        self._several, self._all_parameters = several, all_parameters
        self._before_nudge: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._optimizers: dict[int, Optimizer] = {}
        self._stack = contextlib.ExitStack()
        self._gradients: list[_TensorCopy] = []
        self._steps: list[list[_TensorCopy]] = []
        self._captured = CapturedSteps(self._after_replay)
        self._under_way = 0  # steps of optimizers, one within the other
        self._rewritten = rewritten
        self.applied = AppliedGradients(
            rewritten, lambda tensor: several and (histories or holdings.is_foreign(tensor))
        )
        self.late = False

    def __enter__(self) -> StepRecorder:
        self.applied.start_histories(value for _, value in self._parameters())
        self._stack.enter_context(self._captured.watching())
        patches = self._stack.enter_context(Patches())
        patches.wrap(torch.autograd, "backward", around(self._backward))  # Tensor.backward calls it, too
        self._stack.callback(self.applied.close)
        self._stack.callback(register_optimizer_step_pre_hook(self._before).remove)
        self._stack.callback(register_optimizer_step_post_hook(self._after).remove)
        self._stack.callback(register_module_forward_pre_hook(self._forward).remove)
        return self

    def __exit__(self, *of_error: object) -> None:
        self._stack.close()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._under_way += 1
        self._holdings.steps(optimizer, self.late)
        if self._under_way == 1:
            self._gradients = []
        if not is_capturing():  # there are no values before the graph is replayed, and no hook is called then
            self.applied.before_step(optimizer, self._take_gradients)
            self._seen.nonlinear |= _is_nonlinear(optimizer)

    def _take_gradients(self, optimizer: Optimizer) -> None:
        """Record, copy and nudge the gradients that an optimizer is about to apply."""
        if self._several and id(optimizer) not in self._optimizers:
            self._take_first_step(optimizer)
        if self._under_way > 1:
            return  # a part of the step of a wrapper, such as ZeroRedundancyOptimizer
        if not self._rewritten:
            self._copy_gradients(optimizer)
        if self._nudge is None:
            return
        for name, value in self._parameters():
            if value.grad is not None and value.grad.layout == torch.strided:
                gradient = getattr(value.grad, "_local_tensor", value.grad)
                self._before_nudge.append((gradient, gradient.clone()))
                self._nudge(self._seen.optimizer_steps, Result("grads", name), gradient)

    def _copy_gradients(self, optimizer: Optimizer) -> None:
        self._gradients = []
        if self._deep and (_is_nonlinear(optimizer) or self._deep != "nonlinear"):
            self._gradients = [
                _TensorCopy("grads", one, plain_copy(torch.zeros_like(one) if one.grad is None else one.grad))
                for one in self._holdings.now()
            ]

    def _after_replay(self, optimizer: Optimizer) -> None:
        """Record a step in a CUDA graph, with the gradients that the graph leaves."""
        if is_capturing():  # the graph is replayed in another one
            self._captured.add(optimizer)
            return
        self._optimizers[id(optimizer)] = optimizer
        self._seen.nonlinear |= _is_nonlinear(optimizer)
        self._copy_gradients(optimizer)
        self._take_step()

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers[id(optimizer)] = optimizer
        self._under_way -= 1
        for gradient, before in self._before_nudge if not self._under_way else ():
            gradient.copy_(before)
        if not is_capturing():
            self.applied.after_step(optimizer)
        if self._under_way:
            return
        self._before_nudge.clear()
        if is_capturing():
            self._captured.add(optimizer)
            return
        if self._rewritten:
            self._copy_gradients(optimizer)
        self._take_step()

    def _take_step(self) -> None:
        self._seen.optimizer_steps += 1
        if self._deep:
            rest = self._holdings.now() if self._deep is True else ()
            self._steps.append([*self._gradients, *(_TensorCopy("params", one, plain_copy(one)) for one in rest)])

    def _take_first_step(self, optimizer: Optimizer) -> None:
        """Record the values and gradients at an optimizer's first step, if the gradients can distinguish ranks."""
        names = {id(value): name for name, value in self._parameters()}
        which = f" of optimizer {len(self._optimizers)}" if self._optimizers else ""
        for index, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                name = names.get(id(parameter))
                if (name is None or self._all_parameters) and _tells_ranks_apart(parameter):
                    name = name or f"{_unnamed(position, index)}{which}"
                    self._seen.stepped.setdefault(name, (digest_of(parameter.detach()), digest_of(parameter.grad)))

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return parameters_of(self._modules)

    def _backward(self, original: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        self._seen.backwards += 1
        if self._several and isinstance(tensors, torch.Tensor) and not tensors.dim() and not is_capturing():
            self._seen.losses.append(float(plain_copy(tensors)))
        original(tensors, *args, **kwargs)

    def _forward(self, module: nn.Module, args: Any) -> None:
        self._holdings.calls(module)
        if isinstance(module, DistributedDataParallel) and module.broadcast_buffers:
            inside = {id(buffer) for _, buffer in named_buffers(module)}
            self._seen.broadcast |= {
                Result(kind, name) for kind, name, value, _, _ in named_tensors(self._modules) if id(value) in inside
            }

    def take_steps(self, held: dict[int, Held]) -> None:
        """Record the results of each optimizer step."""
        for copies in self._steps:
            whole: dict[Result, torch.Tensor] = {}
            pieces: list[HeldPiece] = []
            for copy in copies:
                one = held.get(id(copy.of))
                if one is not None:
                    put(whole, pieces, copy.kind, "{}", one, copy.value)
            self._seen.snapshots.append(whole)
            self._seen.pieces_of_steps.append(pieces)
        self._steps.clear()

    def take_optimizers(self, held: dict[int, Held]) -> None:
        seen = self._seen
        seen.optimizers = len(self._optimizers)
        partly = self._states_of_some_ranks(held)
        order = {identity: number for number, identity in enumerate(held)}
        for number, optimizer in enumerate(self._optimizers.values()):
            which = f" of optimizer {number}" if len(self._optimizers) > 1 else ""
            states: list[tuple[Held, torch.Tensor]] = []
            for index, group in enumerate(optimizer.param_groups):
                if isinstance(rate := group.get("lr"), (int, float, torch.Tensor)):
                    rate = plain_copy(torch.as_tensor(rate, dtype=torch.float64))
                    seen.values[Result("optimizer", f"learning rate of group {index}{which}")] = rate
                seen.groups += 1
                settings = {key: one for key, one in group.items() if isinstance(one, (bool, int, float, str))}
                for position, parameter in enumerate(group["params"]):
                    one = held.get(id(parameter)) or Held(
                        "params",
                        _unnamed(position, index),
                        parameter,
                        outside=True,
                        late=self._holdings.is_late(parameter),
                    )
                    seen.settings |= dict.fromkeys(one.wholes, settings)
                    if id(parameter) not in partly:
                        states.append((one, parameter))
            # Copies of DTensors are gathered: in the order of the model, because groups may differ between ranks.
            states.sort(key=lambda state: order.get(id(state[1]), len(order)))
            for one, parameter in states:
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        copy, text = one.copy_of(value), f"{key} of {{}}{which}"
                        put(seen.values, seen.pieces, "optimizer", text, one, copy)
                        self.note_outside("optimizer", text, one)
        self._optimizers.clear()

    def note_outside(self, kind: Kind, text: str, one: Held) -> None:
        """Record the history of a result, if its tensor is not part of the model; see `put`."""
        if one.outside:
            outside = Outside(self.applied.history(one.tensor), one.copy, one.late)
            self._seen.outside[_whole_result(kind, text, one)] = outside

    def end_call(self) -> None:
        """End a call of the step under test."""
        self.applied.end_call(self._holdings.now())
        self.late = True

    def _states_of_some_ranks(self, held: dict[int, Held]) -> set[int]:
        """Return the ids of the DTensors whose states cannot be gathered, because some ranks lack them."""
        divided = [one.tensor for one in held.values() if hasattr(one.tensor, "device_mesh") and not one.local]
        states = [[optimizer.state.get(one, {}) for optimizer in self._optimizers.values()] for one in divided]
        counts = [sum(isinstance(value, torch.Tensor) for state in some for value in state.values()) for some in states]
        least = least_anywhere(list(zip(divided, counts, strict=True)))
        return {id(one) for one, count, low in zip(divided, counts, least, strict=True) if low < count}


def put(
    values: dict[Result, torch.Tensor], pieces: list[HeldPiece], kind: Kind, text: str, one: Held, value: torch.Tensor
) -> None:
    """Add a result of a tensor that a rank holds to the whole results, or to the pieces.

    Args:
        text: name of the result, with {} for the name of the parameter.
        value: in the shape of the tensor, or in another shape, such as an optimizer's count of steps.
    """
    if one.slices is None:
        values[_whole_result(kind, text, one)] = value
        return
    if one.copy and kind == "params":
        kind, text = _OWN_COPY
    for part in one.slices:
        name = Result(kind, text.format(part.whole))
        if value.shape == one.shape:
            pieces.append(HeldPiece(name, part, value))
        else:
            values[name] = value


def _whole_result(kind: Kind, text: str, one: Held) -> Result:
    if one.copy and kind == "params":
        kind, text = _OWN_COPY
    return Result(kind, text.format(one.whole or one.label))


def _is_nonlinear(optimizer: Optimizer) -> bool:
    return type(optimizer) is not torch.optim.SGD


def _unnamed(position: int, group: int) -> str:
    """Return a name for a parameter of an optimizer that is not in the model."""
    return f"parameter {position} of group {group}"


def _tells_ranks_apart(parameter: torch.Tensor) -> bool:
    """Return whether equal gradients prove a reduction; constants and single elements do not."""
    gradient = parameter.grad
    if (
        gradient is None
        or hasattr(parameter, "full_tensor")
        or gradient.layout != torch.strided
        or gradient.numel() < 2
    ):
        return False
    real = as_real(gradient.detach())
    return bool(real.isfinite().all()) and bool(real.min() != real.max())
