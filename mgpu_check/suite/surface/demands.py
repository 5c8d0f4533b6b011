"""Derive what the suite must draw: the options of each signature of torch, and a table of further classes."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Sequence
from fnmatch import translate
from typing import NamedTuple

from mgpu_check.suite.surface.classes import OPERATIONS, SIZES
from mgpu_check.suite.surface.names import SurfaceParameter, entries, operators
from mgpu_check.torch_hooks import table

CALLED = "called"
"""The class of each call, for the parameter ""."""


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
    found = (name for name, row in table.COLLECTIVES.items() if row.kind in kinds)
    return " ".join(f"torch.distributed.{name}" for name in found)


_MOVED = ("bool", "uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
"""The dtypes that NCCL has."""
_FLOATS = ("float16", "bfloat16", "float32")
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
    Demand("torch.amp.GradScaler", "growth_interval", ("1", "to 2^8")),
    Demand("torch.amp.GradScaler.scale", "outputs", ("0-d", "list", "tuple")),
    Demand("torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor", "factor", ("1.0", "above 1")),
    Demand("torch.distributed.checkpoint.state_dict.*", "optimizers", ("SGD", "Adam")),
    Demand("torch.optim.[A-Z]*", "params", ("dict", *_FLOATS)),
    Demand("operators.bmm operators.mm operators.matmul", "input mat2 other", (*_FLOATS, "transposed", "to 2^16")),
    Demand("operators.addmm operators.baddbmm", "mat1 mat2 batch1 batch2", (*_FLOATS, "transposed")),
    Demand("operators.linear", "input", (*_FLOATS, "transposed", "to 2^16")),
    Demand(
        "operators.topk operators.sort operators.cumsum operators.softmax operators.logsumexp",
        "input",
        ("rows above 2^8", "transposed", *_FLOATS),
    ),
    Demand("operators.sum operators.mean operators.max operators.add operators.mul", "input", ("above 2^20", *_FLOATS)),
    Demand("operators.copy operators.to", "input", ("transposed", "strided", "offset", "above 2^20", "channels_last")),
    Demand("operators.conv2d", "input", ("channels_last", *_FLOATS)),
)


def demanded() -> Iterator[tuple[Variant, ...]]:
    """Yield the variants of each function of the installed torch; the first is its call.

    Deprecated functions are left out.
    """
    for entry in entries():
        if not entry.deprecated:
            yield _variants(entry.path, entry.parameters)
    merged: dict[str, dict[Variant, None]] = {}
    for one in operators().values():
        merged.setdefault(one.name, {}).update(dict.fromkeys(_variants(*one)))
    yield from map(tuple, merged.values())


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
