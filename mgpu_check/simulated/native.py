"""Replace the functions of ``torch._C`` under ``torch.cuda``: each is simulated, refused by its name, or harmless.

torch's own Python code above them still runs: memory statistics, versions of libraries, queries of streams. An unknown
name is refused, so that no call reaches a real driver.
"""

from __future__ import annotations

import re

import torch

from mgpu_check.simulated import streams
from mgpu_check.simulated.allocator import allocator_functions
from mgpu_check.simulated.attention_choice import choice_functions
from mgpu_check.simulated.cudart import runtime
from mgpu_check.simulated.external_streams import external_stream
from mgpu_check.simulated.graphs import graph_functions
from mgpu_check.simulated.libraries import install_libraries, library_functions
from mgpu_check.simulated.refusals import refused, refused_class
from mgpu_check.simulated.state import active_node, current_index, invalid_ordinal
from mgpu_check.torch_hooks.patches import Patches

_SWITCHES = re.compile(
    r"cudnn|cublas|_sdp_|SDP|flash|_attention$|[bB]las.*ackend|inalg.*ackend|rocm|ROCm|fp32_precision|float32_matmul"
    r"|onednn_allow"
)
_OURS = re.compile(
    r"_(cuda|cudart|cudnn|cusparselt|nccl|nvtx|gds|has_cu|has_gds|accelerator|FastCuda|StaticCuda|Cuda|CUDA|MemPool"
    r"|graph_pool|construct_CUDA|ensureCUDA)"
)
_CLOCK = 1e9  # cycles per second, for `torch.cuda._sleep`

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
        *("_cuda_record_untuned_enable", "_cuda_tunableop_enable"),
        *("_cuda_tunableop_get_cublaslt_requested_algo_count", "_cuda_tunableop_get_filename"),
        *("_cuda_tunableop_get_max_tuning_duration", "_cuda_tunableop_get_max_tuning_iterations"),
        *("_cuda_tunableop_get_results", "_cuda_tunableop_get_rotating_buffer_size"),
        *("_cuda_tunableop_get_validators", "_cuda_tunableop_read_file"),
        *("_cuda_tunableop_set_cublaslt_requested_algo_count", "_cuda_tunableop_set_filename"),
        *("_cuda_tunableop_set_max_tuning_duration", "_cuda_tunableop_set_max_tuning_iterations"),
        *("_cuda_tunableop_set_numerical_check_tolerances", "_cuda_tunableop_set_rotating_buffer_size"),
        *("_cuda_tunableop_tuning_enable",),
    ]
)


def _switches(*names: str) -> list[str]:
    return [f"_{verb}_{name}" for name in names for verb in ("get", "set")]


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


def _set_stream(stream_id: int, device_index: int, device_type: int = 1) -> None:
    streams.set_stream(streams.stream_by_id(stream_id, device_index, device_type))


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
        "_cuda_setStream": _set_stream,
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


def _refusal(name: str, original: object) -> object:
    full = f"torch._C.{name}"
    return refused_class(full) if isinstance(original, type) else refused(full)


def install_native(patches: Patches) -> None:
    ours = simulated_names()
    for name in ours.keys() - patches.changed(torch._C):  # earlier installers replaced the others
        _put(patches, name, ours[name])
    done = patches.changed(torch._C)
    for name in REFUSED.union(filter(concerns_devices, dir(torch._C))):
        if name not in done and name not in HARMLESS:
            _put(patches, name, _refusal(name, getattr(torch._C, name, None)))
    patches.set(torch.cuda, "_cudart", ours["_cudart"])
    if torch.version.cuda is None:
        patches.set(torch.version, "cuda", "13.0")
    install_libraries(patches)


def _put(patches: Patches, name: str, new: object) -> None:
    original = getattr(torch._C, name, None)
    if callable(original):
        patches.replace(original, new)
    patches.set(torch._C, name, new)
