"""Detect gradients that are clipped by a wrong norm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mgpu_check.diagnosis.evidence import Evidence
from mgpu_check.diagnosis.observed import CallEvent
from mgpu_check.diagnosis.registry import Precedence, mistake, on_evidence, on_tensors
from mgpu_check.diagnosis.report import Finding
from mgpu_check.diagnosis.results import Result
from mgpu_check.processes.rank_lists import few

if TYPE_CHECKING:
    import torch

    from mgpu_check.diagnosis.tensors import Tensors

mistake(
    "clipped-before-synchronization",
    "gradients are clipped by a norm that is not the norm of the whole, averaged gradient",
    "synchronize (and unscale) first, then clip by the norm of the whole gradient: all-reduce the sum of squares "
    "of what each rank holds a part of",
)


@on_tensors(Precedence.CLIPPING + 20)
def clips_first(tensors: Tensors) -> Finding | None:
    """Detect clipping before a collective on the gradients, without a backward or a step between them."""
    if not tensors.traces or not tensors.names or not tensors.gradient_like:
        return None
    clip: CallEvent | None = None
    for event in tensors.traces[0].events:
        if event.kind == "clip":
            clip = event
        elif event.kind in ("backward", "step"):
            clip = None
        elif event.kind == "collective" and clip is not None:
            large = any(len(tensor["shape"]) and "value" not in tensor for tensor in event.tensors)
            on_gradient = any(_is_gradient(tensor["result"]) for tensor in event.tensors)
            if event.name.startswith(("all_reduce", "reduce", "all_gather")) and (on_gradient or large):
                told = f"{clip.where} runs before {event.name} of the gradients ({event.site})"
                return Finding("clipped-before-synchronization", told, site=clip.site)
    return None


def _is_gradient(operand: Result | None) -> bool:
    return operand is not None and operand.kind == "grads"


@on_evidence(Precedence.CLIPPING + 10)
def clips_by_other_norms(evidence: Evidence) -> Finding | None:
    """Detect clipping that found a different norm on each rank."""
    return Finding("clipped-before-synchronization", evidence.norms.told) if evidence.norms.apart else None


@on_tensors(Precedence.CLIPPING + 30)
def clips_parts(tensors: Tensors) -> Finding | None:
    """Detect clipping before the mean: gradients are the mean of the parts', and right while no limit applies."""
    found = tensors.mean_of_parts
    if found is None or not found[0].even or found[0].along or not _is_limited(tensors):
        return None
    return Finding(
        "clipped-before-synchronization",
        f"{tensors.names[0]} is the mean of what each rank computes for its own part, and right for a batch that is "
        "scaled down: a limit on the norm is applied before the mean",
    )


@on_tensors(Precedence.AMBIGUOUS + 150)
def limits_another_norm(tensors: Tensors) -> Finding | None:
    """Detect clipping by the wrong norm: ranks agree, and are right only if the batch is scaled down."""
    if tensors.relations.split or tensors.wrong_alone or not _is_limited(tensors):
        return None
    return Finding(
        "clipped-before-synchronization",
        f"{few(tensors.names)} is right for a batch that is scaled down: a limit is applied to another norm than that "
        "of the whole gradient",
    )


def _is_limited(tensors: Tensors) -> bool:
    """Return whether gradients are right for a batch that is scaled down, and otherwise reach a limit."""
    return tensors.gradient_like and tensors.right_when_small is True and _shows_a_limit(tensors)


_SAME = 1e-4
"""Largest relative difference between two norms that one limit was applied to."""


def _shows_a_limit(tensors: Tensors) -> bool:
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
