"""Replace the functions of ``torch._C`` under ``torch.cuda``: each is simulated, refused by its name, or harmless. So
are the libraries beside the CUDA runtime: cuDNN, cuBLAS, cuFFT, NCCL in one process, NVTX.

torch's own Python code above them still runs: memory statistics, versions of libraries, queries of streams. An
unknown name is refused, so that no call reaches a real driver.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import IntEnum
from types import SimpleNamespace

import torch

from mgpu_check.simulated.cuda import streams
from mgpu_check.simulated.cuda.allocator import allocator_functions
from mgpu_check.simulated.cuda.graphs import graph_functions
from mgpu_check.simulated.cuda.runtime import runtime
from mgpu_check.simulated.cuda.streams import external_stream
from mgpu_check.simulated.distributed.process_groups import check_types
from mgpu_check.simulated.node import active_node, current_index, invalid_ordinal, refused, refused_class
from mgpu_check.simulated.operators.attention import choice_functions
from mgpu_check.simulated.tensor import SimulatedTensor
from mgpu_check.simulated.transfer import move
from mgpu_check.torch_hooks.patches import Patches

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
    depth = handles = 0

    def push(message: str) -> int:
        nonlocal depth
        depth += 1
        return depth - 1

    def pop() -> int:
        nonlocal depth
        depth = max(depth - 1, -1)
        return depth

    def start(*_: object) -> int:
        nonlocal handles
        handles += 1
        return handles

    def nothing(*_: object) -> None:
        pass

    return SimpleNamespace(
        rangePushA=push,
        rangePop=pop,
        rangeStartA=start,
        rangeEnd=nothing,
        markA=nothing,
        deviceRangeStart=start,
        deviceRangeEnd=nothing,
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
