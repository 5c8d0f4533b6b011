"""Record the optimizers that step in a rank, the gradients that they apply, and the buffers that DDP broadcasts.

On devices, torch's foreach optimizers compute in place: SGD with Nesterov momentum adds its momentum to `grad`
(torch/optim/sgd.py, _multi_tensor_sgd, torch 2.13), and fused optimizers unscale it. On the CPU they leave `grad`
alone. So the gradient that a gate compares is read before the optimizer runs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from mgpu_check.diagnosis.observations import HeldPiece, Kind, ObservedRun, Outside, Result
from mgpu_check.gates.run.shards import Held, Holdings, least_anywhere, named_tensors, parameters_of
from mgpu_check.torch_hooks.nested import named_buffers
from mgpu_check.torch_hooks.patches import Patches, around
from mgpu_check.torch_hooks.tensors import as_real, digest_of, is_capturing, local_part, plain_copy


class AppliedGradients:
    """Read the gradients of parameters as the optimizer gets them, after all hooks of the user.

    Each `StepRecorder` makes one, tells it of the steps of optimizers, and closes it, which removes its hooks.

    Args:
        after: read them as the optimizer leaves them instead.
        traced: whether to keep the history of a parameter.

    Attributes:
        rewritten: an optimizer that is not torch's own has written into a gradient. It may have reduced the gradient
            over the ranks, or it may have computed in place, so which gradient counts is not known.
    """

    def __init__(self, after: bool, traced: Callable[[torch.Tensor], bool]) -> None:
        self.rewritten = False
        self._after, self._traced = after, traced
        self._hooks: dict[int, Any] = {}
        self._before: dict[int, torch.Tensor] = {}
        # By parameter, its gradient before and after a step of an optimizer that has written into it.
        self._applied: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._histories: dict[int, str] = {}
        self._stepped: set[int] = set()  # ids of the parameters that an optimizer has stepped in this call
        self._cleared: set[int] = set()

    def before_step(self, optimizer: Optimizer, ready: Callable[[Optimizer], None]) -> None:
        """Call `ready` once the gradients of a step are there: after the user's hooks, or after the closure."""
        # The caller is a global hook. Torch runs those first, then the hooks of the optimizer in the order of their
        # registration (torch/optim/optimizer.py, profile_hook_step, torch 2.13). So a hook that is added now is last.

        def take() -> None:
            with _disable_current_modes():  # a mode would perturb the copies
                for parameter in _parameters(optimizer):
                    if parameter.grad is not None and parameter.grad.layout == torch.strided:
                        self._before[id(parameter)] = parameter.grad.detach().clone()
                        self._stepped.add(id(parameter))
                        self._trace(parameter)
            ready(optimizer)

        def last(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if not callable(closure):
                return take()

            @functools.wraps(closure)
            def then_take(*of_closure: Any, **named: Any) -> Any:
                loss = closure(*of_closure, **named)
                take()
                return loss

            if "closure" in kwargs:
                return args, kwargs | {"closure": then_take}
            return (args[0], then_take, *args[2:]), kwargs

        self._remove_hook(optimizer)
        self._hooks[id(optimizer)] = optimizer.register_step_pre_hook(last)

    def after_step(self, optimizer: Optimizer) -> None:
        self._remove_hook(optimizer)
        with _disable_current_modes():
            for parameter in _parameters(optimizer):
                before, after = self._before.pop(id(parameter), None), parameter.grad
                self._applied.pop(id(parameter), None)
                if before is None or after is None or _equal(before, after):
                    continue
                self._applied[id(parameter)] = parameter, before, after.detach().clone()
                self.rewritten |= not type(optimizer).__module__.startswith("torch.")

    def of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient that was applied; or `grad`, if it was changed after that, or by no optimizer."""
        applied, now = self._applied.get(id(parameter)), parameter.grad
        if applied is None or now is None or self._after:
            return now
        _, before, after = applied
        return before if _equal(after, now) else now

    def by_gradient(self, parameters: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return id of `grad` -> the gradient that was applied."""
        pairs = ((parameter.grad, self.of(parameter)) for parameter in parameters)
        return {id(gradient): applied for gradient, applied in pairs if applied is not None}

    def start_histories(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if self._traced(parameter):
                self._histories[id(parameter)] = digest_of(local_part(parameter))

    def end_call(self, parameters: Iterable[torch.Tensor]) -> None:
        """Add to the histories of parameters that no optimizer has stepped in this call of the step."""
        for parameter in parameters:
            if parameter.grad is None or id(parameter) in self._stepped or not self._traced(parameter):
                continue
            self._trace(parameter)
            if not bool(local_part(parameter.grad).any()):
                self._cleared.add(id(parameter))
        self._stepped.clear()

    def history(self, parameter: torch.Tensor) -> str:
        """Return a checksum of the first value of a parameter and of the gradients applied to it, in order."""
        # "" if there is none, or if code without an optimizer may have cleared a gradient that it applied
        return "" if id(parameter) in self._cleared else self._histories.get(id(parameter), "")

    def close(self) -> None:
        for hook in self._hooks.values():
            hook.remove()

    def _trace(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if self._traced(parameter):
            history = self._histories.get(id(parameter)) or digest_of(local_part(parameter))
            both = f"{history} {digest_of(local_part(parameter.grad))}"
            self._histories[id(parameter)] = hashlib.sha1(both.encode(), usedforsecurity=False).hexdigest()

    def _remove_hook(self, optimizer: Optimizer) -> None:
        if (hook := self._hooks.pop(id(optimizer), None)) is not None:
            hook.remove()


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _equal(gradient: torch.Tensor, later: torch.Tensor) -> bool:
    local, local_later = local_part(gradient), local_part(later)
    return local.shape == local_later.shape and local.dtype == local_later.dtype and torch.equal(local, local_later)


_STEPS = "_mgpu_check_steps"  # attribute of a graph
_OWN_COPY: tuple[Kind, str] = "optimizer", "own copy of {}"  # the model computes with another tensor


class CapturedSteps:
    """The optimizer steps in CUDA graphs.

    Each `StepRecorder` makes one, and lets it watch by its own patches. A replay runs no Python code of the step, so no
    hook of an optimizer either: they run at the capture only. So `replayed` is called after each replay with each
    optimizer that has stepped in the graph.
    """

    def __init__(self, replayed: Callable[[Optimizer], None]) -> None:
        self._replayed = replayed
        self.captured: list[Optimizer] = []

    def watch(self, patches: Patches) -> None:
        patches.wrap(torch.cuda.CUDAGraph, "capture_end", around(self._capture_end))
        patches.wrap(torch.cuda.CUDAGraph, "replay", around(self._replay))

    def _capture_end(self, original: Callable[[Any], None], graph: Any) -> None:
        captured, self.captured = self.captured, []
        original(graph)
        graph.__dict__[_STEPS] = captured

    def _replay(self, original: Callable[[Any], None], graph: Any) -> None:
        original(graph)
        for optimizer in graph.__dict__.get(_STEPS, ()):
            self._replayed(optimizer)


Nudge = Callable[[int, Result, torch.Tensor], None]

# The kind of a result, the parameter, and a copy of its gradient or value at an optimizer step.
_TensorCopy = tuple[Kind, torch.Tensor, torch.Tensor]


class StepRecorder:
    """Context that records the optimizers that step, and the buffers that DistributedDataParallel broadcasts.

    `step_runs.observe` makes one for each run, enters it around the steps, ends each of them with `end_call`, and takes
    the results out afterwards. Torch's hooks and patches call it in between; leaving the context removes them.

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
        run: ObservedRun,
        deep: bool | str,
        nudge: Nudge | None,
        several: bool,
        all_parameters: bool,
        rewritten: bool,
        histories: bool,
    ) -> None:
        self._holdings, self._modules, self._seen, self._deep, self._nudge = holdings, modules, run, deep, nudge
        self._several, self._all_parameters = several, all_parameters
        self._before_nudge: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._optimizers: dict[int, Optimizer] = {}
        self._stack = contextlib.ExitStack()
        self._gradients: list[_TensorCopy] = []
        self._steps: list[list[_TensorCopy]] = []
        self._captured = CapturedSteps(self._after_replay)
        self._under_way = 0  # steps of optimizers, one within the other
        self._rewritten = rewritten
        self.applied = AppliedGradients(rewritten, lambda value: several and (histories or holdings.is_foreign(value)))
        self.late = False

    def __enter__(self) -> StepRecorder:
        self.applied.start_histories(value for _, value in parameters_of(self._modules))
        patches = self._stack.enter_context(Patches())
        self._captured.watch(patches)
        # Tensor.backward calls this name, too (torch/_tensor.py, backward, torch 2.13).
        patches.wrap(torch.autograd, "backward", around(self._backward))
        self._stack.callback(self.applied.close)
        self._stack.enter_context(register_optimizer_step_pre_hook(self._before))
        self._stack.enter_context(register_optimizer_step_post_hook(self._after))
        self._stack.enter_context(register_module_forward_pre_hook(self._forward))
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
        if self._several and id(optimizer) not in self._optimizers:
            self._take_first_step(optimizer)
        if self._under_way > 1:
            return  # a part of the step of a wrapper, such as ZeroRedundancyOptimizer
        if not self._rewritten:
            self._copy_gradients(optimizer)
        if self._nudge is None:
            return
        for name, value in parameters_of(self._modules):
            if value.grad is not None and value.grad.layout == torch.strided:
                gradient = getattr(value.grad, "_local_tensor", value.grad)
                self._before_nudge.append((gradient, gradient.clone()))
                self._nudge(self._seen.optimizer_steps, Result("grads", name), gradient)

    def _copy_gradients(self, optimizer: Optimizer) -> None:
        self._gradients = []
        if self._deep and (_is_nonlinear(optimizer) or self._deep != "nonlinear"):
            self._gradients = [
                ("grads", tensor, plain_copy(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad))
                for tensor in self._holdings.now()
            ]

    def _after_replay(self, optimizer: Optimizer) -> None:
        if is_capturing():  # the graph is replayed in another one
            self._captured.captured.append(optimizer)
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
            self._captured.captured.append(optimizer)
            return
        if self._rewritten:
            self._copy_gradients(optimizer)
        self._take_step()

    def _take_step(self) -> None:
        self._seen.optimizer_steps += 1
        if self._deep:
            rest = self._holdings.now() if self._deep is True else ()
            self._steps.append([*self._gradients, *(("params", tensor, plain_copy(tensor)) for tensor in rest)])

    def _take_first_step(self, optimizer: Optimizer) -> None:
        """Record the values and gradients at an optimizer's first step, if the gradients can distinguish ranks."""
        parameter_names = {id(value): name for name, value in parameters_of(self._modules)}
        which = f" of optimizer {len(self._optimizers)}" if self._optimizers else ""
        for index, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                name = parameter_names.get(id(parameter))
                if (name is None or self._all_parameters) and _tells_ranks_apart(parameter):
                    name = name or f"{_unnamed(position, index)}{which}"
                    self._seen.stepped.setdefault(name, (digest_of(parameter.detach()), digest_of(parameter.grad)))

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
                Result(tensor_kind, name)
                for tensor_kind, name, value, _, _ in named_tensors(self._modules)
                if id(value) in inside
            }

    def take_steps(self, held_by_id: dict[int, Held]) -> None:
        for copies in self._steps:
            snapshot: dict[Result, torch.Tensor] = {}
            pieces: list[HeldPiece] = []
            for result_kind, tensor, value in copies:
                if (holding := held_by_id.get(id(tensor))) is not None:
                    put(snapshot, pieces, result_kind, "{}", holding, value)
            self._seen.snapshots.append(snapshot)
            self._seen.pieces_of_steps.append(pieces)
        self._steps.clear()

    def take_optimizers(self, held_by_id: dict[int, Held]) -> None:
        run = self._seen
        run.optimizers = len(self._optimizers)
        partly = self._states_of_some_ranks(held_by_id)
        order = {identity: number for number, identity in enumerate(held_by_id)}
        for number, optimizer in enumerate(self._optimizers.values()):
            which = f" of optimizer {number}" if len(self._optimizers) > 1 else ""
            states: list[tuple[Held, torch.Tensor]] = []
            for index, group in enumerate(optimizer.param_groups):
                if isinstance(rate := group.get("lr"), (int, float, torch.Tensor)):
                    rate = plain_copy(torch.as_tensor(rate, dtype=torch.float64))
                    run.values[Result("optimizer", f"learning rate of group {index}{which}")] = rate
                run.groups += 1
                settings = {key: value for key, value in group.items() if isinstance(value, (bool, int, float, str))}
                for position, parameter in enumerate(group["params"]):
                    late, name = self._holdings.is_late(parameter), _unnamed(position, index)
                    holding = held_by_id.get(id(parameter)) or Held("params", name, parameter, outside=True, late=late)
                    run.settings |= dict.fromkeys(holding.wholes, settings)
                    run.group_of |= dict.fromkeys(holding.wholes, f"group {index}{which}")
                    if id(parameter) not in partly:
                        states.append((holding, parameter))
            # Copies of DTensors are gathered: in the order of the model, because groups may differ between ranks.
            states.sort(key=lambda state: order.get(id(state[1]), len(order)))
            for holding, parameter in states:
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        copy, text = holding.copy_of(value), f"{key} of {{}}{which}"
                        put(run.values, run.pieces, "optimizer", text, holding, copy)
                        self.note_outside("optimizer", text, holding)
        self._optimizers.clear()

    def note_outside(self, result_kind: Kind, text: str, holding: Held) -> None:
        """Record the history of a result, if its tensor is not part of the model; see `put`."""
        if holding.outside:
            outside = Outside(self.applied.history(holding.tensor), holding.copy, holding.late)
            self._seen.outside[_whole_result(result_kind, text, holding)] = outside

    def end_call(self) -> None:
        self.applied.end_call(self._holdings.now())
        self.late = True

    def _states_of_some_ranks(self, held_by_id: dict[int, Held]) -> set[int]:
        """Return the ids of the DTensors whose states cannot be gathered, because some ranks lack them."""
        gathered = (holding.tensor for holding in held_by_id.values() if not holding.local)
        divided = [tensor for tensor in gathered if hasattr(tensor, "device_mesh")]
        states = [[optimizer.state.get(tensor, {}) for optimizer in self._optimizers.values()] for tensor in divided]
        counts = [sum(isinstance(value, torch.Tensor) for own in each for value in own.values()) for each in states]
        least = least_anywhere(list(zip(divided, counts, strict=True)))
        return {id(tensor) for tensor, count, low in zip(divided, counts, least, strict=True) if low < count}


def put(
    values: dict[Result, torch.Tensor],
    pieces: list[HeldPiece],
    result_kind: Kind,
    text: str,
    holding: Held,
    value: torch.Tensor,
) -> None:
    """Add a result of a tensor that a rank holds to the whole results, or to the pieces.

    `text`: name of the result, with {} for the parameter. `value` may have another shape, as a count of steps has.
    """
    if holding.slices is None:
        values[_whole_result(result_kind, text, holding)] = value
        return
    if holding.copy and result_kind == "params":
        result_kind, text = _OWN_COPY
    for held_slice in holding.slices:
        name = Result(result_kind, text.format(held_slice.whole))
        if value.shape == holding.shape:
            pieces.append(HeldPiece(name, held_slice, value))
        else:
            values[name] = value


def _whole_result(result_kind: Kind, text: str, holding: Held) -> Result:
    if holding.copy and result_kind == "params":
        result_kind, text = _OWN_COPY
    return Result(result_kind, text.format(holding.built_name or holding.label))


def _is_nonlinear(optimizer: Optimizer) -> bool:
    return type(optimizer) is not torch.optim.SGD


def _unnamed(position: int, group: int) -> str:
    return f"parameter {position} of group {group}"


def _tells_ranks_apart(parameter: torch.Tensor) -> bool:
    """Return whether equal gradients prove a reduction; constants and single elements do not."""
    gradient = parameter.grad
    if gradient is None or hasattr(parameter, "full_tensor") or gradient.layout != torch.strided:
        return False
    real = as_real(gradient.detach())
    return gradient.numel() > 1 and bool(real.isfinite().all()) and bool(real.min() != real.max())
