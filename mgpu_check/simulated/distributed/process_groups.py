"""Make process groups of a simulated node, and provide ``ProcessGroupNCCL``, the backend that such a group returns to
its users: gloo does the work under the name of the requested backend.

CPU builds of torch have no class ``ProcessGroupNCCL``, and the class of CUDA builds needs a driver.
"""

from __future__ import annotations

import contextlib
import os
import socket
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mgpu_check.simulated.node import active_node
from mgpu_check.simulated.tensor import to_real
from mgpu_check.torch_hooks.patches import Patches, around
from mgpu_check.torch_hooks.tensors import bytes_of

UNTYPED = {
    torch.int16: "Short",
    torch.uint16: "UInt16",
    torch.uint32: "UInt32",
    torch.uint64: "UInt64",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}
"""Dtypes that NCCL does not support, with the names that torch prints."""

_UNDEFINED = -(2**31)  # NCCL_CONFIG_UNDEF_INT


def check_types(*tensors: torch.Tensor) -> None:
    """Raise torch's error for a dtype that NCCL lacks, in a call of one process for several devices."""
    for tensor in tensors:
        if tensor.dtype in UNTYPED:
            raise RuntimeError(f"Unconvertible NCCL type {UNTYPED[tensor.dtype]}")


class NCCLConfig:
    """``ncclConfig_t``; its values have no effect."""

    def __init__(self) -> None:
        self.blocking = self.cga_cluster_size = self.min_ctas = self.max_ctas = _UNDEFINED
        self.split_share = self.traffic_class = self.collnet_enable = _UNDEFINED
        self.cta_policy = self.nvls_ctas = self.max_p2p_peers = _UNDEFINED
        self.net_name: str | None = None
        self.comm_name: str | None = None


class NcclOptions:
    """``ProcessGroupNCCL.Options``."""

    backend = "nccl"

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = NCCLConfig()
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self.split_from: object = None
        self.split_color = -2
        self._timeout = timedelta(minutes=10)


class ProcessGroupNCCL:
    """The backend of a process group; forwards collectives to the group.

    The simulation makes one for each group with NCCL, and ``group._get_backend`` returns it. A program may also make
    one, with a group of its own.
    """

    Options = NcclOptions
    NCCLConfig = NCCLConfig
    NCCL_CTA_POLICY_DEFAULT, NCCL_CTA_POLICY_EFFICIENCY, NCCL_CTA_POLICY_ZERO = 0, 1, 2
    supports_coalescing = True
    supports_splitting = True
    supports_time_estimate = False
    supports_shrinking = False
    supports_tensor_alloc = False
    supports_window = False
    supports_reconfigure = False

    def __init__(self, store: Any, rank: int, size: int, options: NcclOptions | timedelta | None = None, **named: Any):
        group_options = options or named.get("timeout")
        if not isinstance(group_options, NcclOptions):
            defaults = NcclOptions()
            defaults._timeout = group_options or defaults._timeout
            group_options = defaults
        self._start(_constructed(store, rank, size, group_options), group_options)

    def _start(self, group: dist.ProcessGroup, options: NcclOptions) -> None:
        self.options = options
        self._group = group
        self.used: list[int] = []  # devices of this rank with a communicator, in order
        self.devices: dict[int, str] = {}  # rank -> host and device, in the last communicator
        self.attempts = 0  # communicators that this rank started to make
        self.splits = 0
        # Whether gloo is the CPU backend of the group too: then it counts the operations of both.
        self.counted_elsewhere = False

    @classmethod
    def of(cls, group: dist.ProcessGroup, options: NcclOptions) -> ProcessGroupNCCL:
        instance = cls.__new__(cls)
        instance._start(group, options)
        return instance

    def __getattr__(self, name: str) -> Any:
        if name == "_group":  # not initialized yet, as in `copy.copy`
            raise AttributeError(name)
        return getattr(self._group, name)

    def name(self) -> str:
        return "nccl"

    _get_backend_name = name
    uid = property(id)

    @property
    def bound_device_id(self) -> torch.device | None:
        return self._group.bound_device_id

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        self._group.bound_device_id = device

    def comm_split_count(self) -> int:
        return self.splits

    def _nothing(self, *_: object) -> None:
        return None

    perform_nocolor_split = eager_connect_single_device = _nothing
    _add_ephemeral_timeout = _set_sequence_number_for_group = _nothing

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    def _get_sequence_number_for_group(self) -> int:
        return 0 if self.counted_elsewhere else self._group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # not in torch's stubs

    def _is_initialized(self) -> bool:
        return bool(self.used)

    def _group_start(self) -> None:
        self._group._start_coalescing(torch.device("cuda"))

    def _group_end(self) -> None:
        self._group._end_coalescing(torch.device("cuda"))


NO_CPU = "No backend type associated with device type cpu"
_CHANGING_PLACES = timedelta(seconds=10)
_BEING_MADE = timedelta(seconds=10)
_NCCL_NAMES = ("nccl", "nccl2", "nccl-lazy", "nccl-legacy")
_pg = torch._C._distributed_c10d.ProcessGroup


@dataclass(eq=False)
class NcclGroup:
    """The simulation's record of one process group that has NCCL.

    It is made with the group, by ``init_process_group``, ``new_group`` or ``split_group``. Collectives find it by the
    name of the group. It stays for a while after ``destroy_process_group``, see `_forgetting`.
    """

    pg: dist.ProcessGroup
    store: c10d.Store
    backends: dict[str, str]  # device type -> backend that the user requested
    backend: ProcessGroupNCCL
    numbers: dict[int, int] = field(default_factory=dict)  # rank -> number of its device, see `hardware`

    def made(self) -> None:
        self.store.set(f"mgpu_check/made/{self.pg.rank()}", "")

    def await_made(self) -> None:
        """Wait until all ranks have made the group, 10 s at most.

        Gloo connects while a group is made: a rank that is still connecting raises "Connection closed by peer" if
        another rank frees the group (pytorch/pytorch#61396). NCCL connects in the first collective.
        """
        with contextlib.suppress(RuntimeError):  # a rank or the store has ended
            self.store.wait([f"mgpu_check/made/{rank}" for rank in range(self.pg.size())], _BEING_MADE)

    def tell(self, number: int) -> None:
        """Publish the number of this rank's device to the other ranks."""
        rank = self.pg.rank()
        if rank not in self.numbers:
            self.numbers[rank] = number
            self.store.set(f"mgpu_check/number/{rank}", str(number))

    def number_of(self, rank: int) -> int:
        """Return the number of a rank's device; wait until the rank has published it with `tell`."""
        if rank not in self.numbers:
            self.numbers[rank] = int(self.store.get(f"mgpu_check/number/{rank}"))
        return self.numbers[rank]


_groups: dict[str, NcclGroup] = {}
_destroyed: list[NcclGroup] = []
"""Groups of the last `destroy_process_group`, kept alive until the next one. See `_forgetting`."""


def _let_go() -> None:
    for group in _destroyed:
        group.await_made()
    _destroyed.clear()


def nccl_of(group: dist.ProcessGroup | None) -> NcclGroup | None:
    """Return the record of ``group`` (None: the default group), or None if it has no NCCL."""
    pg = group or c10d._get_default_group()
    return _groups.get(pg.group_name) if isinstance(pg, _pg) else None


def nccl_alone(group: dist.ProcessGroup | None) -> bool:
    nccl_group = nccl_of(group)
    return nccl_group is not None and "cpu" not in nccl_group.backends


def connect(group: NcclGroup, index: int) -> None:
    """Make the communicator for this rank's device ``index``, as NCCL does in its first collective on that device.

    All ranks take part. Raises DistBackendError if two ranks are on the same device of the same host.
    """
    backend = group.backend
    if index in backend.used:
        return
    node = active_node()
    physical = index if node is None else node.physical[index]
    rank, size = group.pg.rank(), group.pg.size()
    # NCCL identifies the host by this variable too, so that one host can pass for several.
    mine = f"{os.environ.get('NCCL_HOSTID') or socket.gethostname()}:{physical}"
    key = f"mgpu_check/device/{backend.attempts}/"
    backend.attempts += 1
    group.store.set(f"{key}{rank}", mine)
    holder = next((peer for peer, location in backend.devices.items() if location == mine and peer != rank), None)
    if holder is not None:
        # The other rank has a communicator on this device. Either all ranks change devices and it comes to the store
        # too, or it never comes: NCCL would hang there, and this raises after `_CHANGING_PLACES`.
        try:
            group.store.wait([f"{key}{peer}" for peer in range(size)], _CHANGING_PLACES)
        except RuntimeError:
            raise _duplicate(mine, rank, holder) from None
    backend.devices = {}
    for peer in range(size):
        location = group.store.get(f"{key}{peer}").decode()
        duplicate = next((earlier for earlier, device in backend.devices.items() if device == location), None)
        if duplicate is not None:
            raise _duplicate(location, peer, duplicate)
        backend.devices[peer] = location
    backend.used.append(index)


def _duplicate(location: str, rank: int, peer: int) -> dist.DistBackendError:
    return dist.DistBackendError(
        "NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)\n"
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
        f"Duplicate GPU detected : rank {rank} and rank {peer} both on CUDA device {location.rpartition(':')[2]}"
    )


def _register(
    pg: dist.ProcessGroup, store: c10d.Store, backends: dict[str, str], options: NcclOptions | None, device: object
) -> None:
    group = NcclGroup(pg, store, backends, ProcessGroupNCCL.of(pg, options or NcclOptions()))
    group.backend.counted_elsewhere = "cpu" in backends
    _groups[pg.group_name] = group
    group.made()
    if isinstance(device, torch.device):
        pg.bound_device_id = device
        connect(group, device.index)  # NCCL connects at once if it knows the device


@around
def _helper(
    original: Callable[..., tuple[dist.ProcessGroup, c10d.Store]],
    group_size: int,
    group_rank: int,
    global_ranks_in_group: list[int],
    backend: str,
    store: object,
    group_name: str,
    backend_options: object = None,
    *args: object,
    **kwargs: object,
) -> tuple[dist.ProcessGroup, c10d.Store]:
    _let_go()
    rank_arguments = (group_size, group_rank, global_ranks_in_group)
    backends: dict[str, str] = {}
    if active_node() is not None:
        backends = dict(c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map())
    if not any(name in _NCCL_NAMES for name in backends.values()):
        _groups.pop(str(group_name), None)
        return original(*rank_arguments, backend, store, group_name, backend_options, *args, **kwargs)
    if backend_options is not None and not isinstance(backend_options, NcclOptions):
        raise AssertionError("Expected backend_options argument to be of type ProcessGroupNCCL.Options")
    device = kwargs.pop("device_id", None)
    device_backends = {d: b for d, b in backends.items() if d in ("cpu", "cuda")}
    pg, prefix_store = original(*rank_arguments, "gloo", store, group_name, None, *args, **kwargs)
    if isinstance(pg, _pg) and (group_name not in _groups or _groups[group_name].pg is not pg):
        world = c10d._world
        world.pg_map[pg] = (c10d.Backend(backend), prefix_store)
        world.pg_backend_config[pg] = ",".join(f"{d}:{b}" for d, b in device_backends.items())
        options = backend_options or NcclOptions()
        timeout = kwargs.get("timeout")
        if isinstance(timeout, timedelta):
            options._timeout = timeout
        options.group_name = str(group_name)
        options.global_ranks_in_group = list(global_ranks_in_group)
        _register(pg, prefix_store, device_backends, options, device)
    return pg, prefix_store


def _gloo_group(store: c10d.Store, rank: int, size: int, name: str, timeout: timedelta) -> dist.ProcessGroup:
    pg: dist.ProcessGroup = _pg(store, rank, size)
    backend_type = _pg.BackendType.GLOO
    pg._set_default_backend(backend_type)
    gloo = c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
    gloo._set_sequence_number_for_group()
    for device in ("cpu", "cuda"):
        pg._register_backend(torch.device(device), backend_type, gloo)
    pg._set_group_name(name)  # type: ignore[arg-type]  # takes a str
    return pg


def _constructed(store: c10d.Store, rank: int, size: int, options: NcclOptions) -> dist.ProcessGroup:
    pg = _gloo_group(store, rank, size, f"mgpu_check_{id(options)}", options._timeout)
    _register(pg, store, {"cuda": "nccl"}, options, None)
    return pg


@around
def _forgetting(original: Callable[..., None], group: dist.ProcessGroup | None = None) -> None:
    """Free destroyed groups later, when another group is destroyed or made; a group's threads live as long as it does.

    Freeing a group at once can deadlock, because a model under DistributedDataParallel may hold the last reference. If
    that goes just after the last collective, gloo joins its thread under Python's lock, and the thread may wait for it
    (pytorch/pytorch#56297).
    """
    every = group is None or group is dist.group.WORLD
    groups = [*c10d._world.pg_map] if every else [group]
    group_names = [process_group.group_name for process_group in groups if isinstance(process_group, _pg)]
    _let_go()
    original(group)
    _destroyed[:] = [_groups.pop(name) for name in group_names if name in _groups]


@around
def _split(
    original: Callable[..., dist.ProcessGroup | None],
    self: dist.ProcessGroup,
    ranks: Sequence[int],
    timeout: timedelta | None = None,
    opts: NcclOptions | None = None,
    group_name: str | None = None,
    group_desc: str | None = None,
    device_types: Sequence[torch.device] | None = None,
) -> dist.ProcessGroup | None:
    parent = nccl_of(self)
    if parent is None:
        return original(self, ranks, timeout, opts, group_name, group_desc, device_types)
    parent.backend.splits += 1
    ordered = sorted(ranks)
    if self.rank() not in ordered:
        return None
    name = group_name or f"{self.group_name}:split:{parent.backend.splits}"
    store = dist.PrefixStore(f"{name}/", parent.store)  # type: ignore[attr-defined]
    limit = timeout or parent.backend.options._timeout
    pg = _gloo_group(store, ordered.index(self.rank()), len(ordered), name, limit)
    pg._set_group_desc(group_desc or f"{self.group_desc}:split:{parent.backend.splits}")
    kept = None if device_types is None else {d.type for d in device_types}
    backends = {d: b for d, b in parent.backends.items() if kept is None or d in kept}
    options = opts or NcclOptions()
    options._timeout = limit
    options.group_name = name
    options.global_ranks_in_group = ordered
    _register(pg, store, backends, options, self.bound_device_id)
    return pg


@around
def _backend_for(original: Callable[..., object], self: dist.ProcessGroup, device: torch.device) -> object:
    nccl_group = nccl_of(self)
    if nccl_group is None:
        return original(self, device)
    if device.type not in nccl_group.backends:
        raise RuntimeError(f"No backend type associated with device type {device.type}")
    return nccl_group.backend if nccl_group.backends[device.type] in _NCCL_NAMES else original(self, device)


def _device_types(original: property) -> property:
    def types(self: dist.ProcessGroup) -> list[torch.device]:
        nccl_group = nccl_of(self)
        if nccl_group is None:
            return original.__get__(self)
        return [torch.device(name) for name in nccl_group.backends]

    return property(types)


@around
def _name(original: Callable[[dist.ProcessGroup], str], self: dist.ProcessGroup) -> str:
    return original(self) if nccl_of(self) is None else "nccl"


def _hash_tensors(tensors: Sequence[torch.Tensor]) -> int:
    number = 0
    for tensor in tensors:
        number = zlib.crc32(bytes_of(to_real(tensor)), number)
    return number


def install_groups(patches: Patches) -> None:
    _groups.clear()
    patches.at_exit(_groups.clear)
    patches.at_exit(_destroyed.clear)
    patches.wrap(c10d, "_new_process_group_helper", _helper)
    patches.replace(dist.destroy_process_group, _forgetting(dist.destroy_process_group))
    patches.replace(dist.is_nccl_available, lambda: True)
    # None in builds without NCCL: torch/distributed/constants.py, torch 2.13. `_get_default_timeout` would warn.
    if vars(c10d)["default_pg_nccl_timeout"] is None:
        patches.set(c10d, "default_pg_nccl_timeout", timedelta(minutes=10))
    patches.set(torch._C._distributed_c10d, "_hash_tensors", _hash_tensors)
    real = getattr(torch._C._distributed_c10d, "ProcessGroupNCCL", None)
    if real is not None:
        patches.replace(real, ProcessGroupNCCL)
    for owner in (torch._C._distributed_c10d, c10d, dist):
        patches.set(owner, "ProcessGroupNCCL", ProcessGroupNCCL)
    for name in ("_get_backend", "get_backend"):
        if hasattr(_pg, name):
            patches.wrap(_pg, name, _backend_for)
    patches.set(_pg, "_device_types", _device_types(vars(_pg)["_device_types"]))
    patches.wrap(_pg, "split_group", _split)
    for name in ("name", "_get_backend_name"):
        patches.wrap(_pg, name, _name)
