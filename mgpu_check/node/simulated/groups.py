"""Process groups of a simulated node: gloo does the work, under the name of the backend that was asked for."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mgpu_check.node.simulated.patches import Patches
from mgpu_check.node.simulated.state import active_node
from mgpu_check.node.simulated.tensor import SimulatedTensor

__all__ = ["backend_of", "check_distinct_devices", "install_groups", "nccl_alone"]

_NCCL_NAMES = ("nccl", "nccl2", "nccl-lazy", "nccl-legacy")
_checked: set[str] = set()


def _backends(backend: str) -> dict[str, str]:
    """Which backend serves which device type: {"cpu": "gloo", "cuda": "nccl"}."""
    return dict(c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map())


def backend_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """The backends that the user believes ``group`` (None: the default one) to have, by device type."""
    pg = group or c10d._get_default_group()
    config: str = c10d._world.pg_backend_config.get(pg, "")
    pairs = (part.split(":", 1) for part in config.split(",") if ":" in part)
    return {name: backend for name, backend in pairs}  # noqa: C416


def nccl_alone(group: dist.ProcessGroup | None) -> bool:
    """Whether ``group`` has NCCL and nothing for tensors of the CPU."""
    backends = backend_of(group)
    return "cpu" not in backends and any(name in _NCCL_NAMES for name in backends.values())


def _helper(
    original: Callable[..., tuple[dist.ProcessGroup, c10d.Store]],
) -> Callable[..., tuple[dist.ProcessGroup, c10d.Store]]:
    @functools.wraps(original)
    def new_group_helper(
        group_size: int,
        group_rank: int,
        global_ranks_in_group: list[int],
        backend: str,
        store: object,
        group_name: str,
        *args: object,
        **kwargs: object,
    ) -> tuple[dist.ProcessGroup, c10d.Store]:
        given = (group_size, group_rank, global_ranks_in_group)
        backends = _backends(backend) if active_node() is not None else {}
        if backend == c10d.Backend.UNDEFINED and active_node() is not None:
            backends = {"cpu": "gloo", "cuda": "nccl"}
        if not any(name in _NCCL_NAMES for name in backends.values()):
            return original(*given, backend, store, group_name, *args, **kwargs)
        if len(args) > 0:  # options of NCCL mean nothing to gloo
            args = (None, *args[1:])
        kwargs.pop("backend_options", None)
        kwargs.pop("device_id", None)
        pg, prefix_store = original(*given, "gloo", store, group_name, *args, **kwargs)
        if isinstance(pg, dist.ProcessGroup):
            world = c10d._world
            world.pg_map[pg] = (c10d.Backend(backend), prefix_store)
            known = {d: b for d, b in backends.items() if d in ("cpu", "cuda")}
            world.pg_backend_config[pg] = ",".join(f"{d}:{b}" for d, b in known.items())
        return pg, prefix_store

    return new_group_helper


def check_distinct_devices(group: dist.ProcessGroup | None, tensor: torch.Tensor) -> None:
    """NCCL refuses two ranks of a group on one device; so does the first collective of a simulated one."""
    if not isinstance(tensor, SimulatedTensor):
        return
    pg = group or c10d._get_default_group()
    name = c10d._world.pg_names.get(pg, "")
    if name in _checked:
        return
    _checked.add(name)
    store = c10d._world.pg_map[pg][1]
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    # By this variable NCCL, too, takes one host for several.
    mine = f"{os.environ.get('NCCL_HOSTID') or socket.gethostname()}:{tensor.get_device()}"
    store.set(f"mgpu_check/device/{rank}", mine)
    seen: dict[str, int] = {}
    for other in range(size):
        where = store.get(f"mgpu_check/device/{other}").decode()
        if where in seen:
            index = int(where.rpartition(":")[2])
            raise dist.DistBackendError(
                "NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)\n"
                "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
                f"Duplicate GPU detected : rank {seen[where]} and rank {other} both on CUDA device {index}"
            )
        seen[where] = other


def install_groups(patches: Patches) -> None:
    """Let ``init_process_group`` and ``new_group`` make groups with NCCL."""
    _checked.clear()
    patches.set(c10d, "_new_process_group_helper", _helper(c10d._new_process_group_helper))
    patches.replace(dist.is_nccl_available, _is_nccl_available)
    if vars(c10d)["default_pg_nccl_timeout"] is None:
        patches.set(c10d, "default_pg_nccl_timeout", timedelta(minutes=10))
    # Objects travel as bytes in CPU tensors, also in a group that has NCCL alone.
    patches.set(c10d, "_get_object_coll_device", lambda group=None: "cpu")


def _is_nccl_available() -> bool:
    return True
