"""Run an operator on a sample: on a device, in a layout, and with gradients; or in float64, with rounding errors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from mgpu_check.numerics.bounds import unit_roundoff
from mgpu_check.numerics.perturbation import Perturbed
from mgpu_check.suite.common.agreement import ulps_of
from mgpu_check.torch_hooks.tensors import as_real, name_of, plain

LAYOUTS = ("", "transposed", "with gaps", "with an offset", "channels_last")
"""The layouts of operands; the first is that of the sample."""

_CPU = torch.device("cpu")
_PADDING = 77
"""The value of the elements around an operand, which the operator must not read."""
_RUNS = 3


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
            return _WIDE.get(value, value)
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


_WIDE = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
    **dict.fromkeys((torch.complex32, torch.complex64), torch.complex128),
}


def allowed(
    sample: Any, call: Callable[..., Any], dtype: torch.dtype, right: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return for each result, then each gradient, the reference in float64 and the largest errors of a right device.

    A right implementation rounds its operands and each of its steps, in any order. Its error is bounded by some times
    the effect of such roundings. They are measured: the operator runs in float64 with random errors of a unit roundoff
    in each operand and step (D. S. Parker, *Monte Carlo Arithmetic*, 1997). The error of the CPU in `dtype` counts too.
    An element may show no effect by chance, so none counts less than the median. Elements beside a jump, as of `floor`,
    do not widen the bounds of others.

    Args:
        right: the results and gradients of the CPU in `dtype`.
    """
    real = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
    if not real.is_floating_point:
        real = torch.float32  # torch computes fractions of integers in this dtype
    units = ulps_of(real)  # beyond the effect of rounding each step once; reductions in the samples have few terms
    roundoff = unit_roundoff(real)
    generator = torch.Generator(_CPU).manual_seed(0)
    wide = _all(sample, call, _widened)

    def shaken(tensor: torch.Tensor) -> torch.Tensor:
        return _shaken(_widened(tensor), roundoff, generator)

    runs = []
    for _ in range(_RUNS):
        with Perturbed(1, generator, roundoff):
            runs.append(_all(sample, call, shaken))
    bounds = []
    for number, (reference, one) in enumerate(zip(wide, right, strict=True)):
        effect = torch.stack([_gaps(run[number], reference) for run in runs]).amax(0)
        least = roundoff * _largest(reference)
        bounds.append((reference, units * (_filled(effect) + least) + 2 * _filled(_gaps(one, reference))))
    return bounds


def _all(sample: Any, call: Callable[..., Any], change: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    made, gradients = results(sample, call, _CPU, change=change)
    return [*made, *gradients]


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(_WIDE.get(tensor.dtype, tensor.dtype)).requires_grad_(tensor.requires_grad)


def _shaken(tensor: torch.Tensor, roundoff: float, generator: torch.Generator) -> torch.Tensor:
    if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        return tensor
    signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
    return (tensor.detach() * (1 + roundoff * signs.double())).to(tensor.dtype).requires_grad_(tensor.requires_grad)


def _gaps(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the differences of the elements, as real numbers; 0 where they are not finite."""
    gaps = (as_real(plain(one)).double() - as_real(plain(other)).double()).abs()
    return gaps.where(gaps.isfinite(), 0)


def _filled(gaps: torch.Tensor) -> torch.Tensor:
    return gaps.clamp(min=float(gaps.median())) if gaps.numel() else gaps


def _largest(tensor: torch.Tensor) -> float:
    return float(_gaps(tensor, torch.zeros_like(tensor)).amax()) if tensor.numel() else 0.0


def sizes(sample: Any, layout: int) -> Iterator[str]:
    """Yield the shape and layout of each operand in words, such as "5x5 transposed", then the options."""
    for position, one in enumerate(filter(torch.is_tensor, tree_leaves((sample.input, sample.args, sample.kwargs)))):
        shape = "x".join(map(str, one.shape)) or "0-dim"
        yield " ".join(filter(None, (shape, layout_of_operand(layout, position))))
    for name, value in sample.kwargs.items():
        if not any(map(torch.is_tensor, tree_leaves(value))):
            yield f"{name}={name_of(value) if isinstance(value, torch.dtype) else value}"
