"""Wrap torch functions that create a tensor in C++ on the backing device, and return it or combine it with their input.

`mismatch` recognises such a tensor by its reference count, except under a `TorchDispatchMode`, which holds a reference
too (a gate that perturbs a step uses one). So these wrappers pass tensors of the simulated device, or tag the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mgpu_check.simulated.tensor import SimulatedTensor, raw, tag
from mgpu_check.torch_hooks.patches import Patches, around

Function = Callable[..., torch.Tensor]


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
    unflatten = torch._utils._unflatten_dense_tensors
    patches.replace(unflatten, _unflatten(unflatten))
