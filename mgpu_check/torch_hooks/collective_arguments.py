"""Read the arguments of a collective: what must be equal on all ranks, and what a rank sends to each peer and
receives from it, to compare both sides later.

What is sent and received is read for sends, receives, and collectives whose tensors may differ in size between
ranks: those with "paired" sizes in the table.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mgpu_check.processes.channel import ANY, MANY, Group, PeerTransfers, TensorRun
from mgpu_check.torch_hooks.collective_table import COLLECTIVES, OPERATIONS, Collective, Transfer
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
        """Forget all operations."""
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
        """Return the flows for the pytest process."""
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
