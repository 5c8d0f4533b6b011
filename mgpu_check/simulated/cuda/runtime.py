"""The device functions of ``torch.cuda`` and ``torch.accelerator`` (count, properties, current device), and
``torch.cuda.cudart()``: the functions of CUDA's runtime that torch exposes, and its error codes.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch

from mgpu_check.simulated.cuda import streams
from mgpu_check.simulated.cuda.allocator import device_memory, memory_info, register, unregister
from mgpu_check.simulated.cuda.streams import ExternalStream
from mgpu_check.simulated.node import (
    SimulatedNode,
    active_node,
    current_index,
    device_index,
    invalid_ordinal,
    refused,
    refused_class,
    set_current_index,
    untraced_device,
    uuid_of,
)
from mgpu_check.torch_hooks.patches import Patches

# The errors that torch's own code and tests name, with the messages of cudaGetErrorString.
_ERRORS = {
    0: ("success", "no error"),
    1: ("InvalidValue", "invalid argument"),
    2: ("MemoryAllocation", "out of memory"),
    3: ("InitializationError", "initialization error"),
    100: ("NoDevice", "no CUDA-capable device is detected"),
    101: ("InvalidDevice", "invalid device ordinal"),
    400: ("InvalidResourceHandle", "invalid resource handle"),
    600: ("NotReady", "device not ready"),
    700: ("IllegalAddress", "an illegal memory access was encountered"),
    709: ("ContextIsDestroyed", "context is destroyed"),
    710: ("Assert", "device-side assert triggered"),
    712: ("HostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"),
    713: ("HostMemoryNotRegistered", "pointer does not correspond to a registered memory region"),
    719: ("LaunchFailure", "unspecified launch failure"),
    801: ("NotSupported", "operation not supported"),
    999: ("Unknown", "unknown error"),
}


class _CudaError(int):
    """``torch.cuda.cudart().cudaError``: any number is one of its values, as in C++."""

    success: _CudaError

    def __repr__(self) -> str:
        return f"<cudaError.{_ERRORS.get(int(self), ('???', ''))[0]}: {int(self)}>"


_CudaError.success = _CudaError(0)
_handles = itertools.count(0x1000, 0x10)
_created: set[int] = set()


def _stream_create(pointer: int) -> _CudaError:
    handle = next(_handles)
    _created.add(handle)
    ctypes.c_void_p.from_address(pointer).value = handle
    return _CudaError.success


def _stream_destroy(handle: int) -> _CudaError:
    if handle not in _created:
        return _CudaError(400)
    _created.discard(handle)
    return _CudaError.success


def runtime() -> SimpleNamespace:
    def fine(*_: object) -> _CudaError:
        return _CudaError.success

    return SimpleNamespace(
        cudaError=_CudaError,
        cudaGetErrorString=lambda error: _ERRORS.get(int(error), ("", "unrecognized error code"))[1],
        cudaHostRegister=lambda pointer, size, flags: _CudaError(register(pointer, size)),
        cudaHostUnregister=lambda pointer: _CudaError(unregister(pointer)),
        cudaMemGetInfo=memory_info,
        cudaProfilerStart=fine,
        cudaProfilerStop=lambda *_: _CudaError.success,
        cudaStreamCreate=_stream_create,
        cudaStreamDestroy=_stream_destroy,
    )


_CAPABILITY = (9, 0)


def _node() -> SimulatedNode:
    node = active_node()
    if node is None:
        raise RuntimeError("the simulated node is not active")
    return node


def _used() -> SimulatedNode:
    node = _node()
    node.initialize()
    return node


def _checked_index(device: object) -> int:
    index = device_index(device)
    if not 0 <= index < _used().n:
        raise invalid_ordinal()
    return index


def _current() -> int:
    _used()
    return current_index()


class _DeviceGuard:
    """``torch.cuda.device(d)``: makes d current inside; None and negative numbers change nothing."""

    def __init__(self, device: object) -> None:
        resolved = untraced_device(device) if not (isinstance(device, int) and device < 0) else None
        self.idx = -1 if resolved is None else (current_index() if resolved.index is None else int(resolved.index))
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _exchange(self.idx)

    def __exit__(self, *_: object) -> None:
        self.idx = _exchange(self.prev_idx)


class _DeviceOf(_DeviceGuard):
    def __init__(self, obj: torch.Tensor) -> None:
        super().__init__(obj.get_device() if obj.is_cuda else -1)


class StreamContext:
    """``torch.cuda.stream(s)``: makes ``s`` and its device current inside."""

    def __init__(self, stream: streams.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            self.stream.__exit__()


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
    previous = _current()
    if index >= 0:
        set_current_index(index)
    return previous


def _set_device(device: object) -> None:
    index = -1 if isinstance(device, int) and device < 0 else device_index(device)
    if index >= 0:
        set_current_index(index)


class DeviceProperties(SimpleNamespace):
    """``torch.cuda.get_device_properties(i)``."""

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory >> 20}MB, multi_processor_count={self.multi_processor_count}, "
            f"uuid={self.uuid}, pci_bus_id={self.pci_bus_id}, pci_device_id={self.pci_device_id}, "
            f"pci_domain_id={self.pci_domain_id}, L2_cache_size={self.L2_cache_size >> 20}MB)"
        )


def _properties(device: object = None) -> DeviceProperties:
    index = device_index(device)
    if not 0 <= index < _used().n:
        raise AssertionError("Invalid device id")
    major, minor = _CAPABILITY
    return DeviceProperties(
        name=f"SIMULATED ({_node().backing})",
        major=major,
        minor=minor,
        total_memory=device_memory(index).total,
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
        clock_rate=1_000_000,
        memory_clock_rate=1_000_000,
        memory_bus_width=5120,
        uuid=uuid_of(_node().physical[index]),
        pci_bus_id=index,
        pci_device_id=0,
        pci_domain_id=0,
    )


def _can_access(device: object, peer_device: object) -> bool:
    reader, peer = device_index(device), device_index(peer_device)
    for index in (reader, peer):
        if not 0 <= index < _used().n:
            raise AssertionError(f"Invalid {'' if index == reader else 'peer '}device id")
    return reader != peer


def _synchronize(device: object = None) -> None:
    streams.synchronize(_checked_index(device))


def _device_count() -> int:
    """Return the number of devices; before CUDA is initialized, as NVML counts them, without a call to the driver."""
    return _node().count()


def _is_available() -> bool:
    """Return whether a device exists: by NVML if torch is set so, else by the driver."""
    return (_device_count() if torch.cuda._nvml_based_avail() else _node().n) > 0


def _device_module(device: object = None) -> object:
    if device is None:
        return torch.cuda
    resolved = untraced_device(device)
    if isinstance(device, torch.device | str) and resolved is not None:
        name = resolved.type
        module = getattr(torch, name, None)
        if module is not None:
            return module
    raise RuntimeError(f"Device '{device}' does not have a corresponding module registered as 'torch.{device}'.")


def _cuda_functions() -> dict[str, object]:
    return {
        "is_available": _is_available,
        "device_count": _device_count,
        "_lazy_init": lambda: _node().initialize(),
        "init": lambda: _node().initialize(),
        # checkpoint() reads it before it saves the states: torch/utils/checkpoint.py, CheckpointFunction, torch 2.13
        "_initialized": False,
        "is_initialized": lambda: _node().initialized and not _node().in_bad_fork,
        "_is_in_bad_fork": lambda: _node().in_bad_fork,
        "current_device": _current,
        "set_device": _set_device,
        "device": _DeviceGuard,
        "device_of": _DeviceOf,
        "_exchange_device": _exchange,
        "_maybe_exchange_device": _exchange,
        "get_device_properties": _properties,
        "get_device_name": lambda device=None: _properties(device).name,
        "get_device_capability": lambda device=None: _CAPABILITY,
        "can_device_access_peer": _can_access,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_tf32_supported": lambda: True,
        "synchronize": _synchronize,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "set_stream": streams.set_stream,
        "stream": StreamContext,
        "StreamContext": StreamContext,
        "Stream": streams.Stream,
        "ExternalStream": ExternalStream,
        "Event": streams.Event,
        "_CudaDeviceProperties": DeviceProperties,
        **_monitoring(),
    }


def _monitoring() -> dict[str, object]:
    """Return the monitoring functions of ``torch.cuda``, by name; they report idle, cool devices."""

    def of(value: int) -> Callable[..., int]:
        def answer(device: object = None) -> int:
            _checked_index(device)
            return value

        return answer

    def memory_used(device: object = None) -> int:
        return device_memory(_checked_index(device)).reserved

    def processes(device: object = None) -> str:
        return f"GPU:{_checked_index(device)}\nno processes are running"

    return {
        "utilization": of(0),
        "memory_usage": of(0),
        "temperature": of(30),
        "power_draw": of(0),
        "clock_rate": of(1000),
        "device_memory_used": memory_used,
        "list_gpu_processes": processes,
        "_device_count_nvml": lambda: len(_node().visible()),
        "_raw_device_count_nvml": lambda: _node().total,
        "_raw_device_uuid_nvml": lambda: [f"GPU-{uuid_of(i)}" for i in range(_node().total)],
    }


def _refused() -> dict[str, object]:
    classes = ("MemPool", "CUDAPluggableAllocator", "GreenContext")
    functions = ("change_current_allocator", "_compile_kernel")
    return {name: refused_class(f"torch.cuda.{name}") for name in classes} | {
        name: refused(f"torch.cuda.{name}") for name in functions
    }


def _capability(index: int | None = None) -> dict[str, object]:
    _checked_index(index)
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {"supported_dtypes": dtypes}


def _accelerator_functions() -> dict[str, object]:
    return {
        "_get_accelerator": lambda *_: torch.device("cuda"),
        "_accelerator_getAccelerator": lambda: torch.device("cuda"),
        "_accelerator_getDeviceIndex": lambda: _current(),
        "_accelerator_setDeviceIndex": _set_device,
        "_accelerator_exchangeDevice": _exchange,
        "_accelerator_maybeExchangeDevice": _exchange,
        "_accelerator_hooks_device_count": lambda: _node().n,
        "_accelerator_hooks_get_current_device": lambda: _current(),
        "_accelerator_hooks_set_current_device": lambda index: _set_device(index),
        "_accelerator_hooks_exchange_device": lambda index: _exchange(index),
        "_accelerator_hooks_maybe_exchange_device": lambda index: _exchange(index),
        "_accelerator_getDeviceCapability": _capability,
        "_accelerator_getStream": streams.current_stream,
        "_accelerator_setStream": streams.set_stream,
        "_accelerator_synchronizeDevice": _synchronize,
    }


def _native_functions() -> dict[str, object]:
    """Return the functions of ``torch._C`` under ``torch.cuda``, by name, for code that calls them directly."""
    return {
        "_cuda_init": lambda: _node().initialize(),
        "_cuda_isInBadFork": lambda: _node().in_bad_fork,
        "_cuda_getDeviceCount": lambda: _node().n,
        "_cuda_getDevice": lambda: _current(),
        "_cuda_setDevice": lambda index: _set_device(index),
        "_cuda_exchangeDevice": lambda index: _exchange(index),
        "_cuda_maybeExchangeDevice": lambda index: _exchange(index),
        "_cuda_canDeviceAccessPeer": lambda device, peer: _can_access(device, peer),
        "_cuda_synchronize": lambda: _synchronize(),
        "_CudaDeviceProperties": DeviceProperties,
    }


def install_runtime(patches: Patches) -> None:
    cuda = torch.cuda
    for name, function in {**_cuda_functions(), **_refused()}.items():
        original = getattr(cuda, name, None)
        if original is None:
            continue
        home = sys.modules.get(getattr(original, "__module__", ""))
        for owner in {cuda, home} if home is not None and vars(home).get(name) is original else {cuda}:
            patches.set(owner, name, function)
    for name in ("Stream", "Event"):
        patches.set(torch, name, getattr(streams, name))
    for name, function in {**_accelerator_functions(), **_native_functions()}.items():
        patches.set(torch._C, name, function)
    patches.set(torch.accelerator, "device_index", _AcceleratorIndex)
    patches.set(torch, "get_device_module", _device_module)
