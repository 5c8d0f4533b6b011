"""Provide ``torch.cuda.cudart()``: the functions of CUDA's runtime that torch exposes, and its error codes."""

from __future__ import annotations

import ctypes
import itertools
from types import SimpleNamespace

from mgpu_check.simulated.allocator import memory_info
from mgpu_check.simulated.pinned import register, unregister

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
_made: set[int] = set()


def _words(error: int) -> str:
    return _ERRORS.get(int(error), ("", "unrecognized error code"))[1]


def _stream_create(pointer: int) -> _CudaError:
    handle = next(_handles)
    _made.add(handle)
    ctypes.c_void_p.from_address(pointer).value = handle
    return _CudaError.success


def _stream_destroy(handle: int) -> _CudaError:
    if handle not in _made:
        return _CudaError(400)
    _made.discard(handle)
    return _CudaError.success


def runtime() -> SimpleNamespace:
    def fine(*_: object) -> _CudaError:
        return _CudaError.success

    return SimpleNamespace(
        cudaError=_CudaError,
        cudaGetErrorString=_words,
        cudaHostRegister=lambda pointer, size, flags: _CudaError(register(pointer, size)),
        cudaHostUnregister=lambda pointer: _CudaError(unregister(pointer)),
        cudaMemGetInfo=memory_info,
        cudaProfilerStart=fine,
        cudaProfilerStop=lambda *_: _CudaError.success,
        cudaStreamCreate=_stream_create,
        cudaStreamDestroy=_stream_destroy,
    )
