"""In a rank: write down each collective as it is entered, and what the ranks must agree on.

The public functions of ``torch.distributed``, and those of its functional collectives, are replaced by ones that note
name, operand and call site before they do the same. The C++ reducer of DistributedDataParallel passes them by.
"""

from __future__ import annotations

import functools
import inspect
import mmap
import os
import sys
import threading
import types
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d
from torch.distributed import utils

from mgpu_check.ranks import record
from mgpu_check.ranks.frames import is_engine, is_installed

__all__ = ["Agreement", "Recorder", "install", "recorder"]

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
    "reduce_scatter_single": "",
    "reduce_scatter_tensor": "",
    "reduce_scatter_tensor_coalesced": "",
    "all_to_all_single": "",
}
# What DistributedDataParallel does as it is made.
_OF_MODULES = {
    "_verify_param_shape_across_processes": "tensors",
    "_sync_params_and_buffers": "module_states",
}
_OPTIONS = ("op", "reduceOp", "src", "dst", "group_src", "group_dst")

Agreement = tuple[tuple[tuple[int, ...], int, int], ...]
"""For each group in which a rank has entered collectives: its ranks, how many, and a checksum of what must be equal."""


_TABLES = ((c10d, _COLLECTIVES), (c10d, _PEERS), (functional, _FUNCTIONAL), (utils, _OF_MODULES))


class _Inside(threading.local):
    depth: int = 0


class Recorder:
    """What this process has entered since `begin`."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._inside = _Inside()
        self._lock = threading.Lock()
        self._total = 0
        self._groups: dict[tuple[int, ...], tuple[int, int]] = {}
        self._pending: dict[int, int] = {}

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
        record.HEADER.pack_into(self._memory, 0, 0)

    def agreement(self) -> Agreement:
        """What the members of each group must agree on."""
        return tuple((ranks, count, check) for ranks, (count, check) in sorted(self._groups.items()))

    def call(self, function: Callable[..., Any], form: _Form, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a collective, written down unless another one calls it."""
        if self._memory is None or self._inside.depth or not dist.is_initialized():
            return function(*args, **kwargs)
        slot = self._enter(form, args, kwargs)
        self._inside.depth += 1
        try:
            result = function(*args, **kwargs)
        except BaseException:
            self._note(slot, b"F")
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

    def _enter(self, form: _Form, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        ranks = _ranks_of(form.argument(form.group, args, kwargs))
        operand = _operand(form.argument(form.operand, args, kwargs)) if form.operand else ""
        values = ((name, form.argument(name, args, kwargs)) for name in _OPTIONS if name in form.positions)
        options = ", ".join(_option(name, value) for name, value in values if value is not None)
        file, line = _call_site()
        assert self._memory is not None
        with self._lock:
            number = 0
            if not form.peer and ranks is not None:
                count, check = self._groups.get(ranks, (0, 0))
                said = f"{form.name} {record.comparable(form.name, operand)} {options}"
                number, check = count + 1, zlib.crc32(said.encode(), check)
                self._groups[ranks] = number, check
            whole = ranks is None or len(ranks) == dist.get_world_size()
            group = "" if whole or ranks is None else ",".join(map(str, ranks))
            slot = self._total
            start = record.HEADER.size + slot % record.KEPT * record.SLOT
            packed = record.pack_entry("I", number, line, form.name, group, operand, options, file)
            self._memory[start : start + len(packed)] = packed
            self._total += 1
            record.HEADER.pack_into(self._memory, 0, self._total)
        return slot

    def _note(self, slot: int, state: bytes) -> None:
        """Change the state of an entry, unless a later one has taken its place, or a later call."""
        if self._memory is not None and max(0, self._total - record.KEPT) <= slot < self._total:
            start = record.HEADER.size + slot % record.KEPT * record.SLOT
            self._memory[start : start + 1] = state


recorder = Recorder()
"""That of this process."""


class _Form:
    """What is to be read off the arguments of one function."""

    def __init__(self, function: Callable[..., Any], operand: str, peer: bool) -> None:
        self.name = function.__name__.lstrip("_")
        self.operand = operand
        self.peer = peer
        parameters = inspect.signature(function).parameters
        self.positions = {name: index for index, name in enumerate(parameters)}
        self.group = "group" if "group" in parameters else "process_group"
        self._defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}

    def argument(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if name in kwargs:
            return kwargs[name]
        position = self.positions.get(name, len(args))
        return args[position] if position < len(args) else self._defaults.get(name)


def install() -> None:
    """Replace the functions, wherever they have a name by now. Once, before the code under test is imported."""
    replaced: dict[int, Any] = {}
    for module, forms in _TABLES:
        for name in forms:
            function = getattr(module, name, None)  # torch's versions differ in which they have
            if function is not None:
                replaced[id(function)] = _recorded(function, forms)
    for module_name, found in list(sys.modules.items()):
        if module_name.startswith("torch."):
            for name, value in list(vars(found).items()):
                if id(value) in replaced:
                    setattr(found, name, replaced[id(value)])
    _record_waits(dist.Work)


def _record_waits(kind: Any) -> None:
    wait = kind.wait

    @functools.wraps(wait)
    def waiting(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        return recorder.wait(wait, work, args, kwargs)

    kind.wait = waiting


def install_simulated() -> None:
    """On a simulated node, write a collective down before the simulation does what may wait for other ranks."""
    from mgpu_check.node.simulated import collectives

    _record_waits(collectives.LateWork)
    collectives.watch(lambda function: _recorded(function, {**_COLLECTIVES, **_PEERS}))


def _recorded(function: Callable[..., Any], forms: Mapping[str, str]) -> Callable[..., Any]:
    name = function.__name__
    if name not in forms:
        return function
    form = _Form(function, forms[name], peer=name in _PEERS)

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the compiler knows the function itself
            return function(*args, **kwargs)
        return recorder.call(function, form, args, kwargs)

    return recorded


def _call_site() -> tuple[str, int]:
    """The innermost line of the code under test; of anything but the engine where that is not on the stack."""
    frame: types.FrameType | None = sys._getframe(3)
    other: tuple[str, int] | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_engine(file):
            if not is_installed(file):
                return file, frame.f_lineno
            other = other or (file, frame.f_lineno)
        frame = frame.f_back
    return other or ("", 0)


def _ranks_of(group: Any) -> tuple[int, ...] | None:
    """The ranks of what names a group; None where this process is none of them, or it cannot be told."""
    try:
        if group is None:
            return tuple(range(dist.get_world_size()))
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return None
        if isinstance(group, str):
            group = c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]  # takes a str
        elif isinstance(group, tuple):  # a mesh, and one of its dimensions
            group = group[0].get_group(group[1])
        elif hasattr(group, "get_group"):
            group = group.get_group()
        if isinstance(group, list):
            return tuple(group) if all(isinstance(rank, int) for rank in group) else None
        return tuple(dist.get_process_group_ranks(group))
    except Exception:
        return None  # the collective itself will say what is wrong with it


def _operand(value: Any) -> str:
    """ "float32[4, 2]"; with "…" where there are several tensors."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)) and value:
        return f"{len(value)}x {_operand(value[0])}…"
    return ""


def _option(name: str, value: Any) -> str:
    if name in ("op", "reduceOp"):
        return str(getattr(value, "name", value)).rpartition(".")[2].lower()
    return f"{name.removeprefix('group_')}={value}"
