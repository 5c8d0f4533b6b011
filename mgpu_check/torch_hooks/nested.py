"""Walk nested values (dataclasses, mappings, named tuples, lists, tuples, and types registered with torch's pytree),
and list what a module holds, without its methods.

The pytree alone is not enough, because it treats dataclasses and most mappings as leaves.

Users override and shadow the methods of modules: the wrapper of Megatron has a list with the name `buffers`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map


def entries(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the parts of a value, each with its key, name or index; None for a leaf."""
    if isinstance(value, torch.Tensor):
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return [(key, value[key]) for key in value]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    children = tree_leaves(value, is_leaf=lambda node: node is not value)
    return None if len(children) == 1 and children[0] is value else list(enumerate(children))


def leaves(value: Any, is_leaf: Callable[[Any], bool] = lambda value: False) -> Iterator[Any]:
    """Yield the leaves of a value in order. `is_leaf` may make further values leaves."""
    children = None if is_leaf(value) else entries(value)
    if children is None:
        yield value
    else:
        for _, child in children:
            yield from leaves(child, is_leaf)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a value in order; for a dataclass, those of its constructor's parameters."""
    tensors: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    _mapped(take, value)
    return tensors


def with_tensors(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the same structure with its tensors replaced by `tensors`, in the order of `tensors_of`."""
    rest = iter(tensors)
    return _mapped(lambda tensor: next(rest), value)


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: _mapped(change, getattr(value, field.name)) for field in dataclasses.fields(value) if field.init
        }
        return dataclasses.replace(value, **changed)
    if isinstance(value, Mapping):
        new: Any = copy.copy(value)
        for key in list(value):
            new[key] = _mapped(change, value[key])
        return new
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(change, child) for child in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(change, child) for child in value)
    return tree_map(lambda child: child if child is value else _mapped(change, child), value)


def named_modules(
    module: nn.Module, unwrapped: Callable[[nn.Module], nn.Module] = lambda module: module
) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and all modules within it, each once, with its name, as `nn.Module.named_modules` does.

    `unwrapped`: returns the module that takes the place of a module.
    """
    visited: set[int] = set()
    rest = [("", module)]
    while rest:
        name, module = rest.pop()
        module = unwrapped(module)
        if id(module) not in visited:
            visited.add(id(module))
            yield name, module
            inner = [(_joined(name, key), child) for key, child in module._modules.items() if child is not None]
            rest += reversed(inner)


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a module and of its inner modules, each once, with its name."""
    return _named(module, "_parameters")


def named_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of a module and of its inner modules, each once, with its name."""
    return _named(module, "_buffers")


def _named(module: nn.Module, attribute: str) -> Iterator[tuple[str, Any]]:
    yielded: set[int] = set()
    for name, submodule in named_modules(module):
        for key, tensor in getattr(submodule, attribute).items():
            if tensor is not None and id(tensor) not in yielded:
                yielded.add(id(tensor))
                yield _joined(name, key), tensor


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
