"""Switch an option of training on or off in a rank, for a whole step that does not know of it. Imports torch."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import checkpoint
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from mgpu_check.torch_hooks.patches import Patches, replaced

_Count = Callable[[], None]
_Modules = Mapping[str, nn.Module]
_Context = contextlib.AbstractContextManager[None]
_Turn = Callable[[_Count, _Modules, str, bool | None], _Context]


@dataclass(frozen=True)
class TrainingOption:
    """An option of training that must not change what a step computes by more than rounding."""

    # on, off: clauses for a step that is run with the option, and without an option that it uses itself.
    on: str
    off: str
    needs: str  # the part of a step that the option applies to
    # Returns the context around the step, from the counter, the modules, the type of the device, and whether to turn
    # the option on or off. The counter counts what that changes; with None, how often the step uses the option itself.
    turn: _Turn


@dataclass(frozen=True)
class Switch:
    """An axis, and whether it is turned on or off; None to count how often the step uses it itself."""

    axis: str
    on: bool | None = None


@contextlib.contextmanager
def switched(switch: Switch | None, modules: _Modules, device: torch.device, count: _Count) -> Iterator[None]:
    """Run the body with an option switched; call `count` whenever the switch has an effect."""
    if switch is None:
        yield
        return
    with AXES[switch.axis].turn(count, modules, device.type, switch.on):
        yield


def _blocks(modules: _Modules) -> Iterator[nn.Module]:
    """Yield the children of the modules, and those of containers in place of the containers; a leaf yields itself."""

    def inside(module: nn.Module) -> Iterator[nn.Module]:
        for child in module._modules.values():
            if isinstance(child, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
                yield from inside(child)
            elif child is not None:
                yield child

    for module in modules.values():
        yield from inside(module) if any(child is not None for child in module._modules.values()) else (module,)


def _forget_graphs() -> None:
    """Let torch.compile compile all code again: graphs are counted, and recompilations limited."""
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        # Not `reset`, which with CUDA imports Inductor for seconds (torch/_dynamo/__init__.py, reset, torch 2.13).
        dynamo.reset_code_caches()


@contextlib.contextmanager
def _noting_compiled(count: _Count) -> Iterator[None]:
    def graphs() -> int:  # that torch.compile has compiled in this process
        utils = sys.modules.get("torch._dynamo.utils")
        return 0 if utils is None else utils.counters["stats"]["unique_graphs"]

    _forget_graphs()
    before = graphs()
    yield
    if graphs() > before:
        count()


@contextlib.contextmanager
def _compiled(count: _Count, modules: _Modules) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # imports of torch warn, and a run may turn warnings into errors
        from torch._dynamo.backends.debugging import aot_eager

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        count()
        return aot_eager(graph, inputs, **options)

    _forget_graphs()
    # A step may call the whole model, or its blocks one by one.
    for module in dict.fromkeys([*_blocks(modules), *modules.values()]):
        module.compile(backend=backend)
    yield


@contextlib.contextmanager
def _eager(count: _Count) -> Iterator[None]:
    count()
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def _around_checkpoints(count: _Count, *, keep: bool) -> Iterator[None]:
    """Count the calls that are checkpointed; unless `keep` is set, run them without checkpointing."""
    # `checkpoint` looks up both names in its module (torch/utils/checkpoint.py, checkpoint, torch 2.13), so a patch
    # there reaches code that imported `checkpoint` earlier. The composable API has imported the second name for itself.
    reentrant, start = checkpoint.CheckpointFunction, checkpoint._checkpoint_without_reentrant_generator

    def apply(function: Any, preserve: bool, *args: Any) -> Any:
        count()
        return reentrant.apply(function, preserve, *args) if keep else function(*args)

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        count()
        if keep:
            yield from start(*args, **kwargs)
        else:
            yield

    with Patches() as patches:
        patches.set(checkpoint, "CheckpointFunction", SimpleNamespace(apply=apply))
        for name in (checkpoint.__name__, "torch.distributed._composable.checkpoint_activation"):
            if (owner := sys.modules.get(name)) is not None:
                patches.set(owner, start.__name__, generator)
        yield


@contextlib.contextmanager
def _checkpointed(count: _Count, modules: _Modules) -> Iterator[None]:
    def checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        count()
        return checkpoint.checkpoint(forward, *args, use_reentrant=False, **kwargs)

    for block in dict.fromkeys(_blocks(modules)):
        block.forward = functools.partial(checkpointed, block.forward)
    yield


@contextlib.contextmanager
def _around_autocasts(count: _Count, *, keep: bool) -> Iterator[None]:
    """Count the regions that autocast to a narrow dtype; unless `keep` is set, disable autocast in them."""
    autocast = torch.amp.autocast_mode.autocast
    enter = autocast.__enter__

    def entered(region: Any) -> Any:
        if region._enabled and region.fast_dtype.itemsize < 4:
            count()
            region._enabled = keep
        return enter(region)

    with replaced(autocast, "__enter__", entered):
        yield


@contextlib.contextmanager
def _narrow(count: _Count, device: str) -> Iterator[None]:
    """Autocast each outermost call of a module, and thus no backward pass."""
    depth, stack = 0, contextlib.ExitStack()

    def before(module: nn.Module, args: Any) -> None:
        nonlocal depth
        if not depth:
            count()
            stack.enter_context(torch.autocast(device, torch.bfloat16))
        depth += 1

    def after(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1
        if not depth:
            stack.close()

    hooks = register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)
    with hooks[0], hooks[1], stack:
        yield


@contextlib.contextmanager
def _with_option(option: str, count: _Count, modules: _Modules, device: str, value: bool | None) -> Iterator[None]:
    """Give new optimizers the option with this value, where it is another one; with None, count those that use it."""
    # Torch takes foreach if neither option is given (torch/optim/optimizer.py, _default_to_fused_or_foreach, 2.13).
    default = option == "foreach" and device in _get_foreach_kernels_supported_devices()

    def around(make: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(make)
        def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            requested = kwargs.get(option)
            uses = (default and not kwargs.get("fused")) if requested is None else bool(requested)
            if uses if value is None else uses != value:
                count()
            if value is not None and uses != value:
                rest = {name: False for name in ("fused", "foreach") if value and name in options}
                kwargs |= rest | {option: value}
            make(optimizer, *args, **kwargs)

        options = inspect.signature(make).parameters
        return made

    with Patches() as patches:
        for optimizer_type in _descendants(torch.optim.Optimizer):
            make = vars(optimizer_type).get("__init__")
            if make is not None and option in inspect.signature(make).parameters:
                patches.wrap(optimizer_type, "__init__", around)
        yield


def _descendants(cls: type) -> set[type]:
    return {cls}.union(*map(_descendants, cls.__subclasses__()))


AXES: dict[str, TrainingOption] = {
    "compiled": TrainingOption(
        'under torch.compile(backend="aot_eager")',
        "without torch.compile",
        "a module of the model on real devices, since torch.compile runs simulated GPUs eagerly",
        lambda count, modules, device, on: (
            _noting_compiled(count) if on is None else _compiled(count, modules) if on else _eager(count)
        ),
    ),
    "checkpointed": TrainingOption(
        "with activation checkpointing",
        "without its activation checkpointing",
        "a module of the model, with gradients",
        lambda count, modules, device, on: (
            _checkpointed(count, modules) if on else _around_checkpoints(count, keep=on is None)
        ),
    ),
    "bfloat16": TrainingOption(
        "under autocast to bfloat16",
        "without its autocast",
        "an operator that autocast narrows, in a module",
        lambda count, modules, device, on: _narrow(count, device) if on else _around_autocasts(count, keep=on is None),
    ),
    **{
        option: TrainingOption(
            f"with {option} optimizers",
            f"without its {option} optimizers",
            f"an optimizer of torch with the option {option}",
            functools.partial(_with_option, option),
        )
        for option in ("fused", "foreach")
    },
}
"""The axes by name."""
