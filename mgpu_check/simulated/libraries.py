"""Simulate the libraries that torch uses beside the CUDA runtime: cuDNN, cuBLAS, cuFFT, NCCL in one process, NVTX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from types import SimpleNamespace

import torch

from mgpu_check.simulated.nccl import check_types
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
    first, *others = (move(tensor, device) for tensor in inputs)
    result = first.clone()
    for other in others:
        result = _COMBINE[op](result, other)
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
            parts = [move(tensor, target.device).reshape(-1) for tensor in inputs]
            target.copy_(torch.cat(parts).view(target.shape))


def _reduce_scatter(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], op: int = 0, *_: object) -> None:
    _check_operands(inputs, outputs)
    with torch.no_grad():
        parts = _combined(inputs, op, inputs[0].device).reshape(-1).chunk(len(outputs))
        for part, target in zip(parts, outputs, strict=True):
            target.copy_(part.view(target.shape))


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
