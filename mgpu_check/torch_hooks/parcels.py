"""Pickle tensors as plain bytes, because torch's own pickling copies each tensor several times: it saves the storage
to a file in memory, and pickles the content of that file (torch/storage.py, _StorageBase.__reduce__, torch 2.13).
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Parcel:
    """A dict with tensors, in a form for pickling. It is unpickled as a plain dict.

    Dense tensors on the CPU arrive without autograd history, each with its own memory, even if they shared memory
    before.
    """

    def __init__(self, content: Mapping[Any, Any]) -> None:
        self._content = dict(content)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (list(self._content), [_packed(value) for value in self._content.values()])

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return copy.deepcopy(self._content, memo)


class _Bytes:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach().contiguous()

    def __reduce__(self) -> tuple[Any, ...]:
        from mgpu_check.torch_hooks.tensors import memory_of

        tensor = self._tensor
        return _tensor, (pickle.PickleBuffer(memory_of(tensor)), tensor.dtype, tuple(tensor.shape))


def _packed(value: Any) -> Any:
    import torch

    if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout != torch.strided:
        return value
    if value.is_quantized or value.is_conj() or value.is_neg() or not value.numel():
        return value
    return _Bytes(value)


def _unpacked(keys: list[Hashable], values: list[Any]) -> dict[Hashable, Any]:
    return dict(zip(keys, values, strict=True))


def _tensor(content: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.frombuffer(content, dtype=dtype).reshape(shape)
