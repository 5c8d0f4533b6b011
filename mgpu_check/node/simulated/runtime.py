"""``torch.cuda`` and ``torch.accelerator`` of a simulated node: which devices there are, and which is current."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace

import torch

from mgpu_check.node.simulated import streams
from mgpu_check.node.simulated.memory import DeviceMemory
from mgpu_check.node.simulated.patches import Patches
from mgpu_check.node.simulated.state import (
    Node,
    active_node,
    current_index,
    device_index,
    invalid_ordinal,
    set_current_index,
    untraced_device,
)

__all__ = ["install_runtime"]

_CAPABILITY = (9, 0)


def _node() -> Node:
    node = active_node()
    if node is None:
        raise RuntimeError("the simulated node is not active")
    return node


def _checked_index(device: object) -> int:
    index = device_index(device)
    if not 0 <= index < _node().n:
        raise invalid_ordinal()
    return index


class _Device:
    """``torch.cuda.device(d)``: makes d current inside; None and negative numbers change nothing."""

    def __init__(self, device: object) -> None:
        made = untraced_device(device) if not (isinstance(device, int) and device < 0) else None
        self.idx = -1 if made is None else (current_index() if made.index is None else int(made.index))
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _exchange(self.idx)

    def __exit__(self, *_: object) -> None:
        self.idx = _exchange(self.prev_idx)


class _DeviceOf(_Device):
    def __init__(self, obj: torch.Tensor) -> None:
        super().__init__(obj.get_device() if obj.is_cuda else -1)


class _AcceleratorIndex:
    """``torch.accelerator.device_index(i)``."""

    def __init__(self, device: int | None, /) -> None:
        self.idx = device
        self.prev_idx = -1

    def __enter__(self) -> None:
        if self.idx is not None:
            self.prev_idx = _exchange(self.idx)

    def __exit__(self, *_: object) -> None:
        if self.idx is not None:
            _exchange(self.prev_idx)


def _exchange(index: int) -> int:
    previous = current_index()
    if index >= 0:
        set_current_index(index)
    return previous


def _set_device(device: object) -> None:
    index = -1 if isinstance(device, int) and device < 0 else device_index(device)
    if index >= 0:
        set_current_index(index)
        _initialize()


def _properties(device: object = None) -> SimpleNamespace:
    index = device_index(device)
    if not 0 <= index < _node().n:
        raise AssertionError("Invalid device id")
    major, minor = _CAPABILITY
    return SimpleNamespace(
        name=f"SIMULATED ({_node().backing})",
        major=major,
        minor=minor,
        total_memory=_memory(index).total,
        multi_processor_count=1,
        is_integrated=0,
        is_multi_gpu_board=0,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        warp_size=32,
        L2_cache_size=50 << 20,
        gcnArchName=f"sm_{major}{minor}",
        uuid=f"5107a7ed-0000-0000-0000-{_node().physical[index]:012d}",
        pci_bus_id=index,
        pci_device_id=0,
        pci_domain_id=0,
    )


def _memory(device: object = None) -> DeviceMemory:
    return _node().memory[_checked_index(device)]


def _empty_cache() -> None:
    for memory in _node().memory:
        memory.empty_cache()


def _memory_stats(device: object = None) -> dict[str, int]:
    memory = _memory(device)
    return {
        "allocation.all.allocated": memory.allocations,
        "allocated_bytes.all.current": memory.allocated,
        "allocated_bytes.all.peak": memory.peak,
        "reserved_bytes.all.current": memory.reserved,
        "reserved_bytes.all.peak": memory.reserved_peak,
        "active_bytes.all.current": memory.allocated,
        "active_bytes.all.peak": memory.peak,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def _memory_summary(device: object = None, abbreviated: bool = False) -> str:
    rows = "\n".join(f"| {name:<30} | {value:>16} |" for name, value in _memory_stats(device).items())
    return f"| PyTorch CUDA memory summary, device ID {_checked_index(device)} (simulated)\n{rows}"


def _set_fraction(fraction: float, device: object = None) -> None:
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    memory = _memory(device)
    memory.limit = int(memory.total * fraction)


def _mem_get_info(device: object = None) -> tuple[int, int]:
    memory = _memory(device)
    return memory.limit - memory.reserved, memory.total


def _can_access(device: object, peer_device: object) -> bool:
    one, other = device_index(device), device_index(peer_device)
    for index in (one, other):
        if not 0 <= index < _node().n:
            raise AssertionError(f"Invalid {'' if index == one else 'peer '}device id")
    return one != other


def _synchronize(device: object = None) -> None:
    streams.synchronize(_checked_index(device))


def _initialize() -> None:
    _node().initialize()


def _is_in_bad_fork() -> bool:
    import os

    node = _node()
    return node.initialized and node.pid != os.getpid()


def _no_graphs(*_: object, **__: object) -> None:
    raise RuntimeError("CUDA graphs are not available on a simulated node")


def _device_module(device: object = None) -> object:
    if device is None:
        return torch.cuda
    made = untraced_device(device)
    if isinstance(device, torch.device | str) and made is not None:
        name = made.type
        module = getattr(torch, name, None)
        if module is not None:
            return module
    raise RuntimeError(f"Device '{device}' does not have a corresponding module registered as 'torch.{device}'.")


def _cuda_functions() -> dict[str, object]:
    """Name in ``torch.cuda`` -> what stands there while simulated."""
    functions: dict[str, object] = {
        "is_available": lambda: True,
        "device_count": lambda: _node().n,
        "_lazy_init": _initialize,
        "init": _initialize,
        "_initialized": True,  # checkpoint() looks here before it keeps the random states of the devices
        "is_initialized": lambda: _node().initialized,
        "_is_in_bad_fork": _is_in_bad_fork,
        "current_device": current_index,
        "set_device": _set_device,
        "device": _Device,
        "device_of": _DeviceOf,
        "_exchange_device": _exchange,
        "_maybe_exchange_device": _exchange,
        "get_device_properties": _properties,
        "get_device_name": lambda device=None: _properties(device).name,
        "get_device_capability": lambda device=None: _CAPABILITY,
        "get_arch_list": lambda: ["sm_90"],
        "get_gencode_flags": lambda: "",
        "can_device_access_peer": _can_access,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_tf32_supported": lambda: True,
        "synchronize": _synchronize,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "set_stream": streams.set_stream,
        "stream": streams.StreamContext,
        "StreamContext": streams.StreamContext,
        "Stream": streams.Stream,
        "ExternalStream": streams.ExternalStream,
        "Event": streams.Event,
        "is_current_stream_capturing": lambda: False,
        "ipc_collect": lambda: None,
        "graph": _no_graphs,
        "CUDAGraph": _no_graphs,
        "make_graphed_callables": _no_graphs,
        "utilization": lambda device=None: 0,
        "memory_usage": lambda device=None: 0,
    }
    return functions


def _memory_functions() -> dict[str, object]:
    return {
        "memory_allocated": lambda device=None: _memory(device).allocated,
        "max_memory_allocated": lambda device=None: _memory(device).peak,
        "memory_reserved": lambda device=None: _memory(device).reserved,
        "max_memory_reserved": lambda device=None: _memory(device).reserved_peak,
        "reset_peak_memory_stats": lambda device=None: _memory(device).reset_peak(),
        "reset_max_memory_allocated": lambda device=None: _memory(device).reset_peak(),
        "reset_accumulated_memory_stats": lambda device=None: None,
        "empty_cache": _empty_cache,
        "memory_stats": _memory_stats,
        "memory_summary": _memory_summary,
        "mem_get_info": _mem_get_info,
        "set_per_process_memory_fraction": _set_fraction,
        "get_per_process_memory_fraction": lambda device=None: _memory(device).limit / _memory(device).total,
    }


def _accelerator_functions() -> dict[str, object]:
    """Name in ``torch._C`` -> the twin beneath ``torch.accelerator``."""
    return {
        "_get_accelerator": lambda *_: torch.device("cuda"),
        "_accelerator_getAccelerator": lambda: torch.device("cuda"),
        "_accelerator_getDeviceIndex": current_index,
        "_accelerator_setDeviceIndex": _set_device,
        "_accelerator_exchangeDevice": _exchange,
        "_accelerator_maybeExchangeDevice": _exchange,
        "_accelerator_getStream": streams.current_stream,
        "_accelerator_setStream": streams.set_stream,
        "_accelerator_synchronizeDevice": _synchronize,
        "_accelerator_emptyCache": _empty_cache,
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_getMemoryInfo": _mem_get_info,
        "_accelerator_resetPeakStats": lambda device=None: _memory(device).reset_peak(),
        "_accelerator_resetAccumulatedStats": lambda device=None: None,
        "_cuda_isCurrentStreamCapturing": lambda: False,
    }


def install_runtime(patches: Patches) -> None:
    """Replace the device functions of ``torch.cuda``, ``torch.accelerator`` and what they stand on."""
    for owner, functions in (
        (torch.cuda, _cuda_functions()),
        (torch.cuda, _memory_functions()),
        (torch.cuda.memory, _memory_functions()),
    ):
        for name, function in functions.items():
            if hasattr(owner, name):
                patches.set(owner, name, function)
    for name in ("Stream", "Event", "ExternalStream"):
        patches.set(torch.cuda.streams, name, getattr(streams, name))
    for name in ("Stream", "Event"):
        patches.set(torch, name, getattr(streams, name))
    for name, function in _accelerator_functions().items():
        if hasattr(torch._C, name):
            patches.set(torch._C, name, function)
    accelerator = torch.accelerator
    for name in ("memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        for owner in (accelerator, getattr(accelerator, "memory", accelerator)):
            if hasattr(owner, name):
                patches.set(owner, name, _memory_functions()[name])
    patches.set(accelerator, "device_index", _AcceleratorIndex)
    patches.set(torch, "get_device_module", _device_module)
    patches.set(torch.backends.cudnn, "is_acceptable", lambda tensor: False)
    _install_capture(patches)


def _install_capture(patches: Patches) -> None:
    """CUDA graphs: nothing is ever captured."""
    no: Callable[[], bool] = lambda: False  # noqa: E731
    for module in (torch.cuda.graphs,):
        with contextlib.suppress(AttributeError):
            if hasattr(module, "is_current_stream_capturing"):
                patches.set(module, "is_current_stream_capturing", no)
