"""Record each collective that a rank enters, with the properties that must be equal on all ranks.

The public functions of ``torch.distributed`` and the functional collectives are replaced by wrappers. A wrapper notes
name, operand and call site, and then calls the function. DistributedDataParallel's C++ reducer bypasses the wrappers.

What a rank sends to each peer and receives from it is read from the arguments, to compare both sides later: for sends,
receives, and collectives whose tensors may differ in size between ranks, those with "paired" sizes in the table.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d
from torch.distributed import utils

from mgpu_check.processes import collective_records
from mgpu_check.processes.channel import ANY, COLLECTIVE, MANY, Group, PeerTransfers, TensorRun
from mgpu_check.processes.tracebacks import calling_line
from mgpu_check.torch_hooks.collective_table import (
    COLLECTIVES,
    METHODS,
    OPERATIONS,
    Collective,
    Form,
    FunctionForm,
    MethodForm,
    Transfer,
)
from mgpu_check.torch_hooks.patches import Patches, replaced
from mgpu_check.torch_hooks.tensors import name_of

_MOST_RUNS = 64  # per flow, to bound the size of an answer; later tensors are only counted

Get = Callable[[str], Any]
Parts = Iterator[tuple[bool, int, str]]
"""Tuples of three: True if sent, False if received; the peer's index in the group, or `ANY`; dtype and element
count."""
Reader = Callable[[Get, int, int, int], Parts]


def size_of(tensor: torch.Tensor, count: int | None = None) -> str:
    """Return dtype and number of elements, without the shape: "float32[8]"."""
    return f"{name_of(tensor.dtype)}[{tensor.numel() if count is None else count}]"


def _sizes(tensors: Any, count: int) -> list[str]:
    """Return the sizes in a list of one tensor per rank; [] if it is invalid, which the collective will report."""
    if isinstance(tensors, (list, tuple)) and len(tensors) == count:
        return [size_of(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return []


def _one(tensor: Any, peers: Sequence[int], sent: bool) -> Parts:
    if isinstance(tensor, torch.Tensor):
        size = size_of(tensor)
        for peer in peers:
            yield sent, peer, size


def _each(tensors: Any, count: int, sent: bool) -> Parts:
    for peer, size in enumerate(_sizes(tensors, count)):
        yield sent, peer, size


def _of_row(row: Collective, transfer: Transfer) -> Reader:

    def read(get: Get, me: int, count: int, root: int) -> Parts:
        if transfer.gives(me, root):
            takers = range(count) if transfer.takers == "all" else (root,)
            yield from _each(get(row.given), count, True) if transfer.divides else _one(get(row.given), takers, True)
        if givers := transfer.sources(me, count, root):
            yield from _each(get(row.taken), count, False) if transfer.joins else _one(get(row.taken), givers, False)

    return read


def _all_to_all_single(get: Get, me: int, count: int, root: int) -> Parts:
    source = get("input")
    if not isinstance(source, torch.Tensor) or source.dim() == 0:
        return
    # Computed from the dimensions, because a rank that sends no rows still receives rows of this size.
    row = math.prod(source.shape[1:])
    for giving, tensor, splits in (
        (True, source, get("input_split_sizes")),
        # The functional version allocates its output itself.
        (False, get("output"), get("output_split_sizes")),
    ):
        # Any sequence of integers: dispatchers of experts, such as Megatron's, give arrays of NumPy.
        rows = [int(number) for number in splits] if hasattr(splits, "__len__") and len(splits) else None
        if rows is None:
            exchanged = tensor if isinstance(tensor, torch.Tensor) else source
            sizes = [size_of(source, exchanged.numel() // count)] * count
        else:
            sizes = [size_of(source, number * row) for number in rows]
        if isinstance(tensor, torch.Tensor) and tensor.dtype != source.dtype:
            return
        for peer, size in enumerate(sizes):
            yield giving, peer, size


FLOWS: Mapping[str, Reader] = {
    **{
        name: _of_row(row, row.transfer)
        for name, row in COLLECTIVES.items()
        if row.sizes == "paired" and row.lists and row.transfer is not None
    },
    "all_to_all_single": _all_to_all_single,
    **dict.fromkeys(("send", "isend"), lambda get, me, count, root: _one(get("tensor"), (root,), True)),
    **dict.fromkeys(("recv", "irecv"), lambda get, me, count, root: _one(get("tensor"), (root,), False)),
    "send_object_list": lambda get, me, count, root: iter([(True, root, "objects")]),
    "recv_object_list": lambda get, me, count, root: iter([(False, root, "objects")]),
}
"""Name of each "paired" function of ``torch.distributed`` -> function that yields its parts.

The arguments are a getter of arguments by name, the rank's own index in the group, the group's size, and the root's
index.
"""


class Flows:
    """The tensors that one rank has sent and received since `clear`.

    The `Recorder` of the process makes it, adds each operation, clears it for a new call and returns it after the call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[tuple[Group, bool, int, int], list[list[Any]]] = {}

    def clear(self) -> None:
        self._runs.clear()

    def add(
        self, name: str, get: Get, group: Group, me: int, root: int, tag: int, site: tuple[str, int]
    ) -> Callable[[], None]:
        """Record an operation before it starts, and return a function that removes it again, if it fails."""
        added: list[list[Any]] = []
        with self._lock:
            for sent, index, content in FLOWS[name](get, group.ranks.index(me), len(group.ranks), root):
                peer = ANY if index == ANY else group.ranks[index]
                runs = self._runs.setdefault((group, sent, peer, tag), [])
                if len(runs) >= _MOST_RUNS:
                    content = MANY
                if not runs or (runs[-1][1:] != [content, name, *site] and runs[-1][1] != MANY):
                    runs.append([0, content, name, *site])
                runs[-1][0] += 1
                added.append(runs[-1])

        def take_back() -> None:
            with self._lock:
                for run in added:
                    run[0] -= 1

        return take_back

    def summary(self) -> tuple[PeerTransfers, ...]:
        if not self._runs:
            return ()
        with self._lock:
            return tuple(
                PeerTransfers(group, sent, peer, tag, tuple(TensorRun(*run) for run in runs if run[0]))
                for (group, sent, peer, tag), runs in self._runs.items()
            )


_SHOWN = 4  # tensors of a list


def group_of(group: Any) -> Group | None:
    """Return the name and ranks of a process group; None if this process is not a member, or the group is invalid."""
    try:
        if group is None or group is dist.group.WORLD:
            return Group("", tuple(range(dist.get_world_size())))
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return None
        if isinstance(group, str):
            group = c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]  # takes a str
        elif isinstance(group, tuple):  # a mesh and one of its dimensions
            group = group[0].get_group(group[1])
        elif hasattr(group, "get_group"):
            group = group.get_group()
        if isinstance(group, list):
            return Group("", tuple(group)) if all(isinstance(rank, int) for rank in group) else None
        if group is dist.group.WORLD:  # given by its name
            return Group("", tuple(range(dist.get_world_size())))
        return Group(str(group.group_name), tuple(dist.get_process_group_ranks(group)))
    except Exception:
        return None  # the collective itself will report the invalid group


def own_groups() -> list[dist.ProcessGroup]:
    """Return the process groups that this process is a member of, in the order of their creation."""
    # torch also keeps an entry for the latest group that the process is no member of: an integer.
    # torch/distributed/distributed_c10d.py, _new_group_with_tag, torch 2.13
    return [group for group in c10d._world.pg_group_ranks if isinstance(group, dist.ProcessGroup)]


def shown(value: Any) -> str:
    """Describe an operand, "float32[4, 2]", or a list with its length and first kinds: "9x float32[4], int32[1]…"."""
    if isinstance(value, torch.Tensor):
        return f"{name_of(value.dtype)}{list(value.shape)}"
    if isinstance(value, (list, tuple)) and value:
        kinds = ", ".join(dict.fromkeys(map(shown, value[:_SHOWN])))
        return f"{len(value)}x {kinds}{'…' if len(value) > _SHOWN else ''}"
    return ""


def compared(value: Any) -> str:
    """Return dtype and size of an operand, which must be equal on all ranks; for a list a checksum of these."""
    if isinstance(value, torch.Tensor):
        return size_of(value)
    if isinstance(value, (list, tuple)):
        sizes = [size_of(tensor) for tensor in value if isinstance(tensor, torch.Tensor)]
        return f"{zlib.crc32(';'.join(sizes).encode()):x}"
    return ""


def option(name: str, value: Any) -> str:
    """Describe an option of a collective: its value for a reduction operation, "sum"; else with its name, "src=0".

    A prefix "group_" of the name is left out. The factor of an operation is left out, because it may differ between
    ranks.
    """
    if name in OPERATIONS:
        if type(value) is dist.ReduceOp:  # an object with a factor, unlike `SUM`
            state: Any = value.__getstate__()
            value = state[0]
        return str(getattr(value, "name", value)).rpartition(".")[2].lower()
    return f"{name.removeprefix('group_')}={value}"


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
        with replaced(self._inside, "depth", self._inside.depth + 1):
            function()

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
    @functools.wraps(wait)
    def waiting(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        return recorder.wait(wait, work, args, kwargs)

    return waiting


def recorded_method(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    return _around(method, MethodForm(name))


def _around(function: Callable[..., Any], form: Form) -> Callable[..., Any]:
    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the compiler must see the original function
            return function(*args, **kwargs)
        return recorder.call(function, form, args, kwargs)

    return recorded
