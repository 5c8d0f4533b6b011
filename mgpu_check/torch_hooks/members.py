"""List what a module holds, without its methods.

Users override and shadow them: the wrapper of Megatron has a list with the name `buffers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


def named_modules(
    module: nn.Module, unwrapped: Callable[[nn.Module], nn.Module] = lambda module: module
) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and all modules within it, each once, with its name, as `nn.Module.named_modules` does.

    Args:
        unwrapped: returns the module that takes the place of a module.
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


def _named(module: nn.Module, kind: str) -> Iterator[tuple[str, Any]]:
    yielded: set[int] = set()
    for name, part in named_modules(module):
        for key, tensor in getattr(part, kind).items():
            if tensor is not None and id(tensor) not in yielded:
                yielded.add(id(tensor))
                yield _joined(name, key), tensor


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
