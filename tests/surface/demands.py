"""Derive what the suite must draw: the options of each signature of torch, and a table of further classes."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Sequence
from fnmatch import translate
from typing import NamedTuple

from mgpu_check.torch_hooks import collective_table
from tests.surface.classes import OPERATIONS, SIZES
from tests.surface.names import SurfaceParameter, entries

CALLED = "called"
"""The class of each call, for the parameter ""."""

Call = tuple[str, str, str]
"""A function, one of its parameters, and a class of a value; the parameter "" has the class `CALLED`."""


class Variant(NamedTuple):
    """A class of values of a parameter; the first variant of each function is that it is called."""

    path: str
    parameter: str
    value: str


class Demand(NamedTuple):
    """Classes that parameters must get besides those of their signatures.

    Attributes:
        paths, parameters: names that `fnmatch` compares, separated by spaces.
    """

    paths: str
    parameters: str
    values: tuple[str, ...]

    def asks(self, path: str, parameter: str) -> bool:
        return matches(parameter, self.parameters) and matches(path, self.paths)


def matches(name: str, patterns: str) -> bool:
    """Return whether a name matches one of the patterns of `fnmatch`, which are separated by spaces."""
    return _compiled(patterns).match(name) is not None


@functools.cache
def _compiled(patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns.split(" "))))


def _collectives(*kinds: str) -> str:
    found = (name for name, row in collective_table.COLLECTIVES.items() if row.kind in kinds)
    return " ".join(f"torch.distributed.{name}" for name in found)


_MOVED = ("bool", "uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
"""The dtypes that NCCL has."""
_OPERAND = (*_MOVED, *SIZES, "contiguous", "offset")

_WORDS = ("'sum'", "'avg'", "'max'", "'min'", "'product'")
"""The operations of functional collectives."""

DEMANDS = (
    Demand(_collectives("reduction", "parts", "copy", "message"), "tensor input input_tensor", _OPERAND),
    Demand("torch.distributed.all_to_all", "*_list", (*_OPERAND, "sizes differ")),
    Demand("torch.distributed.reduce_scatter torch.distributed.all_gather", "*_list", ("sizes differ",)),
    Demand(_collectives("reduction"), "op", OPERATIONS),
    Demand("torch.distributed.reduce_scatter*", "op", OPERATIONS),
    Demand("torch.distributed._functional_collectives.*", "reduceOp", _WORDS),
    Demand("torch.distributed.[a-z]*", "src dst", ("rank 0", "last rank")),
    Demand("torch.distributed.P2POp", "peer", ("itself", "another rank")),
    Demand(_collectives("reduction", "parts", "copy", "message", "objects", "barrier"), "group", ("subgroup",)),
    Demand("torch.distributed.all_to_all_single", "*_split_sizes", ("equal", "some equal", "out of order", "0")),
    Demand("torch.distributed.tensor.*", "device_mesh", ("mesh of 1", "mesh of 2")),
    Demand(
        "torch.nn.parallel.DataParallel torch.nn.parallel.[a-z]*", "device_ids devices", ("in order", "out of order")
    ),
    Demand(
        "torch.nn.parallel.scatter", "inputs", ("list with a dict", "dict with a list", "tuple with a tuple", "square")
    ),
    Demand("torch.nn.parallel.scatter_gather.scatter_kwargs", "kwargs", ("dict", "dict with a list", "float32")),
    Demand("torch.nn.parallel.comm.scatter", "tensor", ("square", "transposed", "strided", "channels_last", "offset")),
    Demand("torch.nn.parallel.comm.broadcast", "tensor", ("transposed", "strided", "offset", "above 2^20")),
    Demand("torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor", "factor", ("1.0", "above 1")),
    Demand("torch.distributed.checkpoint.state_dict.*", "optimizers", ("SGD", "Adam")),
)


def demanded() -> Iterator[tuple[Variant, ...]]:
    """Yield the variants of each function of the installed torch; the first is its call.

    Deprecated functions are left out.
    """
    for entry in entries():
        if not entry.deprecated:
            yield _variants(entry.path, entry.parameters)


def values_of(path: str, parameter: SurfaceParameter) -> list[str]:
    """Return the classes of values that a parameter must get."""
    found = dict.fromkeys(sorted(parameter.domain))
    if parameter.optional and not parameter.domain:
        found["not the default"] = None
    for demand in DEMANDS:
        if demand.asks(path, parameter.name):
            found.update(dict.fromkeys(demand.values))
    return list(found)


def _variants(path: str, parameters: Sequence[SurfaceParameter]) -> tuple[Variant, ...]:
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = [Variant(path, "", CALLED)]
    for parameter in parameters:
        if parameter.kind not in several and not parameter.name.startswith("_"):
            found += [Variant(path, parameter.name, value) for value in values_of(path, parameter)]
    return tuple(found)
