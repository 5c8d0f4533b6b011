"""Compare a result with the expected one element by element, and describe the difference."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mgpu_check.numerics.bounds import significand_bits
from mgpu_check.torch_hooks.tensors import INTEGER_OF_SIZE, plain


@dataclass(frozen=True)
class Difference:
    """The difference between a tensor and the expected one. Indices count along the tensor's own dimensions."""

    count: int
    """How many elements differ by more than the tolerance."""
    total: int
    first: tuple[int, ...]
    last: tuple[int, ...]
    worst: tuple[int, ...]
    got: float | int
    """The value at `worst`; `expected` and `tolerance` belong to the same element."""
    expected: float | int
    tolerance: float
    dtype: torch.dtype

    def __str__(self) -> str:
        where = f"element {list(self.worst)}: " if self.worst else ""
        text = f"{where}got {show(self.got, self.dtype)}, expected {show(self.expected, self.dtype)}"
        if self.tolerance:
            text += f" ± {self.tolerance:.3g}"
        if self.count == self.total:
            return text + (f"; all {self.total} elements differ" if self.total > 1 else "")
        if self.count == 1:
            return text + f"; all other {self.total - 1} elements are right"
        return text + f"; {self.count} of {self.total} elements differ, from {list(self.first)} to {list(self.last)}"


def show(value: float | int, dtype: torch.dtype) -> str:
    """Format `value` with enough digits to distinguish all numbers of `dtype`."""
    if isinstance(value, int):
        return str(value)
    digits = {53: 17, 24: 9, 11: 5, 8: 4}.get(significand_bits(dtype), 17) if dtype.is_floating_point else 17
    return f"{value:.{digits}g}"


def difference(got: torch.Tensor, expected: torch.Tensor, tolerance: torch.Tensor | float = 0.0) -> Difference | None:
    """Describe how `got` differs from `expected`; return None if every element is within `tolerance`.

    With tolerance 0 values must be equal. 0.0 equals -0.0, since the sign of a zero sum depends on the order of its
    terms. NaN equals only NaN, and an infinity only the same infinity.

    Args:
        got: any dtype, layout and device.
        expected: same shape; float64 for an exact value.
        tolerance: a number, or a tensor of the same shape.

    Raises:
        ValueError: the shapes differ.
    """
    if got.shape != expected.shape:
        raise ValueError(
            f"difference: got has shape {tuple(got.shape)}, expected {tuple(expected.shape)}; compare like with like"
        )
    got_, expected_ = plain(got), plain(expected)
    dtypes = {got.dtype, expected.dtype, tolerance.dtype if isinstance(tolerance, torch.Tensor) else None}
    # A float32 tolerance needs no wider comparison, and float32 moves a quarter of the memory.
    if dtypes == {torch.float32} and bool(((got_ - expected_).abs_() <= torch.as_tensor(tolerance)).all()):
        return None
    # NaN is unequal to everything, so `close` is False for it; the complement below counts it as wrong.
    allowed = torch.as_tensor(tolerance, dtype=torch.float64).cpu().expand(got_.shape)
    if got_.dtype.is_floating_point or expected_.dtype.is_floating_point:
        got64, expected64 = got_.double(), expected_.double()
        distance = (got64 - expected64).abs()
        close = (got64 == expected64) | (distance <= allowed) | (got64.isnan() & expected64.isnan())
    else:
        close = got_ == expected_
        distance = (got_.double() - expected_.double()).abs()
    wrong = ~close
    if not wrong.any():
        return None
    # The worst element exceeds its tolerance by the largest factor; if a tolerance is 0, it has the largest error.
    excess = distance / allowed if bool((allowed > 0).all()) else distance
    excess = torch.where(wrong, excess.nan_to_num(torch.inf), -1.0)
    indices = wrong.nonzero()
    worst = torch.unravel_index(excess.argmax(), got_.shape) if got_.dim() else ()
    index = tuple(int(part) for part in worst)
    return Difference(
        count=int(wrong.sum()),
        total=got_.numel(),
        first=tuple(indices[0].tolist()),
        last=tuple(indices[-1].tolist()),
        worst=index,
        got=got_[index].item(),
        expected=expected_[index].item(),
        tolerance=float(allowed[index]),
        dtype=got_.dtype,
    )


def flipped_bits(got: torch.Tensor, expected: torch.Tensor) -> list[tuple[tuple[int, ...], int]]:
    """Find the elements that differ from the expected ones in exactly one bit, as (index, bit).

    Bit 0 is the least significant. Empty if any element differs in more than one bit, or if the dtypes or shapes
    differ.
    """
    if got.dtype != expected.dtype or got.shape != expected.shape or not got.numel():
        return []
    kind = INTEGER_OF_SIZE[got.element_size()]
    changed = plain(got).view(kind) ^ plain(expected).view(kind)
    indices = changed.nonzero()
    values = changed[changed != 0]
    if not len(indices) or bool((values & (values - 1)).any()):
        return []
    width = 8 * got.element_size()
    return [
        (tuple(index.tolist()), (value % 2**width).bit_length() - 1)
        for index, value in zip(indices, values.tolist(), strict=True)
    ]
