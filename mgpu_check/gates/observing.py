"""Run the user's step in a rank, and record all that it leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mgpu_check.gates.batches import make_batches, wider
from mgpu_check.gates.events import noting_seeds
from mgpu_check.gates.program import Program, Unusable, bound, bound_reference, modules_of
from mgpu_check.gates.scenario import Scenario
from mgpu_check.mistakes.observed import Event, Observation
from mgpu_check.mistakes.results import Result
from mgpu_check.rank_side.rank import Rank
from mgpu_check.torch_hooks.nested import entries, tensors_of
from mgpu_check.torch_hooks.seeds import seed_everything
from mgpu_check.torch_hooks.tensors import as_real, copied, digest_of

__all__ = ["Around", "Nudge", "observe", "parameters_of", "plain_copy"]

Nudge = Callable[[int, Result, torch.Tensor], None]
Around = Callable[[Any, Sequence[Any]], contextlib.AbstractContextManager[None]]
"""Of the model, and of the batches as the steps get them."""


def observe(
    rank: Rank,
    program: Program,
    scenario: Scenario,
    *,
    of_reference: bool = False,
    double: bool = False,
    deep: bool | str = False,
    traced: bool = False,
    digests: bool = True,
    initial: bool = True,
    nudge: Nudge | None = None,
    alter: Callable[[Any], Any] | None = None,
    around: Around = lambda model, batches: contextlib.nullcontext(),
) -> Observation:
    """Build the model, make the batches, and run the step, or the reference, on each of them in turn.

    Args:
        double: in float64: the model and the batches are widened, and it is the default dtype.
        deep: keep what each step of an optimizer leaves; "gradients" for these only, "nonlinear" for these before optimizers
            that are not linear in them.
        traced: make a step that is a class inside of `around`, and note the seeds that `build` sets.
        digests: compute checksums of the values.
        initial: keep what the model was built with, which tells what was touched.
        nudge: called with the number of the optimizer's step, the name, and the gradient, which it may change for the
            time of that step.
        alter: done to each batch.
        around: entered around the steps, not around building the model and the batches.
    """
    seed_everything(scenario.seed)
    seeds: list[Event] = []
    with noting_seeds(seeds) if traced else contextlib.nullcontext():
        model = program.build()
    modules = modules_of(model)
    batches = make_batches(
        program.batch,
        scenario.batches,
        scenario.samples,
        scenario.steps,
        scenario.change,
        scenario.factor,
        scenario.seed,
    )
    if alter is not None:
        batches = [alter(batch) for batch in batches]
    seen = Observation(batch=_digest_of_all(batches), built=seeds)
    if initial:
        for _, name, value in _state_of(modules):
            seen.initial[name] = plain_copy(value)
    if double:
        _widen(modules)
        batches = [wider(batch) for batch in batches]
    make = functools.partial(_call, program, model, rank, of_reference, scenario.world_size)
    call = None if traced else make()
    seed_everything(scenario.seed + 1)
    before = torch.get_rng_state()
    recorder = _StepRecorder(modules, seen, deep, nudge, rank.size > 1, traced or program.reference is not None)
    with _default_dtype(double), recorder, around(model, batches):
        call = call or make()  # what it calls as it is made belongs to the trace, and not to what is measured
        for number, batch in enumerate(batches):
            if number:
                gc.collect()  # a dead DistributedDataParallel would still answer to the next backward
            returned = call(batch)
            if returned is not None:
                _take(seen, Result("returned", "", number + 1 if len(batches) > 1 else None), returned)
                seen.touched.add("returned")
    after = torch.get_rng_state()
    seen.rng, seen.draws = digest_of(after), not torch.equal(before, after)
    _take_state(seen, modules)
    recorder.take_optimizers(modules)
    if digests:
        seen.digests = {name: digest_of(value) for name, value in seen.values.items()}
    return seen


def _call(program: Program, model: Any, rank: Rank, of_reference: bool, world_size: int) -> Callable[[Any], Any]:
    if of_reference:
        assert program.reference is not None
        return bound_reference(program.reference, model, world_size)
    return bound(program.step, model, rank)


def plain_copy(value: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU; of a DTensor the whole tensor, which is a collective; of complex numbers pairs of real
    ones.
    """
    value = value.detach()
    return as_real(copied(value.full_tensor() if hasattr(value, "full_tensor") else value))


def _state_of(modules: Mapping[str, nn.Module]) -> Iterator[tuple[Literal["params", "buffers"], str, torch.Tensor]]:
    """Yield each parameter and buffer: "params" or "buffers", its name, its value."""
    for prefix, module in modules.items():
        yield from (("params", prefix + name, value) for name, value in module.named_parameters())
        yield from (("buffers", prefix + name, value) for name, value in module.named_buffers())


def parameters_of(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter of modules that are named by prefixes: its name, its value."""
    return ((name, value) for kind, name, value in _state_of(modules) if kind == "params")


def _widen(modules: Mapping[str, nn.Module]) -> None:
    """Convert parameters and buffers to float64, or complex128, in place."""
    for module in modules.values():
        module.double()  # leaves complex values alone
    for _, _, value in _state_of(modules):
        if value.dtype == torch.complex64:
            value.data = value.data.to(torch.complex128)


def _take_state(seen: Observation, modules: Mapping[str, nn.Module]) -> None:
    for kind, name, value in _state_of(modules):
        now = plain_copy(value)
        if kind == "params" and (value.requires_grad or value.grad is not None):
            if value.grad is not None:
                seen.touched.add("grads")
            seen.values[Result("grads", name)] = torch.zeros_like(now) if value.grad is None else plain_copy(value.grad)
        seen.values[Result(kind, name)] = now
        before = seen.initial.get(name)
        if before is None or not torch.equal(before.to(now.dtype), now):
            seen.touched.add(kind)
    for prefix, module in modules.items():
        seen.normalized += [prefix + name for name, part in module.named_modules() if _normalizes(part)]


def _normalizes(module: nn.Module) -> bool:
    kind = nn.modules.batchnorm._BatchNorm
    return isinstance(module, kind) and not isinstance(module, nn.SyncBatchNorm) and module.training


def _take(seen: Observation, name: Result, value: Any) -> None:
    """Take down a returned value, part by part."""
    if (parts := entries(value)) is not None:
        for key, part in parts:
            _take(seen, dataclasses.replace(name, of=f"{name.of}.{key}" if name.of else str(key)), part)
        return
    if hasattr(value, "__array__") and not isinstance(value, torch.Tensor):
        value = torch.from_numpy(np.array(value)) if (np := sys.modules.get("numpy")) else value
    if isinstance(value, torch.Tensor):
        seen.values[name] = plain_copy(value)
    elif isinstance(value, (float, complex)):
        wide = torch.complex128 if isinstance(value, complex) else torch.float64
        seen.values[name] = plain_copy(torch.tensor(value, dtype=wide))
    elif isinstance(value, int) and abs(value) < 2**63:
        seen.values[name] = torch.tensor(value)
    elif isinstance(value, (int, str, bytes)):
        seen.others[name] = repr(value)
    elif value is not None:
        raise Unusable(
            f"step returned {name.label or 'a result'} of type {type(value).__name__}; return tensors, numbers or texts, in "
            "mappings, sequences or dataclasses"
        )


class _StepRecorder:
    """Records, while it is entered, which optimizers step, and what DistributedDataParallel broadcasts.

    Args:
        several: there are other ranks, with which the first step of each optimizer is to be compared.
        all_parameters: that of all parameters, not only of those that are none of the model's.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        seen: Observation,
        deep: bool | str,
        nudge: Nudge | None,
        several: bool,
        all_parameters: bool,
    ) -> None:
        self._modules, self._seen, self._deep, self._nudge = modules, seen, deep, nudge
        self._several, self._all_parameters = several, all_parameters
        self._before_nudge: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._optimizers: dict[int, Optimizer] = {}
        self._stack = contextlib.ExitStack()
        self._gradients: dict[Result, torch.Tensor] = {}

    def __enter__(self) -> _StepRecorder:
        self._stack.callback(register_optimizer_step_pre_hook(self._before).remove)
        self._stack.callback(register_optimizer_step_post_hook(self._after).remove)
        self._stack.callback(register_module_forward_pre_hook(self._forward).remove)
        return self

    def __exit__(self, *of_error: object) -> None:
        self._stack.close()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._several and id(optimizer) not in self._optimizers:
            self._take_first_step(optimizer)
        nonlinear = type(optimizer) is not torch.optim.SGD
        self._seen.nonlinear |= nonlinear
        self._gradients = {}
        if self._deep and (nonlinear or self._deep != "nonlinear"):
            self._gradients = {
                Result("grads", name): plain_copy(torch.zeros_like(value) if value.grad is None else value.grad)
                for name, value in self._parameters()
            }
        if self._nudge is None:
            return
        for name, value in self._parameters():
            if value.grad is not None and value.grad.layout == torch.strided:
                gradient = getattr(value.grad, "_local_tensor", value.grad)
                self._before_nudge.append((gradient, gradient.clone()))
                self._nudge(self._seen.optimizer_steps, Result("grads", name), gradient)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers[id(optimizer)] = optimizer
        self._seen.optimizer_steps += 1
        for gradient, before in self._before_nudge:
            gradient.copy_(before)
        self._before_nudge.clear()
        if self._deep:
            rest = self._parameters() if self._deep is True else ()
            after = {Result("params", name): plain_copy(value) for name, value in rest}
            self._seen.snapshots.append(self._gradients | after)

    def _take_first_step(self, optimizer: Optimizer) -> None:
        """Take down which values and gradients the optimizer finds, of gradients that tell ranks apart."""
        names = {id(value): name for name, value in self._parameters()}
        which = f" of optimizer {len(self._optimizers)}" if self._optimizers else ""
        for index, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                name = names.get(id(parameter))
                if (name is None or self._all_parameters) and _tells_ranks_apart(parameter):
                    name = name or f"{_unnamed(position, index)}{which}"
                    self._seen.stepped[name] = digest_of(parameter.detach()), digest_of(parameter.grad)

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return parameters_of(self._modules)

    def _forward(self, module: nn.Module, args: Any) -> None:
        if isinstance(module, DistributedDataParallel) and module.broadcast_buffers:
            inside = {id(buffer) for buffer in module.buffers()}
            self._seen.broadcast |= {
                Result(kind, name) for kind, name, value in _state_of(self._modules) if id(value) in inside
            }

    def take_optimizers(self, modules: Mapping[str, nn.Module]) -> None:
        """Take down what the optimizers hold that have stepped."""
        names = {id(value): name for name, value in self._parameters()}
        self._seen.optimizers = len(self._optimizers)
        for number, optimizer in enumerate(self._optimizers.values()):
            which = f" of optimizer {number}" if len(self._optimizers) > 1 else ""
            for index, group in enumerate(optimizer.param_groups):
                if isinstance(rate := group.get("lr"), (int, float, torch.Tensor)):
                    rate = plain_copy(torch.as_tensor(rate, dtype=torch.float64))
                    self._seen.values[Result("optimizer", f"learning rate of group {index}{which}")] = rate
                for position, parameter in enumerate(group["params"]):
                    owner = names.get(id(parameter), _unnamed(position, index))
                    for key, value in optimizer.state.get(parameter, {}).items():
                        if isinstance(value, torch.Tensor):
                            self._seen.values[Result("optimizer", f"{key} of {owner}{which}")] = plain_copy(value)
        self._optimizers.clear()


def _unnamed(position: int, group: int) -> str:
    """Return what stands for the name of an optimizer's parameter that is none of the model's."""
    return f"parameter {position} of group {group}"


def _tells_ranks_apart(parameter: torch.Tensor) -> bool:
    """Return whether a gradient that is the same on all ranks was made so: one of equal elements may be by chance."""
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


@contextlib.contextmanager
def _default_dtype(double: bool) -> Iterator[None]:
    before = torch.get_default_dtype()
    if double:
        torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _digest_of_all(batches: list[Any]) -> str:
    """Compute a digest of the tensors; of plain values and arrays, too, where nothing else is in the batches."""
    tensors = tensors_of(batches)
    return ",".join(map(digest_of, tensors)) if tensors else _text(batches)


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(_text, value))
    if isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    return digest_of(torch.as_tensor(value)) if hasattr(value, "__array__") else type(value).__name__
