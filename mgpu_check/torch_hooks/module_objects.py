"""Put back the objects of modules that a test has replaced, and detect functions, modules and hooks that it has
replaced.

Functions are not put back: a library may have replaced a function during its import, which happens once per
process. A fresh process has neither. Replacements by installed packages do not count, because they happen in every
process.
"""

from __future__ import annotations

import builtins
import copyreg
import gc
import logging
import os
import pickle
import sys
import types
from collections.abc import Iterator
from operator import is_
from typing import Any

import torch

from mgpu_check.processes.tracebacks import is_installed


def _loaded(module_names: str) -> list[Any]:
    return [sys.modules[name] for name in module_names.split() if name in sys.modules]


def _classes(module_names: str) -> list[type]:
    values = (value for module in _loaded(module_names) for value in vars(module).values())
    return list(dict.fromkeys(value for value in values if isinstance(value, type)))


_OF_TORCH: tuple[Any, ...] = (
    *_loaded("torch torch.nn.functional torch.nn.init torch.autograd torch.cuda torch.random torch.fft torch.linalg"),
    *_loaded("torch.special torch.distributed torch.distributed.distributed_c10d numpy numpy.random"),
    *_classes("torch.nn torch.nn.parallel torch.optim torch.utils.data"),
    *(torch.distributed.ProcessGroup, torch.distributed.Work),
)
_PROCESS_WIDE: tuple[Any, ...] = (
    *_loaded(
        "asyncio.events builtins decimal gc io locale logging multiprocessing os random signal socket ssl subprocess"
    ),
    *_loaded("sys tempfile threading time warnings"),
    *_classes("logging"),
)
"""Modules and classes of Python whose data act on the whole process."""

_OF_PYTHON: tuple[Any, ...] = (
    *_PROCESS_WIDE,
    *(cls for cls in _classes("threading socket subprocess random pathlib") if cls.__flags__ & 1 << 9),  # not of C
    *_loaded("copy functools getpass glob importlib json math os.path pathlib pickle platform posix shutil uuid"),
)
_HOOKS_OF_PYTHON = ("excepthook", "displayhook", "breakpointhook", "unraisablehook")
_ADDED_TO = (builtins, os, sys)
_LISTS = ((sys, "argv"), (sys, "meta_path"), (sys, "path_hooks"), (sys, "warnoptions"), (gc, "callbacks"))
_TABLES = ((logging, "_levelToName"), (logging, "_nameToLevel"), (copyreg, "dispatch_table"))
_HOOKS = tuple(
    (owner, name)
    for owner in _loaded("torch.nn.modules.module torch.optim.optimizer")
    for name, value in vars(owner).items()
    if name.startswith("_global_") and isinstance(value, dict)
)
_KINDS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, staticmethod, classmethod, property)
_MAKERS = (type, types.FunctionType)
_MISSING = object()


def _is_function(owner: Any, name: str, value: Any) -> bool:
    if owner in _PROCESS_WIDE:
        return callable(value) and name not in _HOOKS_OF_PYTHON
    return issubclass(type(value), (*_KINDS, type) if owner in _OF_PYTHON else (*_KINDS, types.MethodDescriptorType))


def _variables(owner: Any, functions: list[str]) -> list[str]:
    """Return the names of data, without the numbers that are constants: `socket` and `ssl` have hundreds."""
    data = vars(owner).keys() - functions
    return [name for name in data if not (name.isupper() and isinstance(vars(owner)[name], int))]


# Computed once, in the fork server: each value that a rank touches makes it copy a page of memory.
_FUNCTIONS = (
    *(
        (owner, [name for name, value in vars(owner).items() if _is_function(owner, name, value)])
        for owner in (*_OF_TORCH, *_OF_PYTHON)
    ),
    (torch.Tensor, [name for name in dir(torch.Tensor) if callable(getattr(torch.Tensor, name))]),  # also inherited
)
_DATA = (
    *((owner, _variables(owner, attributes)) for owner, attributes in _FUNCTIONS if owner in _PROCESS_WIDE),
    *((owner, ["default_generator"]) for owner in (torch, torch.random)),
    (torch.hub, ["_hub_dir"]),
)


class Replaceable:
    """The objects, functions, modules and hooks of a fresh rank that a test could replace.

    A rank makes it once, before its first call. After each call it restores the data, and describes what else changed.
    """

    def __init__(self) -> None:
        self._functions = [(owner, names, list(map(vars(owner).get, names))) for owner, names in _FUNCTIONS]
        self._values = [[*vars(owner).values()] for owner, _ in _FUNCTIONS]
        self._data = [(owner, names, list(map(vars(owner).get, names))) for owner, names in _DATA]
        self._lists = [(value, list(value)) for value in (getattr(owner, name) for owner, name in _LISTS)]
        self._tables = [(value, dict(value)) for value in (getattr(owner, name) for owner, name in _TABLES)]
        self._added_to = [(owner, frozenset(vars(owner))) for owner in _ADDED_TO]
        self._known = frozenset(sys.modules)
        self._modules = {name: value for name, value in sys.modules.items() if name.count(".") < 2}
        self._needed = [(owner.__name__, vars(owner), dict(vars(owner))) for owner in (builtins, pickle)]
        self._put_back: set[str] = set()
        self._hooks = [dict(getattr(owner, name)) for owner, name in _HOOKS]

    def put_back_what_messages_need(self) -> None:
        """Put back functions without which a rank cannot read its next message. A replaced one stays in `changed`."""
        replaced = []
        for owner, present, fresh in self._needed:  # a call of a function would use what a test has replaced
            for name in fresh if present != fresh else ():
                if name not in present or present[name] is not fresh[name]:
                    replaced += [(owner, present, name, present.get(name))]
                    present[name] = fresh[name]
        for owner, present, name, value in replaced:
            if _by_a_test(value):
                self._put_back.add(f"{owner}.{name}")
            else:
                present[name] = value

    def restore(self, imported: bool) -> None:
        """Put back what no library needs to be replaced: data, hooks of Python, and the contents of lists and tables.

        `imported`: whether the test has imported a module, which may have added names to other modules.
        """
        for owner, attributes, values in self._data:
            present = vars(owner)
            if not all(map(is_, map(present.get, attributes), values)):  # equal objects are not the same
                for name, value in zip(attributes, values, strict=True):
                    if present.get(name, _MISSING) is not value:
                        setattr(owner, name, value)
        for values, before in self._lists:
            if len(values) != len(before) or not all(map(is_, values, before)):
                added = (value for value in values if not any(value is entry for entry in before))
                makers = ((value, value if isinstance(value, _MAKERS) else type(value)) for value in added)
                values[:] = [*before, *(value for value, maker in makers if not _by_a_test(maker))]
        for table, original in self._tables:
            table.update(original)
        for owner, fresh in self._added_to if not imported else ():
            for name in vars(owner).keys() - fresh if len(vars(owner)) > len(fresh) else ():
                delattr(owner, name)

    def changed(self) -> list[str]:
        """Describe the functions, modules and hooks that have changed."""
        replaced = set(self._put_back)
        for number, (owner, attributes, functions) in enumerate(self._functions):
            present = vars(owner)
            values = [*present.values()]
            if _are_equal(values, self._values[number]):
                continue
            for name, function in zip(attributes, functions, strict=True):
                now = present.get(name)
                if now is not function and _by_a_test(now, owner):
                    replaced.add(f"{owner.__name__}.{name}")
            self._values[number] = values
        lines = [f"replaced functions: {', '.join(sorted(replaced))}"] if replaced else []
        if entries := sorted({*self._changed_modules()}):
            lines.append(f"changed entries of sys.modules: {', '.join(entries)}")
        if any(dict(getattr(owner, name)) != hooks for (owner, name), hooks in zip(_HOOKS, self._hooks, strict=True)):
            lines.append("hooks on all modules or optimizers")
        return lines

    def _changed_modules(self) -> Iterator[str]:
        if not all(map(is_, map(sys.modules.get, self._modules), self._modules.values())):
            yield from (name for name, module in self._modules.items() if sys.modules.get(name, _MISSING) is not module)
        if sys.modules.keys() <= self._known:  # as it nearly always is, and without another set
            return
        for name in sys.modules.keys() - self._known:
            # An import gives a module its specification, which a stub of a test lacks.
            if "." not in name and name != "__mp_main__" and getattr(sys.modules[name], "__spec__", None) is None:
                yield name


def _are_equal(values: list[Any], before: list[Any]) -> bool:
    try:
        return values == before  # by far the fastest way to compare thousands
    except Exception:  # a tensor in the place of another has no truth
        return False


def _by_a_test(value: Any, owner: Any = sys) -> bool:
    """Return whether a test has set a value, rather than an installed package.

    Python itself does not replace its functions, so a test has set a function of Python in the place of another.
    """
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    if code is not None:
        file = str(code.co_filename)
    elif isinstance(value, type):
        file = getattr(sys.modules.get(value.__module__), "__file__", None) or ""
    else:
        return True
    return not is_installed(file) or (owner in _OF_PYTHON and "-packages/" not in file)
