"""Provide ``ProcessGroupNCCL`` on a simulated node: the NCCL backend that a process group returns to its users.

CPU builds of torch have no such class, and the class of CUDA builds needs a driver.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

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

Construct = Callable[[Any, int, int, "NcclOptions"], dist.ProcessGroup]
_construct: Construct


def on_construction(call: Construct) -> None:
    """Use ``call(store, rank, size, options)`` to make the group of a ``ProcessGroupNCCL`` that the user constructs."""
    global _construct
    _construct = call


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
    """The backend of a process group; forwards collectives to the group."""

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
        given = options or named.get("timeout")
        if not isinstance(given, NcclOptions):
            made = NcclOptions()
            made._timeout = given or made._timeout
            given = made
        self._start(_construct(store, rank, size, given), given)

    def _start(self, group: dist.ProcessGroup, options: NcclOptions) -> None:
        self.options = options
        self._group = group
        self.used: list[int] = []  # devices of this rank with a communicator, in order
        self.devices: dict[int, str] = {}  # rank -> host and device, in the last communicator
        self.attempts = 0  # communicators that this rank started to make
        self.splits = 0
        self.counted_elsewhere = (
            False  # whether gloo is the CPU backend of the group too: then it counts the operations of both
        )

    @classmethod
    def of(cls, group: dist.ProcessGroup, options: NcclOptions) -> ProcessGroupNCCL:
        """Return the backend of an existing group."""
        made = cls.__new__(cls)
        made._start(group, options)
        return made

    def __getattr__(self, name: str) -> Any:
        if name == "_group":  # not initialized yet, as in `copy.copy`
            raise AttributeError(name)
        return getattr(self._group, name)

    def name(self) -> str:
        return "nccl"

    _get_backend_name = name

    @property
    def uid(self) -> int:
        return id(self)

    @property
    def bound_device_id(self) -> torch.device | None:
        return self._group.bound_device_id

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        self._group.bound_device_id = device

    def comm_split_count(self) -> int:
        return self.splits

    def perform_nocolor_split(self, device: torch.device) -> None:
        return None

    def eager_connect_single_device(self, device: torch.device) -> None:
        return None

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        return None

    def _set_sequence_number_for_group(self) -> None:
        return None

    def _get_sequence_number_for_group(self) -> int:
        number: int = 0 if self.counted_elsewhere else self._group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        return number

    def _is_initialized(self) -> bool:
        return bool(self.used)

    def _group_start(self) -> None:
        self._group._start_coalescing(torch.device("cuda"))

    def _group_end(self) -> None:
        self._group._end_coalescing(torch.device("cuda"))

    def abort(self) -> None:
        self._group.abort()

    def shutdown(self) -> None:
        self._group.shutdown()
