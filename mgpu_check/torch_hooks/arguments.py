"""Describe the arguments of a collective, and what of them must be equal on all ranks."""

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

__all__ = ["compared", "group_of", "option", "shown"]

_SHOWN = 4  # tensors of a list


def group_of(group: Any) -> Group | None:
    """Return what names a group on all its ranks; None where this process is none of them, or it cannot be told."""
    try:
        if group is None or group is dist.group.WORLD:
            return Group("", tuple(range(dist.get_world_size())))
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return None
        if isinstance(group, str):
            group = c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]  # takes a str
        elif isinstance(group, tuple):  # a mesh, and one of its dimensions
            group = group[0].get_group(group[1])
        elif hasattr(group, "get_group"):
            group = group.get_group()
        if isinstance(group, list):
            return Group("", tuple(group)) if all(isinstance(rank, int) for rank in group) else None
        if group is dist.group.WORLD:  # by its name
            return Group("", tuple(range(dist.get_world_size())))
        return Group(str(group.group_name), tuple(dist.get_process_group_ranks(group)))
    except Exception:
        return None  # the collective itself will say what is wrong with it


def shown(value: Any) -> str:
    """Describe operands: "float32[4, 2]"; of several tensors how many, and the first kinds of them: "9x float32[4],
    int32[1]…".
    """
    if isinstance(value, torch.Tensor):
        return f"{name_of(value.dtype)}{list(value.shape)}"
    if isinstance(value, (list, tuple)) and value:
        kinds = ", ".join(dict.fromkeys(map(shown, value[:_SHOWN])))
        return f"{len(value)}x {kinds}{'…' if len(value) > _SHOWN else ''}"
    return ""


def compared(value: Any) -> str:
    """Return what must be equal on all ranks; of several tensors a checksum, for there may be many."""
    if isinstance(value, torch.Tensor):
        return size_of(value)
    if isinstance(value, (list, tuple)):
        sizes = [size_of(one) for one in value if isinstance(one, torch.Tensor)]
        return f"{zlib.crc32(';'.join(sizes).encode()):x}"
    return ""


def option(name: str, value: Any) -> str:
    """Describe an option: "sum", "src=0".

    Of an operation with a factor its kind: each rank may well have a factor of its own.
    """
    if name in OPERATIONS:
        if type(value) is dist.ReduceOp:  # an object, of which each rank has its own; `SUM` is none
            state: Any = value.__getstate__()
            value = state[0]
        return str(getattr(value, "name", value)).rpartition(".")[2].lower()
    return f"{name.removeprefix('group_')}={value}"
