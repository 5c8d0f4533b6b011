"""Options of a training that must not change what it computes, or change it as on one device.

A setting of options is a mapping from name to value, without those that have their default. `OPTIONS` has their values.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mgpu_check.models.traits import Traits, blocks_of, class_of, names_of_parameters
from mgpu_check.oracles.pairs import settings_in_pairs

Pair = tuple[str, str]
Setting = tuple[Pair, ...]
"""The options that differ from their default, as (name, value), in the order of `OPTIONS`."""


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        values: values besides the default.
        ways: the ways of training that have it; empty for all.
    """

    name: str
    values: tuple[str, ...]
    ways: tuple[str, ...] = ()


_WHOLE = ("dp", "ddp", "fsdp1", "fsdp2", "hsdp")
"""Ways that treat all parameters alike."""
_ONE_CALL = (*_WHOLE, "tp", "tp-layers", "own", "ep", "fsdp2-tp", "fsdp-tp")
"""Ways in which a rank calls the whole model once."""

OPTIONS: tuple[Option, ...] = (
    Option("accumulation", ("2 micro-batches", "micro-batches of 3 to 1"), _ONE_CALL),
    Option("checkpointing", ("non-reentrant", "reentrant")),
    Option("autocast", ("bfloat16",)),
    Option("optimizer", ("AdamW",)),
    # torch refuses both for parameters of which some are DTensors, or DTensors of other meshes.
    Option("optimizer", ("fused AdamW", "foreach AdamW"), _WHOLE),
    Option("optimizer", ("ZeRO",), ("ddp",)),
    Option("clipping", ("norm 0.1",), _WHOLE),
    Option("frozen", ("every second block", "embeddings")),
    Option("adapters", ("LoRA",), _WHOLE),  # a plan of transformers loads the model anew, without them
    Option("batch norm", ("SyncBatchNorm",), ("ddp", "fsdp2", "hsdp")),
    Option("state", ("saved and loaded before step 2",), ("ddp", "fsdp2", "hsdp", "fsdp1")),
    Option("buckets", ("view of gradients", "of 1 kB"), ("ddp",)),
    Option("graph", ("static_graph", "find_unused_parameters"), ("ddp",)),
    Option("reshard", ("not after forward",), ("fsdp2", "hsdp")),
    Option("offload", ("to the host",), ("fsdp2", "hsdp")),
    Option("schedule", ("1F1B",), ("pp",)),
    Option("compile", ("aot_eager",), _ONE_CALL),  # last, because it takes longest
)

_REFUSED: tuple[tuple[str, Setting], ...] = (
    *(("", (("autocast", "bfloat16"), ("optimizer", name))) for name in ("AdamW", "fused AdamW", "foreach AdamW")),
    ("ddp", (("checkpointing", "reentrant"), ("graph", "find_unused_parameters"))),
    ("ddp", (("optimizer", "ZeRO"), ("state", "saved and loaded before step 2"))),
    ("pp", (("checkpointing", "reentrant"),)),
)
"""Way, or "" for all, and options that are not combined there. With autocast, rounding decides the sign of Adam's steps
where a gradient is small, so nothing could be compared. Torch 2.13 refuses the others with an error that says so:
torch/csrc/distributed/c10d/reducer.cpp; distributed/optim/zero_redundancy_optimizer.py, whose state is to be
consolidated first; torch/utils/checkpoint.py, as a stage asks for the gradient of its input."""

_RATE = 0.002
"""Learning rate: steps that small leave a network near its first state, where rounding flips few of its ReLUs."""

SYNCHRONIZED: Setting = (("batch norm", "SyncBatchNorm"),)
UNUSED: Setting = (("graph", "find_unused_parameters"),)
PARTS: Mapping[str, tuple[int, ...]] = {"2 micro-batches": (1, 1), "micro-batches of 3 to 1": (3, 1)}
"""Accumulation -> the sizes of micro-batches, relative to each other."""

HALVES: Setting = (("accumulation", "2 micro-batches"),)
FIXED: Setting = (("batch norm statistics", "fixed"),)
"""A control alone, on both sides: batch norms use their running mean and variance."""
UNTIED: Setting = (("tied weights", "untied"),)
"""A control alone, on both sides: users want their weights tied."""


def settings_for(way: str, traits: Traits, compiles: bool, base: Setting = ()) -> list[Setting]:
    """Return settings of a way: each value of an option alone, then settings in which each pair of values occurs.

    Args:
        compiles: whether torch.compile has an effect.
        base: options that all settings have, besides their own.
    """
    options = [option for option in OPTIONS if _applies(option, way, traits, compiles)]
    values = [(option.name, value) for option in options for value in option.values]
    if not traits.embeds:
        values.remove(("frozen", "embeddings"))
    settings = settings_in_pairs(values, lambda setting: not _is_refused(way, tuple(setting.items())))
    merged = dict.fromkeys(tuple((setting | dict(base)).items()) for setting in settings)
    return [setting for setting in merged if {*setting} != {*base} and not _is_refused(way, setting)]


def _is_refused(way: str, setting: Setting) -> bool:
    return any(refusing in ("", way) and {*options} <= {*setting} for refusing, options in _REFUSED)


def _applies(option: Option, way: str, traits: Traits, compiles: bool) -> bool:
    has = {
        "batch norm": bool(traits.batch_norms),
        "compile": compiles,
        "adapters": importlib.util.find_spec("peft") is not None and traits.has_linear,
    }
    return has.get(option.name, True) and (not option.ways or way in option.ways)


def described(setting: Setting) -> str:
    return ", ".join(f"{name}: {value}" for name, value in setting) or "no options"


def untie(model: nn.Module) -> nn.Module:
    """Give each name of a parameter a parameter of its own."""
    for parameter, names in names_of_parameters(model).items():
        for name in names[1:]:
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, nn.Parameter(parameter.detach().clone()))
    return model


def adapt(model: nn.Module) -> nn.Module:
    """Add adapters of LoRA to each Linear, with values that have an effect. Only they are trained."""
    peft = importlib.import_module("peft")
    names = [name for name, module in model.named_modules() if class_of(module) is nn.Linear]
    config = peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False)
    return peft.inject_adapter_in_model(config, model)


def prepare(model: nn.Module, options: Mapping[str, str]) -> None:
    """Change a model in place, before it is divided."""
    if (frozen := options.get("frozen")) is not None:
        chosen: Sequence[nn.Module] = [block for _, block in blocks_of(model)][1::2]
        if frozen == "embeddings":
            chosen = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        for module in chosen:
            module.requires_grad_(False)
    if "batch norm statistics" in options:
        for norm in (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)):
            norm.eval()
            norm.__class__ = type(type(norm).__name__, (type(norm),), {"train": lambda self, mode=True: self})
    if options.get("batch norm"):
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if (kind := options.get("checkpointing")) is not None:
        if getattr(model, "supports_gradient_checkpointing", False) and hasattr(model, "config"):
            _checkpointed_by_transformers(model, {"use_reentrant": kind == "reentrant"})
            return
        for _, block in blocks_of(model):
            _checkpointed(block, kind == "reentrant")


def _checkpointed_by_transformers(model: Any, options: dict[str, bool]) -> None:
    """Recompute blocks by the function of the model, which also turns its caches of keys and values off."""
    if hasattr(model, "activation_checkpointing_enable"):  # the other name is deprecated in transformers 5.24
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _checkpointed(block: nn.Module, reentrant: bool) -> None:
    """Recompute a block in the backward pass. Its class changes, because replicas of nn.DataParallel keep the class."""
    forward = type(block).forward

    def recomputed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        if reentrant:  # it takes no keyword arguments
            return checkpoint(lambda *own: forward(self, *own, **kwargs), *args, use_reentrant=True)
        return checkpoint(forward, self, *args, use_reentrant=False, **kwargs)

    block.__class__ = type(
        type(block).__name__, (type(block),), {"forward": recomputed, "recomputed_class": type(block)}
    )


def optimizer_of(
    parameters: Iterator[nn.Parameter], options: Mapping[str, str], foreach: bool | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer of a setting. `foreach`: False where parameters are DTensors and plain tensors, which torch
    refuses to update together."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    name = options.get("optimizer", "")
    if not name:
        return torch.optim.SGD(trained, lr=_RATE, momentum=0.9, foreach=foreach)
    if name == "ZeRO":
        from torch.distributed.optim import ZeroRedundancyOptimizer  # torch 2.13 warns of itself at this import

        return ZeroRedundancyOptimizer(trained, torch.optim.SGD, lr=_RATE, momentum=0.9)
    if "fused" in name:
        return torch.optim.AdamW(trained, lr=_RATE, fused=True)
    return torch.optim.AdamW(trained, lr=_RATE, foreach="foreach" in name or foreach)


def autocast(device: torch.device, options: Mapping[str, str]) -> contextlib.AbstractContextManager[object]:
    return torch.autocast(device.type, torch.bfloat16) if "autocast" in options else contextlib.nullcontext()
