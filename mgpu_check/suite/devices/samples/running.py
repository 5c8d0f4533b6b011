"""Run an operator on a sample: on a device, in a layout, and with gradients; or in float64, with rounding errors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from mgpu_check.suite.common.error_bounds import WIDE, error_bounds
from mgpu_check.torch_hooks.tensors import name_of

LAYOUTS = ("", "transposed", "with gaps", "with an offset", "channels_last")
"""The layouts of operands; the first is that of the sample."""

_CPU = torch.device("cpu")
_PADDING = 77
"""The value of the elements around an operand, which the operator must not read."""


def layout_of_operand(layout: int, position: int) -> str:
    """Return the layout of an operand by its position: neighbours differ, unless `layout` is 0, that of the sample."""
    return LAYOUTS[1 + (layout - 1 + position) % (len(LAYOUTS) - 1)] if layout else ""


def results(
    sample: Any, call: Callable[..., Any], device: torch.device, layout: int = 0, *, change: Any = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the results and the gradients of an operator on copies of a sample's operands.

    Args:
        change: takes each operand on the CPU and returns another; None leaves them unchanged.
    """
    positions = iter(range(1 << 20))

    def placed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _placed(
                value if change is None else change(value), device, layout_of_operand(layout, next(positions))
            )
        if isinstance(value, torch.dtype) and change is not None:
            return WIDE.get(value, value)
        return device if _is_device(value) else value

    first, args, options = tree_map(placed, (sample.input, sample.args, sample.kwargs))
    returned = tree_leaves(sample.output_process_fn_grad(call(first, *args, **options)))
    made = [one for one in returned if isinstance(one, (torch.Tensor, bool, int, float, complex))]
    found = [one if isinstance(one, torch.Tensor) else torch.tensor(one, device=device) for one in made]
    leaves = [one for one in tree_leaves((first, args, options)) if isinstance(one, torch.Tensor) and one.requires_grad]
    ends = [one for one in found if one.requires_grad]
    gradients: Sequence[torch.Tensor | None] = ()
    if leaves and ends:
        weights = [_weights(one.shape, one.dtype).to(one.device) for one in ends]
        gradients = torch.autograd.grad(ends, leaves, weights, allow_unused=True)
    none = torch.empty(0, dtype=torch.bool)
    return [_dense(one) for one in found], [none if one is None else _dense(one) for one in gradients]


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] in ("cpu", "cuda"))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _placed(tensor: torch.Tensor, device: torch.device, layout: str) -> torch.Tensor:
    """Return a copy of an operand on a device, in a layout; a leaf of autograd if it is one."""
    values = tensor.detach()
    if values.layout is torch.strided:
        values = values.resolve_conj().resolve_neg()
        made = _laid(values.to(device, copy=True), layout)
    else:
        made = values.to(device, copy=True)
    return made.requires_grad_(tensor.requires_grad)


def _laid(values: torch.Tensor, layout: str) -> torch.Tensor:
    shape, count = values.shape, values.dim()
    if layout == "channels_last" and count in (4, 5):
        return values.contiguous(memory_format=torch.channels_last if count == 4 else torch.channels_last_3d)
    if layout in ("transposed", "channels_last") and count > 1:
        back = tuple(reversed(range(count)))
        return values.permute(back).contiguous().permute(back)
    if layout == "with gaps" and count:
        room = values.new_full((*shape[:-1], 2 * shape[-1] + 1), _PADDING)[..., 1::2]
    elif layout:
        room = values.new_full((values.numel() + 1,), _PADDING)[1:].view(shape)
    else:
        return values
    room.copy_(values)
    return room


@functools.lru_cache(maxsize=256)
def _weights(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return unequal weights of results: with equal ones the gradients of a row could cancel."""
    weights = torch.arange(shape.numel(), device=_CPU).view(shape) * 3 % 5 - 1.5
    return (
        torch.complex(weights, weights.flip(0) if shape else weights).to(dtype)
        if dtype.is_complex
        else weights.to(dtype)
    )


def allowed(
    sample: Any, call: Callable[..., Any], dtype: torch.dtype, right: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return `error_bounds` for each result, then each gradient.

    Args:
        right: the results and gradients of the CPU in `dtype`.
    """
    return error_bounds(lambda change: itertools.chain(*results(sample, call, _CPU, change=change)), dtype, right)


def sizes(sample: Any, layout: int) -> Iterator[str]:
    """Yield the shape and layout of each operand in words, such as "5x5 transposed", then the options."""
    for position, one in enumerate(filter(torch.is_tensor, tree_leaves((sample.input, sample.args, sample.kwargs)))):
        shape = "x".join(map(str, one.shape)) or "0-dim"
        yield " ".join(filter(None, (shape, layout_of_operand(layout, position))))
    for name, value in sample.kwargs.items():
        if not any(map(torch.is_tensor, tree_leaves(value))):
            yield f"{name}={name_of(value) if isinstance(value, torch.dtype) else value}"
