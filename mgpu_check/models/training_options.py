"""Options of a training that must not change what it computes, or change it as on one device.

A setting of options is a mapping from name to value, without those that have their default. `OPTIONS` has their values.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mgpu_check.models.traits import Traits, blocks_of, names_of_parameters

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

OPTIONS: tuple[Option, ...] = (
    Option("accumulation", ("2 micro-batches",)),
    Option("checkpointing", ("non-reentrant", "reentrant")),
    Option("autocast", ("bfloat16",)),
    Option("optimizer", ("AdamW",)),
    # torch refuses both for parameters of which some are DTensors, or DTensors of other meshes.
    Option("optimizer", ("fused AdamW", "foreach AdamW"), _WHOLE),
    Option("clipping", ("norm 0.1",), _WHOLE),
    Option("frozen", ("every second block", "embeddings")),
    Option("batch norm", ("SyncBatchNorm",), ("ddp", "fsdp2", "hsdp")),
    Option("state", ("saved and loaded before step 2",), ("ddp", "fsdp2", "hsdp", "fsdp1")),
    Option("buckets", ("view of gradients", "of 1 kB"), ("ddp",)),
    Option("graph", ("static_graph", "find_unused_parameters"), ("ddp",)),
    Option("reshard", ("not after forward",), ("fsdp2", "hsdp")),
    Option("compile", ("aot_eager",)),  # last, because it takes longest
)

_REFUSED: tuple[tuple[str, Setting], ...] = (
    ("ddp", (("checkpointing", "reentrant"), ("graph", "find_unused_parameters"))),
)
"""Pairs that torch refuses with an error that says so (torch/csrc/distributed/c10d/reducer.cpp, torch 2.13)."""

SYNCHRONIZED: Setting = (("batch norm", "SyncBatchNorm"),)
UNUSED: Setting = (("graph", "find_unused_parameters"),)
HALVES: Setting = (("accumulation", "2 micro-batches"),)
UNTIED: Setting = (("tied weights", "untied"),)
"""A control alone, on both sides: users want their weights tied."""


def settings_for(way: str, traits: Traits, compiles: bool, base: Setting = ()) -> list[Setting]:
    """Return settings of a way: each value of an option alone, then settings in which each pair of values occurs.

    The pairs are covered greedily: each setting starts with the first pair that is missing, and takes the values that
    add most pairs (Cohen et al., The AETG system, 1997).

    Args:
        compiles: whether torch.compile has an effect.
        base: options that all settings have, besides their own.
    """
    options = [option for option in OPTIONS if _applies(option, way, traits, compiles)]
    names = [option.name for option in options]
    values = [(option.name, value) for option in options for value in option.values]
    if not traits.embeds:
        values.remove(("frozen", "embeddings"))
    alone: list[Setting] = [(value,) for value in values]
    pairs = itertools.combinations(values, 2)
    missing = {pair for pair in pairs if pair[0][0] != pair[1][0] and not _is_refused(way, pair)}
    covering: list[Setting] = []
    while missing:
        chosen = dict(min(missing, key=lambda pair: [values.index(value) for value in pair]))
        for option in options:
            if option.name in chosen:
                continue
            same = [value for name, value in values if name == option.name]
            allowed = [value for value in same if not _is_refused(way, (*chosen.items(), (option.name, value)))]
            gains = {value: _new_pairs(chosen, (option.name, value), missing) for value in allowed}
            best = max(gains, key=gains.__getitem__, default="")
            if gains.get(best):
                chosen[option.name] = best
        setting = tuple(sorted(chosen.items(), key=lambda item: names.index(item[0])))
        missing -= set(itertools.combinations(setting, 2))
        covering.append(setting)
    merged = (tuple((dict(setting) | dict(base)).items()) for setting in (*alone, *covering))
    settings = (setting for setting in dict.fromkeys(merged) if {*setting} != {*base})
    return [setting for setting in settings if not _is_refused(way, setting)]


def _is_refused(way: str, setting: Setting) -> bool:
    return any(way == refusing and {*pair} <= {*setting} for refusing, pair in _REFUSED)


def _applies(option: Option, way: str, traits: Traits, compiles: bool) -> bool:
    if (option.name == "batch norm" and not traits.batch_norms) or (option.name == "compile" and not compiles):
        return False
    return not option.ways or way in option.ways


def _new_pairs(chosen: Mapping[str, str], value: Pair, missing: set[tuple[Pair, Pair]]) -> int:
    pairs = ((other, value) for other in chosen.items())
    return sum(pair in missing or pair[::-1] in missing for pair in pairs)


def described(setting: Setting) -> str:
    return ", ".join(f"{name}: {value}" for name, value in setting) or "no options"


def untie(model: nn.Module) -> nn.Module:
    """Give each name of a parameter a parameter of its own."""
    for parameter, names in names_of_parameters(model).items():
        for name in names[1:]:
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, nn.Parameter(parameter.detach().clone()))
    return model


def prepare(model: nn.Module, options: Mapping[str, str]) -> None:
    """Change a model in place, before it is divided."""
    if (frozen := options.get("frozen")) is not None:
        chosen: Sequence[nn.Module] = [block for _, block in blocks_of(model)][1::2]
        if frozen == "embeddings":
            chosen = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        for module in chosen:
            module.requires_grad_(False)
    if options.get("batch norm"):
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if (kind := options.get("checkpointing")) is not None:
        for _, block in blocks_of(model):
            _checkpointed(block, kind == "reentrant")


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
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9, foreach=foreach)
    if "fused" in name:
        return torch.optim.AdamW(trained, lr=0.01, fused=True)
    return torch.optim.AdamW(trained, lr=0.01, foreach="foreach" in name or foreach)


def autocast(device: torch.device, options: Mapping[str, str]) -> contextlib.AbstractContextManager[object]:
    return torch.autocast(device.type, torch.bfloat16) if "autocast" in options else contextlib.nullcontext()
