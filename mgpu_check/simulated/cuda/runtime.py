"""The device functions of ``torch.cuda`` and ``torch.accelerator`` (count, properties, current device), and
``torch.cuda.cudart()``: the functions of CUDA's runtime that torch exposes, and its error codes.

Each function of ``torch._C`` under ``torch.cuda`` is simulated, refused by its name, or harmless. So are the libraries
beside the CUDA runtime: cuDNN, cuBLAS, cuFFT, NCCL in one process, NVTX. torch's own Python code above them still runs:
memory statistics, versions of libraries, queries of streams. An unknown name is refused, so that no call reaches a real
driver.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from types import SimpleNamespace

import torch

from mgpu_check.simulated.cuda import streams
from mgpu_check.simulated.cuda.allocator import allocator_functions, device_memory, memory_info, register, unregister
from mgpu_check.simulated.cuda.graphs import graph_functions
from mgpu_check.simulated.cuda.streams import ExternalStream, external_stream
from mgpu_check.simulated.distributed.process_groups import check_types
from mgpu_check.simulated.node import (
    SimulatedNode,
    active_node,
    current_index,
    device_index,
    invalid_ordinal,
    present_node,
    refused,
    refused_class,
    set_current_index,
    untraced_device,
    uuid_of,
)
from mgpu_check.simulated.operators.attention import choice_functions
from mgpu_check.simulated.tensor import SimulatedTensor
from mgpu_check.simulated.transfer import move
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
    return SimpleNamespace(
        cudaError=_CudaError,
        cudaGetErrorString=lambda error: _ERRORS.get(int(error), ("", "unrecognized error code"))[1],
        cudaHostRegister=lambda pointer, size, flags: _CudaError(register(pointer, size)),
        cudaHostUnregister=lambda pointer: _CudaError(unregister(pointer)),
        cudaMemGetInfo=memory_info,
        cudaProfilerStart=lambda *_: _CudaError.success,
        cudaProfilerStop=lambda *_: _CudaError.success,
        cudaStreamCreate=_stream_create,
        cudaStreamDestroy=_stream_destroy,
    )


_CAPABILITY = (9, 0)


def _used() -> SimulatedNode:
    node = present_node()
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
        name=f"SIMULATED ({present_node().backing})",
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
        uuid=uuid_of(present_node().physical[index]),
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
    return present_node().count()


def _is_available() -> bool:
    """Return whether a device exists: by NVML if torch is set so, else by the driver."""
    return (_device_count() if torch.cuda._nvml_based_avail() else present_node().n) > 0


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
        "_lazy_init": lambda: present_node().initialize(),
        "init": lambda: present_node().initialize(),
        # checkpoint() reads it before it saves the states: torch/utils/checkpoint.py, CheckpointFunction, torch 2.13
        "_initialized": False,
        "is_initialized": lambda: present_node().initialized and not present_node().in_bad_fork,
        "_is_in_bad_fork": lambda: present_node().in_bad_fork,
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
        "_device_count_nvml": lambda: len(present_node().visible()),
        "_raw_device_count_nvml": lambda: present_node().total,
        "_raw_device_uuid_nvml": lambda: [f"GPU-{uuid_of(i)}" for i in range(present_node().total)],
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
        "_accelerator_hooks_device_count": lambda: present_node().n,
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
        "_cuda_init": lambda: present_node().initialize(),
        "_cuda_isInBadFork": lambda: present_node().in_bad_fork,
        "_cuda_getDeviceCount": lambda: present_node().n,
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


_CUDNN = 91400  # 9.14.0
_NCCL = (2, 28, 9)
_WORKSPACE = 32 << 20
_CUDNN_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


_TUNING = ("_cuda_tunableop_is_enabled", "_cuda_tunableop_tuning_is_enabled", "_cuda_record_untuned_is_enabled")


class _Setting:
    """A setting that keeps its value and has no effect."""

    def __init__(self, value: object) -> None:
        self.value = value

    def get(self) -> object:
        return self.value

    def put(self, value: object, *_: object) -> None:
        self.value = value


class _RNNMode(IntEnum):
    rnn_relu = 0
    rnn_tanh = 1
    lstm = 2
    gru = 3


def _cudnn() -> SimpleNamespace:
    version = (_CUDNN // 10000, _CUDNN // 100 % 100, _CUDNN % 100)
    return SimpleNamespace(
        is_cuda=True,
        RNNMode=_RNNMode,
        getVersionInt=lambda: _CUDNN,
        getRuntimeVersion=lambda: version,
        getCompileVersion=lambda: version,
    )


def _is_acceptable(tensor: torch.Tensor) -> bool:
    return torch._C._get_cudnn_enabled() and isinstance(tensor, SimulatedTensor) and tensor.dtype in _CUDNN_DTYPES


def _nvtx() -> SimpleNamespace:
    depth, handles = 0, itertools.count(1)

    def push(message: str) -> int:
        nonlocal depth
        depth += 1
        return depth - 1

    def pop() -> int:
        nonlocal depth
        depth = max(depth - 1, -1)
        return depth

    return SimpleNamespace(
        rangePushA=push,
        rangePop=pop,
        rangeStartA=lambda *_: next(handles),
        rangeEnd=lambda *_: None,
        markA=lambda *_: None,
        deviceRangeStart=lambda *_: next(handles),
        deviceRangeEnd=lambda *_: None,
    )


_COMBINE: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    torch.add,
    torch.mul,
    torch.maximum,
    torch.minimum,
    torch.add,  # the mean, divided at the end
)
_MEAN = 4


def _check_operands(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    """Raise NCCL's error unless the operands of one process are dense, of one dtype, and each on its own device."""
    devices = set()
    for tensor in inputs:
        if not isinstance(tensor, SimulatedTensor) or tensor.layout is not torch.strided:
            raise RuntimeError("input and output elements have to be cuda dense Tensors")
        if not tensor.is_contiguous():
            raise RuntimeError("all inputs must be contiguous")
        if tensor.dtype != inputs[0].dtype:
            raise RuntimeError("all inputs and outputs must have the same dtype")
        if tensor.device in devices:
            raise RuntimeError("inputs must be on unique devices")
        devices.add(tensor.device)
    check_types(*inputs)
    for tensor in outputs:
        if not isinstance(tensor, SimulatedTensor) or tensor.dtype != inputs[0].dtype:
            raise RuntimeError("input and output elements have to be cuda dense Tensors of the same dtype")


def _combined(inputs: Sequence[torch.Tensor], op: int, device: torch.device) -> torch.Tensor:
    head, *others = (move(tensor, device) for tensor in inputs)
    result = head.clone()
    for operand in others:
        result = _COMBINE[op](result, operand)
    return result / len(inputs) if op == _MEAN else result


def _all_reduce(
    inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor] | None, op: int = 0, *_: object
) -> None:
    targets = inputs if outputs is None else outputs
    _check_operands(inputs, targets)
    with torch.no_grad():
        result = _combined(inputs, op, inputs[0].device)
        for target in targets:
            target.copy_(result)


def _reduce(inputs: Sequence[torch.Tensor], output: torch.Tensor, root: int = 0, op: int = 0, *_: object) -> None:
    _check_operands(inputs, [output])
    with torch.no_grad():
        output.copy_(_combined(inputs, op, inputs[root].device))


def _broadcast(inputs: Sequence[torch.Tensor], root: int = 0, *_: object) -> None:
    _check_operands(inputs, [])
    with torch.no_grad():
        for target in inputs:
            if target is not inputs[root]:
                target.copy_(inputs[root])


def _all_gather(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *_: object) -> None:
    _check_operands(inputs, outputs)
    with torch.no_grad():
        for target in outputs:
            pieces = [move(tensor, target.device).reshape(-1) for tensor in inputs]
            target.copy_(torch.cat(pieces).view(target.shape))


def _reduce_scatter(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], op: int = 0, *_: object) -> None:
    _check_operands(inputs, outputs)
    with torch.no_grad():
        chunks = _combined(inputs, op, inputs[0].device).reshape(-1).chunk(len(outputs))
        for chunk, target in zip(chunks, outputs, strict=True):
            target.copy_(chunk.view(target.shape))


def library_functions() -> dict[str, object]:
    limit, cache = _Setting(10), _Setting(True)
    linalg, products = _Setting(torch._C._LinalgBackend.Default), _Setting(torch._C._BlasBackend.Cublas)
    default = torch._C._BlasBackend.Default
    blas, blas_lt = _Setting(_WORKSPACE), _Setting(_WORKSPACE)
    major, minor, patch = _NCCL
    return {
        "_has_cuda": True,
        "_has_cudnn": True,
        "_cudnn": _cudnn(),
        "_cuda_get_cudnn_benchmark_limit": limit.get,
        "_cuda_set_cudnn_benchmark_limit": limit.put,
        "_cuda_get_conv_benchmark_empty_cache": cache.get,
        "_cudnn_set_conv_benchmark_empty_cache": cache.put,
        "_cudnn_clear_dropout_state": lambda: None,
        "_cuda_getCublasWorkspaceSize": blas.get,
        "_cuda_setCublasWorkspaceSize": blas.put,
        "_cuda_resetCublasWorkspaceSize": lambda: blas.put(_WORKSPACE),
        "_cuda_getCublasLtWorkspaceSize": blas_lt.get,
        "_cuda_setCublasLtWorkspaceSize": blas_lt.put,
        "_cuda_resetCublasLtWorkspaceSize": lambda: blas_lt.put(_WORKSPACE),
        "_get_linalg_preferred_backend": linalg.get,
        "_set_linalg_preferred_backend": linalg.put,
        "_get_blas_preferred_backend": products.get,
        "_set_blas_preferred_backend": lambda chosen: products.put(
            torch._C._BlasBackend.Cublas if chosen == default else chosen
        ),
        **{name: lambda: False for name in _TUNING},
        "_nccl_version": lambda: (major << 32) | (minor << 16) | patch,
        "_nccl_version_suffix": lambda: b"",
        "_nccl_all_reduce": _all_reduce,
        "_nccl_reduce": _reduce,
        "_nccl_broadcast": _broadcast,
        "_nccl_all_gather": _all_gather,
        "_nccl_reduce_scatter": _reduce_scatter,
        "_nvtx": _nvtx(),
    }


def install_libraries(patches: Patches) -> None:
    cudnn = torch.backends.cudnn
    patches.set(cudnn, "version", lambda: _CUDNN)
    patches.set(cudnn, "is_available", lambda: True)
    patches.set(cudnn, "is_acceptable", _is_acceptable)
    for switches in (cudnn, cudnn.rnn):
        patches.set(vars(switches)["m"], "_cudnn", torch._C._cudnn)  # the module that the object wraps
    limit = torch.backends.ContextProp(
        lambda: torch._C._cuda_get_cudnn_benchmark_limit(),
        lambda count: torch._C._cuda_set_cudnn_benchmark_limit(count),
    )
    patches.set(type(cudnn), "benchmark_limit", limit)
    patches.set(torch.cuda.nvtx, "_nvtx", torch._C._nvtx)
    # Weights stay in place: no library needs them in one piece here.
    patches.replace(torch._use_cudnn_rnn_flatten_weight, lambda: False)
    plans = torch.backends.cuda.cuFFTPlanCache
    sizes: dict[int, int] = {}
    patches.set(plans, "size", property(lambda self: 0))
    patches.set(
        plans,
        "max_size",
        property(
            lambda self: sizes.get(self.device_index, 4096),
            lambda self, size: sizes.__setitem__(self.device_index, size),
        ),
    )
    patches.set(plans, "clear", lambda self: None)


_SWITCHES = re.compile(
    r"cudnn|cublas|_sdp_|SDP|flash|_attention$|[bB]las.*ackend|inalg.*ackend|rocm|ROCm|fp32_precision|float32_matmul"
    r"|onednn_allow"
)
_OURS = re.compile(
    r"_(cuda|cudart|cudnn|cusparselt|nccl|nvtx|gds|has_cu|has_gds|accelerator|FastCuda|StaticCuda|Cuda|CUDA|MemPool"
    r"|graph_pool|construct_CUDA|ensureCUDA)"
)
_CLOCK = 1e9  # cycles per second, for `torch.cuda._sleep`


def _switches(*switch_names: str, prefix: str = "") -> list[str]:
    return [f"{prefix}_{verb}_{name}" for name in switch_names for verb in ("get", "set")]


# Parts of CUDA that a simulated node does not support: custom allocators and memory pools, tuning, files by DMA.
REFUSED = frozenset(
    [
        *("_CUDAGreenContext", "_acceleratorGraph", "_CUDAPluggableAllocator", "_MemPool", "_FastCudaLauncher"),
        *("_StaticCudaLauncher", "_construct_CUDA_Tensor_From_Storage_And_Metadata", "_cuda_CUDAAllocator"),
        *("_cuda_CUDAAllocator_AllocatorState", "_cuda_allocationTraceback", "_cuda_attach_out_of_memory_observer"),
        *("_cuda_beginAllocateCurrentStreamToPool", "_cuda_beginAllocateCurrentThreadToPool"),
        *("_cuda_beginAllocateToPool", "_cuda_endAllocateToPool", "_cuda_releasePool"),
        *("_cuda_changeCurrentAllocator", "_cuda_checkPoolLiveAllocations", "_cuda_cudaHostAllocator"),
        *("_cuda_customAllocator", "_cuda_getAllocator", "_cuda_getCheckpointState", "_cuda_setCheckpointPoolState"),
        *("_cuda_jiterator_compile_and_launch_kernel", "_gds_deregister_buffer", "_gds_deregister_handle"),
        *("_gds_load_storage", "_gds_register_buffer", "_gds_register_handle", "_gds_save_storage"),
        *("_get_cudnn_batch_norm_reserve_space_size", "_nccl_init_rank", "_nccl_unique_id"),
        *("_cuda_record_untuned_enable", "_cuda_tunableop_enable", "_cuda_tunableop_tuning_enable"),
        *("_cuda_tunableop_read_file", "_cuda_tunableop_get_results", "_cuda_tunableop_get_validators"),
        "_cuda_tunableop_set_numerical_check_tolerances",
        *_switches("cublaslt_requested_algo_count", "filename", "max_tuning_duration", prefix="_cuda_tunableop"),
        *_switches("max_tuning_iterations", "rotating_buffer_size", prefix="_cuda_tunableop"),
    ]
)


# These need no driver: flags of torch itself, and its bookkeeping.
HARMLESS = frozenset(
    [
        *("_BlasBackend", "_LinalgBackend", "_ROCmFABackend", "_SDPAParams", "_SDPBackend"),
        *("_get_blas_default_backend", "_get_cudnn_sdp_enabled", "_get_fa3_sdp_enabled", "_get_flash_sdp_enabled"),
        *("_get_math_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_overrideable_sdp_enabled"),
        *("_is_ck_sdpa_available", "_rocm_is_backward_pass"),
        *(f"_set_sdp_use_{name}" for name in ("cudnn", "fa3", "flash", "math", "mem_efficient", "overrideable")),
        *_switches("cublas_allow_bf16_reduced_precision_reduction", "cublas_allow_fp16_reduced_precision_reduction"),
        *_switches("cublas_allow_fp16_accumulation", "cublas_allow_tf32", "cublaslt_prefer_grouped_gemm"),
        *_switches("cudnn_allow_tf32", "cudnn_benchmark", "cudnn_depthwise_kernel", "cudnn_deterministic"),
        *_switches("cudnn_enabled", "float32_matmul_precision", "math_sdp_allow_fp16_bf16_reduction"),
        *_switches("onednn_allow_tf32", "rocm_fa_preferred_backend", "sdp_priority_order"),
        *("_get_fp32_precision_getter", "_set_fp32_precision_setter", "_accelerator_getAllocatorSettings"),
        *("_accelerator_setAllocatorSettings", "_accelerator_getDefaultGenerator", "_cuda_getCompiledVersion"),
        *("_cuda_getHipblasltVersion", "_cusparselt", "_ensureCUDADeviceGuardSet", "_has_cusparselt", "_has_gds"),
    ]
)


def concerns_devices(name: str) -> bool:
    """Return whether a name of ``torch._C`` belongs to CUDA, to the accelerator or to a library beside them."""
    return _OURS.match(name) is not None or _SWITCHES.search(name) is not None


def _identity(stream: streams.Stream) -> tuple[int, int, int]:
    return stream.stream_id, stream.device_index, stream.device_type


def _has_context(index: int) -> bool:
    node = active_node()
    if node is None or not 0 <= index < node.n:
        raise invalid_ordinal()
    memory = node.memory[index]
    return bool(memory.small.blocks_given or memory.large.blocks_given)


def _stream_functions() -> dict[str, object]:
    return {
        "_CudaStreamBase": streams.Stream,
        "_CudaEventBase": streams.Event,
        "_cuda_getCurrentStream": lambda index: _identity(streams.current_stream(torch.device("cuda", index))),
        "_cuda_getDefaultStream": lambda index: _identity(streams.default_stream(torch.device("cuda", index))),
        "_cuda_getStreamFromExternal": lambda pointer, index: _identity(external_stream(pointer, index)),
        "_cuda_getCurrentRawStream": lambda index: streams.current_stream(torch.device("cuda", index)).cuda_stream,
        "_cuda_setStream": lambda *args, **named: streams.set_stream(streams.stream_by_id(*args, **named)),
        "_cuda_sleep": lambda cycles: streams.current_stream().sleep(cycles / _CLOCK),
        "_cuda_busy_wait_for_flag": lambda *_: None,
        "_cuda_set_sync_debug_mode": streams.set_sync_debug_mode,
        "_cuda_get_sync_debug_mode": streams.get_sync_debug_mode,
        "_cuda_hasPrimaryContext": _has_context,
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_getCurrentBlasHandle": lambda: current_index() + 1,
        "_cuda_getCurrentSolverHandle": lambda: current_index() + 1,
        "_cudart": runtime(),
    }


def simulated_names() -> dict[str, object]:
    functions = allocator_functions(), choice_functions(), graph_functions(), library_functions(), _stream_functions()
    return {name: function for each in functions for name, function in each.items()}


def install_native(patches: Patches) -> None:
    ours = simulated_names()
    for name in ours.keys() - patches.changed(torch._C):  # earlier installers replaced the others
        _put(patches, name, ours[name])
    done = patches.changed(torch._C)
    for name in REFUSED.union(filter(concerns_devices, dir(torch._C))):
        if name not in done and name not in HARMLESS:
            refusal = refused_class if isinstance(getattr(torch._C, name, None), type) else refused
            _put(patches, name, refusal(f"torch._C.{name}"))
    patches.set(torch.cuda, "_cudart", ours["_cudart"])
    if torch.version.cuda is None:
        patches.set(torch.version, "cuda", "13.0")
    install_libraries(patches)


def _put(patches: Patches, name: str, new: object) -> None:
    original = getattr(torch._C, name, None)
    if callable(original):
        patches.replace(original, new)
    patches.set(torch._C, name, new)
