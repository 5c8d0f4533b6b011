"""Functions of torch and of Python that code has put others in the place of, and hooks that it has put on all modules.

They are not put back, because a library may have done it as it was imported, and is imported once: a fresh process has
neither. What installed packages do is left alone, for they do it in every process.

Operators of torch that are written in C, and classes, are not looked at. There are two thousand of them, and this happens
after every test.
"""

from __future__ import annotations

import builtins
import os
import random
import time
import types
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.modules import module as modules

from mgpu_check.processes.frames import is_installed

__all__ = ["Replaceable"]

_OWNERS: tuple[Any, ...] = (
    *(torch, torch.Tensor, torch.nn.Module, torch.nn.functional, torch.cuda),
    *(dist, c10d, dist.ProcessGroup, dist.Work, torch.optim.Optimizer),
    *(builtins, os, random, time),
)
_HOOKS = tuple(name for name, value in vars(modules).items() if name.startswith("_global_") and isinstance(value, dict))
_FUNCTIONS = (types.FunctionType, types.MethodDescriptorType, staticmethod, classmethod, property)
_WITH_C = (builtins, dist, c10d, random, time)


def _kinds(owner: Any) -> tuple[type, ...]:
    return (*_FUNCTIONS, types.BuiltinFunctionType, types.MethodType) if owner in _WITH_C else _FUNCTIONS


# Looked up once, in the process that ranks are forked from: each value that is looked at is a page that a rank then copies.
_NAMES = tuple(
    (owner, [name for name, value in vars(owner).items() if issubclass(type(value), _kinds(owner))])
    for owner in _OWNERS
)
_MISSING = object()


class Replaceable:
    """The functions and hooks of a fresh rank that a test could replace."""

    def __init__(self) -> None:
        self._functions = [(owner, names, list(map(vars(owner).get, names))) for owner, names in _NAMES]
        self._hooks = {name: dict(getattr(modules, name)) for name in _HOOKS}

    def changed(self) -> list[str]:
        """Describe what stands elsewhere now."""
        found = []
        for owner, names, functions in self._functions:
            now = vars(owner)
            if list(map(now.get, names)) == functions:  # by far the fastest way to look at thousands
                continue
            for name, value in zip(names, functions, strict=True):
                if now.get(name, _MISSING) is not value and _by_a_test(now.get(name, _MISSING)):
                    found.append(f"{owner.__name__}.{name}")
        lines = [f"replaced functions: {', '.join(sorted(found))}"] if found else []
        if any(dict(getattr(modules, name)) != hooks for name, hooks in self._hooks.items()):
            lines.append("hooks on all modules")
        return lines


def _by_a_test(value: Any) -> bool:
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    return code is None or not is_installed(code.co_filename)
