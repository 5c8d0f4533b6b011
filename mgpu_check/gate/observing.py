"""In a rank: run the user's step, and take down all that it leaves."""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import keystr, tree_flatten_with_path

from mgpu_check.gate.batches import digest_of, make_batches, seed_everything, wider
from mgpu_check.gate.scenario import Scenario
from mgpu_check.ranks import Rank

__all__ = ["KINDS", "Observation", "Program", "Unusable", "observe"]

KINDS = ("grads", "params", "buffers", "optimizer", "returned", "rng")
"""What can be observed."""


class Unusable(ValueError):
    """What the user gave does not fit what the gate needs of it."""


@dataclass(frozen=True)
class Program:
    """What the user gives.

    Attributes:
        step: ``step(model, batch, rank)``; or a class that is called with (model, rank) first.
        build: makes the model.
        batch: ``batch(n)``; None where batches are drawn.
        reference: ``reference(model, batch)`` on one device, or None.
        single_process: one process drives all devices, as with nn.DataParallel.
    """

    step: Callable[..., Any]
    build: Callable[[], Any]
    batch: Callable[[int], Any] | None
    reference: Callable[..., Any] | None = None
    single_process: bool = False


@dataclass
class Observation:
    """What one run leaves on one rank. Tensors are on the CPU.

    Attributes:
        values: by name: "gradient of head.weight", "head.weight", "buffer bn.running_mean", "exp_avg of head.weight",
            "lr of group 0", "returned loss".
        kinds: name -> one of `KINDS`.
        digests: name -> checksum of the value.
        initial: parameters and buffers as they were built.
        others: what was returned and is no number or tensor, in text.
        batch: checksum of the batches.
        rng: checksum of the state of torch's CPU generator at the end; and whether the step has drawn from it.
        optimizer_steps: how often an optimizer has stepped.
        touched: kinds of which something was changed.
        broadcast: buffers that DistributedDataParallel takes from rank 0 before each forward.
        normalized: modules that normalize by statistics of the batch.
        snapshots: after each optimizer step, gradients and parameters, where asked for.
    """

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    batch: str = ""
    rng: str = ""
    draws: bool = False
    optimizer_steps: int = 0
    touched: set[str] = field(default_factory=set)
    broadcast: set[str] = field(default_factory=set)
    normalized: list[str] = field(default_factory=list)
    snapshots: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def add(self, kind: str, name: str, value: torch.Tensor) -> None:
        self.values[name] = value
        self.kinds[name] = kind


def observe(
    rank: Rank,
    program: Program,
    scenario: Scenario,
    *,
    of_reference: bool = False,
    double: bool = False,
    deep: bool = False,
    alter: Callable[[Any], Any] | None = None,
    around: Callable[[Any], contextlib.AbstractContextManager[None]] = lambda model: contextlib.nullcontext(),
) -> Observation:
    """Build the model, make the batches, and run the step, or the reference, on each of them in turn.

    Args:
        double: in float64: the model and the batches are widened, and it is the default dtype.
        deep: keep what each step of an optimizer leaves.
        alter: done to each batch.
        around: entered around the steps, not around building the model and the batches.
    """
    seed_everything(scenario.seed)
    model = program.build()
    modules = _modules(model)
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
    seen = Observation(batch=_digest_of_all(batches))
    for prefix, module in modules.items():
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            seen.initial[prefix + name] = _plain(value)
    if double:
        for module in modules.values():
            module.double()
        batches = [wider(batch) for batch in batches]
    call = _call(program, model, rank, of_reference, scenario.world_size)
    seed_everything(scenario.seed + 1)
    before = torch.get_rng_state()
    with _default_dtype(double), _Watch(modules, seen, deep) as watch, around(model):
        for number, batch in enumerate(batches):
            if number:
                gc.collect()  # a dead DistributedDataParallel would still answer to the next backward
            suffix = f", step {number + 1}" if len(batches) > 1 else ""
            _take_returned(seen, call(batch), suffix)
    after = torch.get_rng_state()
    seen.rng, seen.draws = digest_of(after), not torch.equal(before, after)
    _take_state(seen, modules)
    watch.take_optimizers(modules)
    seen.digests = {name: digest_of(value) for name, value in seen.values.items()}
    return seen


def _call(program: Program, model: Any, rank: Rank, of_reference: bool, world_size: int) -> Callable[[Any], Any]:
    if of_reference:
        assert program.reference is not None
        reference = program.reference
        if "world_size" in inspect.signature(reference).parameters:
            return lambda batch: reference(model, batch, world_size=world_size)
        return lambda batch: reference(model, batch)
    step = program.step
    if isinstance(step, type):
        step = step(model, rank)
    return lambda batch: step(model, batch, rank)


def _modules(model: Any) -> dict[str, nn.Module]:
    """Prefix of names -> module; of several where `build` returns several."""
    if isinstance(model, nn.Module):
        return {"": model}
    several: Mapping[Any, Any] = {}
    if isinstance(model, Mapping):
        several = model
    elif isinstance(model, (list, tuple)):
        several = dict(enumerate(model))
    found = {f"{key}.": module for key, module in several.items() if isinstance(module, nn.Module)}
    if not found:
        raise Unusable(
            f"assert_step_scales: build() returned {type(model).__name__}; return an nn.Module, or a tuple or mapping of them"
        )
    return found


def _plain(value: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU; of a DTensor the whole tensor, which is a collective."""
    value = value.detach()
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    if value.layout != torch.strided:
        value = value.to_dense()
    return value.to("cpu", copy=True).contiguous()


def _take_state(seen: Observation, modules: Mapping[str, nn.Module]) -> None:
    for prefix, module in modules.items():
        for name, parameter in module.named_parameters():
            now = _plain(parameter)
            if parameter.requires_grad or parameter.grad is not None:
                if parameter.grad is not None:
                    seen.touched.add("grads")
                gradient = torch.zeros_like(now) if parameter.grad is None else _plain(parameter.grad)
                seen.add("grads", f"gradient of {prefix}{name}", gradient)
            seen.add("params", prefix + name, now)
            before = seen.initial.get(prefix + name)
            if before is None or not torch.equal(before.to(now.dtype), now):
                seen.touched.add("params")
        for name, buffer in module.named_buffers():
            seen.add("buffers", f"buffer {prefix}{name}", _plain(buffer))
        seen.normalized += [prefix + name for name, part in module.named_modules() if _normalizes(part)]


def _normalizes(module: nn.Module) -> bool:
    kind = nn.modules.batchnorm._BatchNorm
    return isinstance(module, kind) and not isinstance(module, nn.SyncBatchNorm) and module.training


def _take_returned(seen: Observation, returned: Any, suffix: str) -> None:
    if returned is None:
        return
    if isinstance(returned, torch.Tensor) or not isinstance(returned, (Mapping, list, tuple)):
        returned = {"": returned}
    for path, value in tree_flatten_with_path(returned)[0]:
        text = keystr(path)
        key = text[2:-2] if text.count("[") == 1 and text.startswith("['") else text
        name = f"returned {key}".rstrip() + suffix
        if isinstance(value, torch.Tensor):
            seen.add("returned", name, _plain(value))
        elif isinstance(value, (bool, int, float)):
            dtype = torch.float64 if isinstance(value, float) else None
            seen.add("returned", name, torch.tensor(value, dtype=dtype))
        elif value is not None:
            seen.others[name] = repr(value)


class _Watch:
    """While it is entered: which optimizers step, and what DistributedDataParallel is called."""

    def __init__(self, modules: Mapping[str, nn.Module], seen: Observation, deep: bool) -> None:
        self._modules, self._seen, self._deep = modules, seen, deep
        self._optimizers: dict[int, Optimizer] = {}
        self._stack = contextlib.ExitStack()
        self._gradients: dict[str, torch.Tensor] = {}

    def __enter__(self) -> _Watch:
        self._stack.callback(register_optimizer_step_pre_hook(self._before).remove)
        self._stack.callback(register_optimizer_step_post_hook(self._after).remove)
        self._stack.callback(register_module_forward_pre_hook(self._forward).remove)
        return self

    def __exit__(self, *of_error: object) -> None:
        self._stack.close()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._deep:
            self._gradients = {
                f"gradient of {name}": torch.zeros_like(value) if value.grad is None else value.grad
                for name, value in self._parameters()
            }
            self._gradients = {name: _plain(value) for name, value in self._gradients.items()}

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers[id(optimizer)] = optimizer
        self._seen.optimizer_steps += 1
        if self._deep:
            after = {name: _plain(value) for name, value in self._parameters()}
            self._seen.snapshots.append(self._gradients | after)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for prefix, module in self._modules.items():
            for name, value in module.named_parameters():
                yield prefix + name, value

    def _forward(self, module: nn.Module, args: Any) -> None:
        if isinstance(module, DistributedDataParallel) and module.broadcast_buffers:
            inside = {id(buffer) for buffer in module.buffers()}
            for prefix, one in self._modules.items():
                self._seen.broadcast |= {
                    f"buffer {prefix}{name}" for name, buffer in one.named_buffers() if id(buffer) in inside
                }

    def take_optimizers(self, modules: Mapping[str, nn.Module]) -> None:
        """Take down what the optimizers hold that have stepped."""
        names = {id(value): name for name, value in self._parameters()}
        for number, optimizer in enumerate(self._optimizers.values()):
            which = f" of optimizer {number}" if len(self._optimizers) > 1 else ""
            for index, group in enumerate(optimizer.param_groups):
                if isinstance(rate := group.get("lr"), (int, float, torch.Tensor)):
                    rate = _plain(torch.as_tensor(rate, dtype=torch.float64))
                    self._seen.add("optimizer", f"learning rate of group {index}{which}", rate)
                for place, parameter in enumerate(group["params"]):
                    owner = names.get(id(parameter), f"parameter {place} of group {index}")
                    for key, value in optimizer.state.get(parameter, {}).items():
                        if isinstance(value, torch.Tensor):
                            self._seen.add("optimizer", f"{key} of {owner}{which}", _plain(value))
        self._optimizers.clear()


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
    leaves = tree_flatten_with_path(batches)[0]
    return ",".join(digest_of(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for _, leaf in leaves)
