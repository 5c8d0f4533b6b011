"""Detect functions of torch and Python that a test has replaced, and hooks that it has registered on all modules.

They are not restored: a library may have replaced a function during its import, which happens once per process. A fresh
process has neither. Replacements by installed packages do not count, because they happen in every process.

torch's operators in C and its classes are not checked. There are two thousand of them, and the check runs after every
test.
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


# Computed once, in the fork server: each value that a rank touches makes it copy a page of memory.
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
        """Describe the functions and hooks that have changed."""
        found = []
        for owner, names, functions in self._functions:
            now = vars(owner)
            if list(map(now.get, names)) == functions:  # by far the fastest way to compare thousands
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
