"""Record each collective in a rank as it is entered, and what the ranks must agree on.

The public functions of ``torch.distributed``, and those of its functional collectives, are replaced by ones that note
name, operand and call site before they do the same. The C++ reducer of DistributedDataParallel passes them by.
"""

from __future__ import annotations

import functools
import inspect
import mmap
import os
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d
from torch.distributed import utils

from mgpu_check.processes import record
from mgpu_check.processes.frames import calling_line
from mgpu_check.processes.protocol import ANY, COLLECTIVE, Flow, Group
from mgpu_check.torch_hooks.arguments import compared, group_of, option, shown
from mgpu_check.torch_hooks.flows import FLOWS, Flows
from mgpu_check.torch_hooks.group_methods import METHODS, MethodForm
from mgpu_check.torch_hooks.patches import Patches

__all__ = ["RECORDED", "Agreement", "Recorder", "install", "recorded_method", "recorded_wait", "recorder"]

# The parameter that says what a rank contributes, or receives, by which ranks can be compared.
_COLLECTIVES = {
    "all_reduce": "tensor",
    "all_reduce_coalesced": "tensors",
    "broadcast": "tensor",
    "reduce": "tensor",
    "all_gather": "tensor",
    "all_gather_coalesced": "input_tensor_list",
    "all_gather_into_tensor": "input_tensor",
    "all_gather_single": "input_tensor",
    "all_gather_object": "",
    "gather": "tensor",
    "gather_single": "tensor",
    "gather_into_tensor": "tensor",
    "gather_object": "",
    "scatter": "tensor",
    "scatter_object_list": "",
    "broadcast_object_list": "",
    "reduce_scatter": "output",
    "reduce_scatter_tensor": "output",
    "reduce_scatter_single": "output",
    "all_to_all": "",
    "all_to_all_single": "",
    "barrier": "",
    "monitored_barrier": "",
}
_PEERS = {
    "send": "tensor",
    "isend": "tensor",
    "recv": "tensor",
    "irecv": "tensor",
    "send_object_list": "",
    "recv_object_list": "",
}
_FUNCTIONAL = {
    "all_reduce": "self",
    "all_reduce_coalesced": "self",
    "broadcast": "self",
    "all_gather_single": "self",
    "all_gather_tensor": "self",
    "all_gather_into_tensor_coalesced": "self",
    "all_gather_single_coalesced": "self",
    "reduce_scatter_single": "self",
    "reduce_scatter_tensor": "self",
    "reduce_scatter_tensor_coalesced": "self",
    "reduce_scatter_single_coalesced": "self",
    "all_to_all_single": "self",
}
# Those of which every rank has tensors of as many elements, and of the same dtype. In the others what a rank has must be
# what its peer has for it: see `flows`.
_SYMMETRIC = frozenset(
    {"all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "all_gather_coalesced", "all_gather_tensor"}
    | {"all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_gather_single", "reduce_scatter_tensor"}
    | {"reduce_scatter_single", "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"}
    | {"all_gather_single_coalesced", "gather_single", "gather_into_tensor"}
)
# What DistributedDataParallel does as it is made.
_OF_MODULES = {
    "_verify_param_shape_across_processes": "tensors",
    "_sync_params_and_buffers": "module_states",
}
_OPTIONS = ("op", "reduceOp", "src", "dst", "group_src", "group_dst")

Agreement = tuple[tuple[Group, int, int], ...]
"""For each group in which a rank has entered collectives: how many, and a checksum of what must be equal."""


_TABLES = ((c10d, _COLLECTIVES), (c10d, _PEERS), (functional, _FUNCTIONAL), (utils, _OF_MODULES))
RECORDED = frozenset(name for _, table in _TABLES for name in table)
"""Names of the functions of torch that are recorded."""


class _Inside(threading.local):
    depth: int = 0


class Recorder:
    """The collectives that this process has entered since `begin`."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._inside = _Inside()
        self._lock = threading.Lock()
        self._total = 0
        self._groups: dict[Group, tuple[int, int]] = {}
        self._pending: dict[int, int] = {}
        self._flows = Flows()

    def attach(self, fd: int) -> None:
        """Write to the file `fd` from now on."""
        os.ftruncate(fd, record.SIZE)
        self._memory = mmap.mmap(fd, record.SIZE)

    def begin(self) -> None:
        """Start the account of a call."""
        if self._memory is None:
            return
        self._total = 0
        self._groups.clear()
        self._pending.clear()
        self._flows.clear()
        record.HEADER.pack_into(self._memory, 0, 0)

    @property
    def total(self) -> int:
        """Number of operations that have begun."""
        return self._total

    def agreement(self) -> Agreement:
        """Return what the members of each group must agree on."""
        return tuple((group, count, check) for group, (count, check) in sorted(self._groups.items()))

    def flows(self) -> tuple[Flow, ...]:
        """Return what this rank has given others, and taken from them."""
        return self._flows.told()

    def call(self, function: Callable[..., Any], form: Form, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a collective, written down unless another one calls it."""
        if self._memory is None or self._inside.depth or not dist.is_initialized():
            return function(*args, **kwargs)
        slot, take_back = self._enter(form, args, kwargs)
        self._inside.depth += 1
        try:
            result = function(*args, **kwargs)
        except BaseException:
            self._note(slot, b"F")
            if take_back is not None:
                take_back()
            raise
        finally:
            self._inside.depth -= 1
        if isinstance(result, dist.Work):
            self._pending[id(result)] = slot
            self._note(slot, b"P")
        else:
            self._note(slot, b"D")
        return result

    def wait(self, function: Callable[..., Any], work: dist.Work, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wait for an asynchronous collective."""
        slot = self._pending.get(id(work), -1)
        self._note(slot, b"W")
        result = function(work, *args, **kwargs)
        self._note(slot, b"D")
        self._pending.pop(id(work), None)
        return result

    def aside(self, function: Callable[[], Any]) -> None:
        """Call a collective that is the engine's own, and is not written down."""
        self._inside.depth += 1
        try:
            function()
        finally:
            self._inside.depth -= 1

    def _enter(
        self, form: Form, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, Callable[[], None] | None]:
        """Write a collective down. Its slot in the record; and what takes it out of the account of flows."""
        group = group_of(form.argument(form.group, args, kwargs))
        given = form.argument(form.operand, args, kwargs) if form.operand else None
        operand = shown(given)
        values = ((name, form.argument(name, args, kwargs)) for name in form.options)
        options = ", ".join(option(name, value) for name, value in values if value is not None)
        alike = compared(given) if form.symmetric else ""
        file, line = calling_line()
        take_back = None
        if form.flows is not None and group is not None:
            take_back = self._add_flows(form, lambda name: form.argument(name, args, kwargs), group, (file, line))
        assert self._memory is not None
        with self._lock:
            number = 0
            if not form.peer and group is not None:
                count, check = self._groups.get(group, (0, 0))
                number, check = count + 1, zlib.crc32(f"{form.name} {alike} {options}".encode(), check)
                self._groups[group] = number, check
            whole = group is None or len(group.ranks) == dist.get_world_size()
            ranks = "" if whole or group is None else ",".join(map(str, group.ranks))
            name = group.name if group is not None else ""
            slot = self._total
            start = record.HEADER.size + slot % record.KEPT * record.SLOT
            packed = record.pack_entry("I", number, line, form.name, name, ranks, operand, options, alike, file)
            self._memory[start : start + len(packed)] = packed
            self._total += 1
            record.HEADER.pack_into(self._memory, 0, self._total)
        return slot, take_back

    def _add_flows(
        self, form: Form, get: Callable[[str], Any], group: Group, place: tuple[str, int]
    ) -> Callable[[], None] | None:
        me, ranks = dist.get_rank(), group.ranks
        peer, in_group = get(form.root), get(f"group_{form.root}")
        # Where it is said by neither, a receive is from anyone, and a collective has its root at 0.
        root = in_group if in_group is not None else ANY if form.peer else 0
        if peer is not None:
            root = ranks.index(peer) if peer in ranks else None
        if not isinstance(root, int) or me not in ranks or root >= len(ranks):
            return None  # the collective itself will say what is wrong with it
        tag = get("tag") if form.peer else COLLECTIVE
        assert form.flows is not None
        return self._flows.add(form.flows, get, group, me, root, tag or 0, place)

    def _note(self, slot: int, state: bytes) -> None:
        """Change the state of an entry, unless a later one has taken its place, or a later call."""
        if self._memory is not None and max(0, self._total - record.KEPT) <= slot < self._total:
            start = record.HEADER.size + slot % record.KEPT * record.SLOT
            self._memory[start : start + 1] = state


recorder = Recorder()
"""That of this process."""


class Form(Protocol):
    """How to read the arguments of one function.

    Attributes:
        name: of the function of ``torch.distributed``.
        group, operand: names of the parameters that say where, and with what; an empty one where there is none.
        options: names of those that must be equal on all ranks.
        root: what a rank that stands out is called, "src" or "dst".
        peer: it is a send, or a receive.
        symmetric: all ranks must have operands of the same dtypes and sizes.
        flows: by what name `FLOWS` knows it, None where it does not.
    """

    name: str
    group: str
    operand: str
    options: tuple[str, ...]
    root: str
    peer: bool
    symmetric: bool
    flows: str | None

    def argument(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the argument of that name, None where there is none."""


class _FunctionForm:
    """How to read the arguments of one function."""

    def __init__(self, function: Callable[..., Any], operand: str, peer: bool) -> None:
        self.name = function.__name__.lstrip("_")
        self.operand = operand
        self.peer = peer
        self.symmetric = self.name in _SYMMETRIC
        self.flows = self.name if self.name in FLOWS else None
        parameters = inspect.signature(function).parameters
        self.positions = {name: index for index, name in enumerate(parameters)}
        self.group = "group" if "group" in parameters else "process_group"
        self.options = tuple(name for name in _OPTIONS if name in parameters)
        self.root = "src" if "src" in parameters else "dst"
        self._defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
        if "self" in parameters:  # of a functional collective: what takes the place of `input`
            self.positions["input"] = self.positions["self"]

    def argument(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if name in kwargs:
            return kwargs[name]
        position = self.positions.get(name, len(args))
        return args[position] if position < len(args) else self._defaults.get(name)


def install() -> None:
    """Replace the functions, wherever torch has a name for them by now. Once, before the code under test is imported."""
    patches = Patches(among="torch.")
    for module, forms in _TABLES:
        for name in forms:
            function = getattr(module, name, None)  # torch's versions differ in which they have
            if function is not None:
                patches.replace(function, _recorded(function, forms))
    patches.apply()
    for name in METHODS:
        if hasattr(dist.ProcessGroup, name):
            patches.wrap(dist.ProcessGroup, name, functools.partial(recorded_method, name))
    patches.wrap(dist.Work, "wait", recorded_wait)


def recorded_wait(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method of a work by which one waits for it."""

    @functools.wraps(wait)
    def waiting(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        return recorder.wait(wait, work, args, kwargs)

    return waiting


def recorded_method(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method of a process group that has that name; return one that is no collective as it is."""
    if name not in METHODS:
        return method
    return _around(method, MethodForm(name, METHODS[name][0] in _SYMMETRIC))


def _recorded(function: Callable[..., Any], forms: Mapping[str, str]) -> Callable[..., Any]:
    name = function.__name__
    if name not in forms:
        return function
    return _around(function, _FunctionForm(function, forms[name], peer=name in _PEERS))


def _around(function: Callable[..., Any], form: Form) -> Callable[..., Any]:
    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the compiler knows the function itself
            return function(*args, **kwargs)
        return recorder.call(function, form, args, kwargs)

    return recorded
