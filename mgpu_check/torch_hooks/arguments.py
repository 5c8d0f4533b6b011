"""Describe the arguments of a collective, and the properties that must be equal on all ranks."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mgpu_check.processes.protocol import Group
from mgpu_check.torch_hooks.flows import size_of
from mgpu_check.torch_hooks.table import OPERATIONS
from mgpu_check.torch_hooks.tensors import name_of

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
    """Return dtype and size of an operand, which must be equal on all ranks; for a list a checksum, as it may be
    long."""
    if isinstance(value, torch.Tensor):
        return size_of(value)
    if isinstance(value, (list, tuple)):
        sizes = [size_of(one) for one in value if isinstance(one, torch.Tensor)]
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
