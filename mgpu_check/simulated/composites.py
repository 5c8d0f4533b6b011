"""Wrap torch functions that meet the backing device in C++: they create a tensor there, or read where one is.

A created tensor is returned, or combined with the input. `mismatch` recognises it by its reference count, except under
a `TorchDispatchMode`, which holds a reference too (a gate that perturbs a step uses one). So these wrappers pass
tensors of the simulated device, or tag the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.utils._foreach_utils

from mgpu_check.simulated.tensor import SimulatedTensor, raw, tag, tensors_in
from mgpu_check.torch_hooks.patches import Patches, around
from mgpu_check.torch_hooks.values import is_distributed

Function = Callable[..., torch.Tensor]
_Groups = dict[tuple[torch.device, torch.dtype], tuple[list[list[torch.Tensor | None]], list[int]]]


@around
def _matrix_rank(original: Function, *args: object, **kwargs: object) -> torch.Tensor:
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    device = tensors[0].device if tensors else None
    together = all(isinstance(t, SimulatedTensor) and t.device == device for t in tensors)
    if device is None or not together or kwargs.get("out") is not None:
        return original(*args, **kwargs)
    bare = [raw(value) if isinstance(value, torch.Tensor) else value for value in args]
    named = {name: raw(value) if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}
    return tag(original(*bare, **named), device)


@around
def _istft(
    original: Function,
    input: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    *args: object,
    **kwargs: object,
) -> torch.Tensor:
    """Wrap ``istft`` to pass a window of ones if the caller gives no window, as C++ does."""
    if window is None and isinstance(input, SimulatedTensor):
        dtype = torch.view_as_real(input).dtype if input.is_complex() else input.dtype
        length = n_fft if win_length is None else win_length
        if length > 0:
            window = torch.ones(length, dtype=dtype, device=input.device)
    return original(input, n_fft, hop_length, win_length, window, *args, **kwargs)


@around
def _one_hot(original: Function, tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    made = original(raw(tensor), num_classes)
    return tag(made, tensor.device) if isinstance(tensor, SimulatedTensor) else made


@around
def _combinations(original: Function, input: torch.Tensor, r: int = 2, with_replacement: bool = False) -> torch.Tensor:
    """Wrap ``combinations`` to select elements by index instead of by a mask."""
    if not isinstance(input, SimulatedTensor) or input.dim() != 1 or r < 0:
        return original(input, r, with_replacement)
    chosen = original(torch.arange(len(input)), r, with_replacement)
    return input[chosen.to(input.device)] if r else input.new_empty(0)


@around
def _quantile(
    original: Function, input: torch.Tensor, q: float | torch.Tensor, *args: object, **kwargs: object
) -> torch.Tensor:
    """Wrap ``quantile`` and ``nanquantile``, which make a tensor from a number ``q``."""
    if isinstance(input, SimulatedTensor) and isinstance(q, float | int) and 0 <= q <= 1:
        q = torch.tensor(q, dtype=input.dtype, device=input.device)
    return original(input, q, *args, **kwargs)


@around
def _unflatten(
    original: Callable[..., Sequence[torch.Tensor]], flat: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Wrap the inverse of flattening, which creates new tensors for those without elements."""
    made = original(flat, tensors)
    if not isinstance(flat, SimulatedTensor):
        return made
    return tuple(one if isinstance(one, SimulatedTensor) else tag(one, flat.device) for one in made)


@around
def _pad_packed_sequence(
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]], data: torch.Tensor, *args: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Wrap the padding of a packed sequence, whose result C++ creates; the lengths are always on the CPU."""
    padded, lengths = original(data, *args)
    on_device = isinstance(data, SimulatedTensor) and not isinstance(padded, SimulatedTensor)
    return (tag(padded, data.device) if on_device else padded), lengths


@around
def _recurrent(original: Callable[..., object], input: torch.Tensor, *args: object) -> object:
    """Wrap recurrent networks, which compare an input on the host with their parameters in C++."""
    if not isinstance(input, SimulatedTensor):
        weights = next((number for number, value in enumerate(args) if isinstance(value, list)), len(args))
        for kind, values in (("hidden", args[:weights]), ("parameter", args[weights:])):
            for other in tensors_in(values):
                if isinstance(other, SimulatedTensor):
                    raise RuntimeError(
                        f"Input and {kind} tensors are not at the same device, found input tensor at {input.device} "
                        f"and {kind} tensor at {other.device}"
                    )
    return original(input, *args)


@around
def _grouped(
    original: Callable[..., _Groups], lists: Sequence[Sequence[torch.Tensor | None]], with_indices: bool = False
) -> _Groups:
    """Wrap the grouping by device and dtype for multi-tensor functions: C++ would read the backing device."""
    if not any(isinstance(t, SimulatedTensor) or is_distributed(t) for t in lists[0]):
        return original(lists, with_indices)
    groups: _Groups = {}
    for number, first in enumerate(lists[0]):
        assert first is not None  # as in C++
        tensors, indices = groups.setdefault((first.device, first.dtype), ([[] for _ in lists], []))
        for group, given in zip(tensors, lists, strict=True):
            if given:  # a list that an optimizer does not need is empty
                group.append(given[number])
        if with_indices:
            indices.append(number)
    return groups


def install_composites(patches: Patches) -> None:
    patches.replace(torch.linalg.matrix_rank, _matrix_rank(torch.linalg.matrix_rank))
    patches.replace(torch.istft, _istft(torch.istft))
    one_hot = torch.nn.functional.one_hot
    patches.replace(one_hot, _one_hot(one_hot))
    patches.replace(torch.combinations, _combinations(torch.combinations))
    for name in ("quantile", "nanquantile"):
        function = getattr(torch, name)
        patches.replace(function, _quantile(function))
        patches.wrap(torch.Tensor, name, _quantile)
    patches.wrap(torch._VF, "_pad_packed_sequence", _pad_packed_sequence)
    for name in ("gru", "lstm", "rnn_relu", "rnn_tanh"):
        patches.wrap(torch._VF, name, _recurrent)
    grouped = torch.utils._foreach_utils._group_tensors_by_device_and_dtype
    patches.replace(grouped, _grouped(grouped))
    unflatten = torch._utils._unflatten_dense_tensors
    patches.replace(unflatten, _unflatten(unflatten))
