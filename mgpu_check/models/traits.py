"""The traits of a model that ways and options depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from mgpu_check.gates.gate_arguments import definition_of
from mgpu_check.gates.search.scenarios import Mesh


@dataclass(frozen=True)
class Traits:
    """The traits of a model.

    Attributes:
        name: name of its class.
        parameters: number of elements.
        batch_norms: modules whose statistics are those of the samples that they see.
        tied: names of each parameter that has several.
        plans: kinds of plans that the model has itself: "tp", "ep".
        divisible: names of Linear and Embedding modules that four ranks can divide.
        embeds: whether it has embeddings.
        has_linear: whether it has Linear modules.
        attends: whether context parallelism is known for its attention: a causal language model of transformers.
        defined: the line where its class is defined; "" for a class of torch.
        mesh: axes and sizes of the mesh of a function `parallelize` of the user; () without one.
    """

    name: str
    parameters: int
    batch_norms: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...]
    plans: tuple[str, ...]
    divisible: tuple[str, ...]
    embeds: bool
    has_linear: bool
    attends: bool
    defined: str
    mesh: Mesh = ()


def traits_of(model: nn.Module, mesh: Mesh = ()) -> Traits:
    norms = [name for name, each in model.named_modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    return Traits(
        type(model).__name__,
        sum(parameter.numel() for parameter in model.parameters()),
        tuple(norms),
        tuple(tuple(names) for names in names_of_parameters(model).values() if len(names) > 1),
        tuple(kind for kind in ("tp", "ep") if _plan_of(model, kind)),
        tuple(divisible_layers(model, 4)),
        any(isinstance(module, nn.Embedding) for module in model.modules()),
        any(class_of(module) is nn.Linear for module in model.modules()),
        _attends(model),
        "" if type(model).__module__.startswith("torch.") else definition_of(type(model)),
        mesh,
    )


def names_of_parameters(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _plan_of(model: nn.Module, kind: str) -> object:
    """Return the plan that a model of transformers declares, or its configuration."""
    own = getattr(model, f"_{kind}_plan", None)
    return own or getattr(getattr(model, "config", None), f"base_model_{kind}_plan", None)


def _attends(model: nn.Module) -> bool:
    """Return whether a model is a causal language model of transformers with SDPA, in modules named `self_attn`."""
    config: Any = getattr(model, "config", None)
    causal = (
        getattr(model, "loss_type", None) == "ForCausalLM" and getattr(config, "_attn_implementation", "") == "sdpa"
    )
    return causal and any(name.endswith("self_attn") for name, _ in model.named_modules())


def divisible_layers(model: nn.Module, size: int) -> list[str]:
    """Return the names of Linear and Embedding modules whose outputs, or rows, `size` divides."""
    rows = {nn.Linear: "out_features", nn.Embedding: "num_embeddings"}
    kinds = [(name, module, class_of(module)) for name, module in model.named_modules()]
    return [name for name, module, kind in kinds if kind in rows and getattr(module, rows[kind]) % size == 0]


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module as it was built, before an option has changed it."""
    return getattr(module, "recomputed_class", type(module))


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the repeated blocks of a model by name: the longest list of modules, or the children of the model."""
    kinds = (nn.ModuleList, nn.Sequential)
    lists = [entry for kind in kinds for entry in model.named_modules() if isinstance(entry[1], kind)]
    lists = [entry for entry in lists if type(entry[1]) is type(lists[0][1])]
    name, longest = max(lists, key=lambda entry: len(entry[1]), default=("", model))
    children = [(f"{name}.{key}".lstrip("."), child) for key, child in longest.named_children()]
    return [entry for entry in children if any(True for _ in entry[1].parameters())]
