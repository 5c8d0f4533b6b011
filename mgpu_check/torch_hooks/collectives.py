"""Record each collective that a rank enters, with the properties that must be equal on all ranks.

The public functions of ``torch.distributed`` and the functional collectives are replaced by wrappers. A wrapper notes
name, operand and call site, and then calls the function. DistributedDataParallel's C++ reducer bypasses the wrappers.
"""

from __future__ import annotations

import functools
import mmap
import os
import threading
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d
from torch.distributed import utils

from mgpu_check.processes import collective_records
from mgpu_check.processes.channel import ANY, COLLECTIVE, Group, PeerTransfers
from mgpu_check.processes.tracebacks import calling_line
from mgpu_check.torch_hooks.collective_arguments import Flows, compared, group_of, option, shown
from mgpu_check.torch_hooks.collective_table import COLLECTIVES, METHODS, Form, FunctionForm, MethodForm
from mgpu_check.torch_hooks.patches import Patches

Agreement = tuple[tuple[Group, int, int], ...]
"""For each group whose collectives a rank has entered: their number, and a checksum of their properties."""


_HOMES = {module.__name__.rpartition(".")[2]: module for module in (c10d, functional, utils)}


class _Inside(threading.local):
    depth: int = 0


class Recorder:
    """The collectives that this process has entered since `begin`.

    The module has one, `recorder`. A rank attaches the file that the pytest process reads, and begins a new record for
    each call. The wrappers that `install` puts around torch's functions add to it; after the call the rank answers with
    its agreement and flows.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._inside = _Inside()
        self._lock = threading.Lock()
        self.total = 0  # operations that have been entered
        self._groups: dict[Group, tuple[int, int]] = {}
        self._pending: dict[int, int] = {}
        self._flows = Flows()
        self._unlike: set[Group] = set()

    def attach(self, fd: int) -> None:
        """Map the file `fd`, and record in it the collectives that this process enters from now on.

        Without a file, nothing is recorded. The file is resized to `collective_records.SIZE` bytes. Raises `OSError`:
        the file cannot be resized or mapped.
        """
        os.ftruncate(fd, collective_records.SIZE)
        self._memory = mmap.mmap(fd, collective_records.SIZE)

    def begin(self) -> None:
        """Start a new record, at the start of a call."""
        if self._memory is None:
            return
        self.total = 0
        self._groups.clear()
        self._pending.clear()
        self._flows.clear()
        self._unlike.clear()
        collective_records.HEADER.pack_into(self._memory, 0, 0)

    def agreement(self) -> Agreement:
        """Return the counts and checksums that must be equal on all members of each group."""
        return tuple((group, count, check) for group, (count, check) in sorted(self._groups.items()))

    def alike(self, group: Group) -> bool:
        """Return whether backends must count equally on all ranks: not with sends, receives or "paired" sizes."""
        return group not in self._unlike

    def flows(self) -> tuple[PeerTransfers, ...]:
        """Return the tensors that this rank has sent to other ranks and received from them."""
        return self._flows.summary()

    def call(self, function: Callable[..., Any], form: Form, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a collective, and record it unless it is called inside another one."""
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
        """Wait for an asynchronous collective, and record its states."""
        slot = self._pending.get(id(work), -1)
        self._note(slot, b"W")
        result = function(work, *args, **kwargs)
        self._note(slot, b"D")
        self._pending.pop(id(work), None)
        return result

    def aside(self, function: Callable[[], Any]) -> None:
        """Call a collective of the engine itself, which is not recorded."""
        self._inside.depth += 1
        try:
            function()
        finally:
            self._inside.depth -= 1

    def _enter(
        self, form: Form, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, Callable[[], None] | None]:
        """Record a collective; return its slot, and a function that removes it from the flows again, or None."""
        group = group_of(form.argument(form.group, args, kwargs))
        argument = form.argument(form.operand, args, kwargs) if form.operand else None
        operand = shown(argument)
        values = ((name, form.argument(name, args, kwargs)) for name in form.options)
        options = ", ".join(option(name, value) for name, value in values if value is not None)
        alike = compared(argument) if form.symmetric else ""
        file, line = calling_line()
        take_back = None
        if form.paired and group is not None:
            take_back = self._add_flows(form, lambda name: form.argument(name, args, kwargs), group, (file, line))
        assert self._memory is not None
        with self._lock:
            number = 0
            if group is not None and (form.peer or form.paired or form.name == "monitored_barrier"):
                self._unlike.add(group)
            if not form.peer and group is not None:
                count, check = self._groups.get(group, (0, 0))
                number, check = count + 1, zlib.crc32(f"{form.name} {alike} {options}".encode(), check)
                self._groups[group] = number, check
            default_group = group is None or len(group.ranks) == dist.get_world_size()
            ranks = "" if default_group or group is None else ",".join(map(str, group.ranks))
            name = group.name if group is not None else ""
            slot = self.total
            start = collective_records.HEADER.size + slot % collective_records.KEPT * collective_records.SLOT
            packed = collective_records.pack_entry(
                "I", number, line, form.name, name, ranks, operand, options, alike, file
            )
            self._memory[start : start + len(packed)] = packed
            self.total += 1
            collective_records.HEADER.pack_into(self._memory, 0, self.total)
        return slot, take_back

    def _add_flows(
        self, form: Form, get: Callable[[str], Any], group: Group, site: tuple[str, int]
    ) -> Callable[[], None] | None:
        me, ranks = dist.get_rank(), group.ranks
        peer, in_group = get(form.root), get(f"group_{form.root}")
        # By default a receive accepts any source, and a collective has its root at 0.
        root = in_group if in_group is not None else ANY if form.peer else 0
        if peer is not None:
            root = ranks.index(peer) if peer in ranks else None
        if not isinstance(root, int) or me not in ranks or root >= len(ranks):
            return None  # the collective itself will report the invalid root
        tag = get("tag") if form.peer else COLLECTIVE
        return self._flows.add(form.name, get, group, me, root, tag or 0, site)

    def _note(self, slot: int, state: bytes) -> None:
        """Change the state of an entry, unless later entries or a new call have overwritten it."""
        if self._memory is not None and max(0, self.total - collective_records.KEPT) <= slot < self.total:
            start = collective_records.HEADER.size + slot % collective_records.KEPT * collective_records.SLOT
            self._memory[start : start + 1] = state


recorder = Recorder()  # the recorder of this process


def install() -> None:
    """Replace the functions under all their names in torch. Call once, before the code under test is imported."""
    patches = Patches(among="torch.")
    for name, collective in COLLECTIVES.items():
        for home in collective.homes:
            function = getattr(_HOMES[home], name, None)  # not every version of torch has all
            if function is not None and function.__name__ in COLLECTIVES:
                patches.replace(function, _around(function, FunctionForm(function)))
    patches.apply()
    for name in METHODS:
        if hasattr(dist.ProcessGroup, name):
            patches.wrap(dist.ProcessGroup, name, functools.partial(recorded_method, name))
    patches.wrap(dist.Work, "wait", recorded_wait)


def recorded_wait(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method `wait` of `Work`."""

    @functools.wraps(wait)
    def waiting(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        return recorder.wait(wait, work, args, kwargs)

    return waiting


def recorded_method(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the process group's method that is called `name` in `METHODS`."""
    return _around(method, MethodForm(name))


def _around(function: Callable[..., Any], form: Form) -> Callable[..., Any]:
    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the compiler must see the original function
            return function(*args, **kwargs)
        return recorder.call(function, form, args, kwargs)

    return recorded
