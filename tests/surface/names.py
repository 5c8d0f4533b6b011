"""List the public functions and classes of the installed torch for several devices, with their parameters.

The list is the *surface*: everything about ranks, devices and loaders that a check of the suite could call.
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

AREAS: Mapping[str, tuple[str, ...]] = types.MappingProxyType({
    "torch.distributed": ("", ".nn", ".device_mesh"),
    "torch.distributed._functional_collectives": ("",),
    "torch.distributed.fsdp": ("",),
    "torch.distributed.tensor": ("", ".parallel", ".experimental"),
    "torch.distributed.optim": ("",),
    "torch.distributed.checkpoint": ("", ".state_dict"),
    "torch.distributed.pipelining": ("",),
    "torch.distributed.algorithms": ("", ".ddp_comm_hooks.default_hooks"),
    "torch.nn.parallel": ("", ".comm", ".scatter_gather"),
    "torch.cuda": ("", ".nvtx", ".nccl", ".amp"),
    "torch.utils.data.distributed": ("",),
})  # fmt: skip
"""Area of the report -> the ends of the names of its modules. An object of several modules counts for the first."""

_HOMES = ("torch.", "mgpu_check.simulated.")
"""The packages of public objects; the simulated node replaces some objects of torch."""

_HEAP_TYPE = 1 << 9
"""The flag of classes whose attributes can be set; classes of C lack it, such as ``torch.cuda.FloatTensor``."""

_Kind = Literal["function", "constructor", "method"]


class SurfaceParameter(NamedTuple):
    """A parameter of a function.

    Attributes:
        default: the default value; `inspect.Parameter.empty` without one.
        domain: all values of an enum or of a ``Literal``, as their classes; empty for other types.
    """

    name: str
    kind: inspect._ParameterKind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    default: Any = inspect.Parameter.empty
    domain: frozenset[str] = frozenset()

    @property
    def optional(self) -> bool:
        return self.default is not inspect.Parameter.empty


@dataclass(frozen=True)
class Callee:
    """A function, constructor or method of the surface.

    Attributes:
        path: its name, such as ``torch.distributed.Store.set``; that of a constructor is the name of the class.
        owner: the class of a method or constructor; None for a function.
    """

    path: str
    kind: _Kind
    function: Callable[..., Any]
    owner: type | None = None

    @property
    def deprecated(self) -> bool:
        """True if torch warns of each call."""
        return hasattr(self.function, "__deprecated__") or hasattr(self.owner, "__deprecated__")

    @property
    def attribute(self) -> str:
        return "__init__" if self.kind == "constructor" else self.path.rpartition(".")[2]

    @functools.cached_property
    def parameters(self) -> tuple[SurfaceParameter, ...]:
        return _parameters(self.function, bound=self.owner is not None)


def area_of(path: str) -> str:
    """Return the area of an entry by its path."""
    return max((area for area in AREAS if path.startswith(f"{area}.")), key=len)


def entries() -> list[Callee]:
    """Return the functions, constructors and methods of all areas. Imports their modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated names
        return list(_entries())


def _entries() -> Iterator[Callee]:
    seen: set[int] = set()
    for area, ends in AREAS.items():
        for end in ends:
            module = _imported(f"{area}{end}")
            if module is None:
                continue  # this build of torch, or this version, lacks it
            for name in _public(module):
                value = getattr(module, name, None)
                if id(value) in seen or not str(getattr(value, "__module__", "")).startswith(_HOMES):
                    continue
                seen.add(id(value))
                path = f"{module.__name__}.{name}"
                if isinstance(value, type):
                    yield from _of_class(path, value)
                elif isinstance(value, types.FunctionType):
                    yield Callee(path, "function", value)


def tagged() -> str:
    """Return the version of torch without the build, such as "2.13.0"."""
    return str(torch.__version__).partition("+")[0]


def _imported(name: str) -> types.ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _public(module: types.ModuleType) -> list[str]:
    names = getattr(module, "__all__", None)
    return sorted(names if names is not None else (name for name in vars(module) if not name.startswith("_")))


def _of_class(path: str, kind: type) -> Iterator[Callee]:
    """Yield the constructor and the public methods that a class defines itself; none for errors and enums."""
    if issubclass(kind, (BaseException, enum.Enum)) or kind.__module__.startswith("torch._C"):
        return
    if getattr(kind, "_is_protocol", False) or not kind.__flags__ & _HEAP_TYPE:
        return
    # The simulated node's classes inherit methods that torch's classes define.
    several = kind.__mro__[:-1] if kind.__module__.startswith(_HOMES[1]) else (kind,)
    own = {name: value for base in reversed(several) for name, value in vars(base).items()}
    if isinstance(own.get("__init__"), types.FunctionType):
        yield Callee(path, "constructor", own["__init__"], kind)
    for name, value in sorted(own.items()):
        function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        if not name.startswith("_") and isinstance(function, types.FunctionType):
            yield Callee(f"{path}.{name}", "method", function, None if isinstance(value, staticmethod) else kind)


def _parameters(function: Callable[..., Any], *, bound: bool = False) -> tuple[SurfaceParameter, ...]:
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return ()
    return tuple(SurfaceParameter(p.name, p.kind, p.default, _domain(p)) for p in found[bound:])


def _domain(parameter: inspect.Parameter) -> frozenset[str]:
    """Return the classes of all values of a parameter, from the type of its default or its annotation."""
    default, text = parameter.default, str(parameter.annotation)
    if isinstance(default, bool) or text in ("bool", "<class 'bool'>"):
        return frozenset({"True", "False"})
    if text.removeprefix("typing.") in ("bool | None", "Optional[bool]"):
        return frozenset({"True", "False", "None"})
    for kind in (parameter.annotation, type(default)):
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return frozenset(kind.__members__)
    if "Literal[" in text:
        inner = text.partition("Literal[")[2].partition("]")[0]
        return frozenset(part.strip().replace('"', "'") for part in inner.split(","))
    return frozenset()
