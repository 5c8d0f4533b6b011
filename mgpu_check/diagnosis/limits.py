"""Detect a limit on gradients, such as clipping."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mgpu_check.diagnosis.tensors import Tensors

_SAME = 1e-4
"""Largest relative difference between two norms that one limit was applied to."""


def shows_a_limit(tensors: Tensors) -> bool:
    """Return whether gradients are limited: clipping was called, or other samples reach the same largest size.

    The size is the total norm, the largest norm of a tensor, or the largest element of the gradients of one device. A
    step that is right for scaled-down batches proves no limit: softmax and normalization then give much the same for
    all.
    """
    if any(True for _ in tensors.events("clip")) or (tensors.alone is not None and tensors.alone.of("clip")):
        return True
    for how in (_total_norm, _largest_norm, _largest_element):
        sizes = [how(one) for case in (tensors, *tensors.further) for one in _gradients(case)]
        highest = max(sizes, default=0.0)
        if sum(size >= (1 - _SAME) * highest > 0 for size in sizes) > 1:
            return True
    return False


def _gradients(case: Tensors) -> Iterator[list[torch.Tensor]]:
    """Yield the gradients of one device, or else its parameter updates, for the whole batch and for each part."""
    initial = case.expected.single.initial
    # Use one division only: other divisions may have the same parts, which would then count twice.
    parts = case.hypotheses.divisions[0].parts if case.hypotheses.divisions else []
    for values in (case.expected.exact, *(window for windows in parts for window in windows)):
        found = [value.double() for name, value in values.items() if name.kind == "grads"] or [
            value.double() - initial[name.of].double()
            for name, value in values.items()
            if name.kind == "params" and name.of in initial and initial[name.of].shape == value.shape
        ]
        if sum(value.numel() for value in found) > 1 and all(bool(value.isfinite().all()) for value in found):
            yield found


def _total_norm(tensors: Sequence[torch.Tensor]) -> float:
    return math.hypot(*(float(one.norm()) for one in tensors))


def _largest_norm(tensors: Sequence[torch.Tensor]) -> float:
    return max(float(one.norm()) for one in tensors)


def _largest_element(tensors: Sequence[torch.Tensor]) -> float:
    return max(float(one.abs().max()) for one in tensors if one.numel())
