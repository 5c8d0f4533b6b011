"""Read the arguments of a collective, called as a function of ``torch.distributed`` or as a method of a process
group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mgpu_check.torch_hooks.table import COLLECTIVES, METHODS, OPERATIONS, ROOTS, is_list

_SINGLE = ("tensor", "output", "input")
# Names of the options as arguments of methods, and as attributes of the options objects that some methods take.
_KEYWORDS = {
    "op": ("op", "reduceOp"),
    "group_src": ("root", "srcRank", "rootRank"),
    "group_dst": ("root", "dstRank", "rootRank"),
    "tag": ("tag",),
}
_OTHER_KEYWORDS = frozenset({"opts", "timeout", "op", "root", "tag", "srcRank", "dstRank"})


class Form(Protocol):
    """How to read the arguments of one function or method.

    Attributes:
        name: of the function of ``torch.distributed`` in reports.
        parameters: the names that `argument` accepts.
        group: name of the parameter for the process group.
        operand: name of the parameter for the operand; empty without an operand.
        options: names of the parameters that must be equal on all ranks.
        root: name of the parameter for the root or peer, "src" or "dst".
        peer: whether it is a send or a receive.
        symmetric: whether all ranks must have operands of the same dtypes and sizes.
        paired: whether the tensors of a rank must match those of its peers; see `flows`.
    """

    name: str
    parameters: tuple[str, ...]
    group: str
    operand: str
    options: tuple[str, ...]
    root: str
    peer: bool
    symmetric: bool
    paired: bool

    def argument(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the argument called `name`, or None."""


class _OfTable:
    def __init__(self, function: str) -> None:
        known = COLLECTIVES[function]
        self.name = function.lstrip("_")
        self.peer = known.kind == "message"
        self.symmetric = known.sizes == "equal"
        self.paired = known.sizes == "paired"


class FunctionForm(_OfTable):
    """Reads the arguments of one function by its signature."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function.__name__)
        parameters = inspect.signature(function).parameters
        self.parameters = tuple(parameters)
        self._positions = {name: index for index, name in enumerate(parameters)}
        self.operand = COLLECTIVES[function.__name__].operand
        self.group = "group" if "group" in parameters else "process_group"
        self.options = tuple(name for name in (*OPERATIONS, *ROOTS) if name in parameters)
        self.root = "src" if "src" in parameters else "dst"
        self._defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
        if "self" in parameters:  # a functional collective: `self` is its input
            self.operand = "self"
            self._positions["input"] = self._positions["self"]

    def argument(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if name in kwargs:
            return kwargs[name]
        position = self._positions.get(name, len(args))
        return args[position] if position < len(args) else self._defaults.get(name)


class MethodForm(_OfTable):
    """Reads the arguments of one method by the table. Its first argument is the group."""

    def __init__(self, method: str) -> None:
        super().__init__(METHODS[method].function)
        self._given = METHODS[method].parameters
        self.parameters = ("group", *self._given)
        self.operand = next((name for name in ("tensor", "tensors", "output") if name in self._given), "")
        self.group = "group"
        self.options = tuple(name for name in (*OPERATIONS, *ROOTS) if name in self._given)
        self.root = "src" if "group_src" in self._given or self.name == "recv" else "dst"

    def argument(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if name == "group":
            return args[0]
        if name not in self._given:
            return None
        position = 1 + self._given.index(name)
        if name in _KEYWORDS:
            return _option(name, args[position : position + 1], [*args[1:], kwargs.get("opts")], kwargs)
        given = [*args[1:], *(value for key, value in kwargs.items() if key not in _OTHER_KEYWORDS)]
        value = given[position - 1] if position <= len(given) else None
        if name in _SINGLE or (is_list(name) and _nested(value)):
            return value[0] if isinstance(value, (list, tuple)) and value else value
        return value


def _nested(value: Any) -> bool:
    """Return whether a value is a list of lists of tensors, with one list for the single device of this process."""
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], (list, tuple))


def _option(name: str, at: Sequence[Any], objects: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    for key in _KEYWORDS[name]:
        if key in kwargs:
            return kwargs[key]
        for value in objects:
            if type(value).__name__.endswith("Options") and hasattr(value, key):
                return getattr(value, key)
    return next((value for value in at if not type(value).__name__.endswith("Options")), None)
