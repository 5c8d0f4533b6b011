"""Find the first module whose output or gradient differs from one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from mgpu_check.diagnosis.tensors import Tensors

_CLOSE = 1e-3
"""Tolerance, as a fraction of the largest magnitude, for rows that were summed in another order."""
_MOST_ROWS = 512


@dataclass(frozen=True)
class WrongModule:
    """A module whose output, or the gradient of its output, differs from one device.

    Attributes:
        ranks: the ranks where it differs.
        what: what differs; "gradient" implies that all outputs are right.
    """

    name: str
    ranks: tuple[int, ...]
    what: Literal["output", "gradient"]


def first_wrong_module(tensors: Tensors) -> WrongModule | None:
    """Return the first module whose output differs from one device, else the first whose gradient does, else None.

    Ranks have parts of the batch or of the sequence, so each of their rows must equal a row on one device. The size of
    gradients is ignored, because a loss is averaged over other numbers of samples. Modules that ranks divide are left
    out, and so are outputs whose rows have another length.
    """
    alone = tensors.alone
    if alone is None or not tensors.traces or tensors.wrong_alone:
        return None
    divided = {name.of.rpartition(".")[0] for one in tensors.seen for name in one.own if name.kind == "params"}
    outputs = [trace.outputs for trace in tensors.traces]
    if found := _first(alone.outputs, outputs, divided, scaled=False):
        return WrongModule(*found, "output")
    gradients = [trace.gradients for trace in tensors.traces]
    if found := _first(alone.gradients, gradients, divided, scaled=True):
        return WrongModule(*found, "gradient")
    return None


def module_of_partial_gradients(tensors: Tensors) -> tuple[str, tuple[int, ...]] | None:
    """Return a module where each rank has a part of the gradient of the output, and the ranks whose parts add up to it.

    The gradients of parameters of this module must be wrong, and differ between these ranks: a right program may add
    them up later. The parts must be no multiples of the whole: ranks may share out a loss.
    """
    alone = tensors.alone
    if alone is None or not tensors.traces or tensors.wrong_alone:
        return None
    groups = dict.fromkeys(tuple(ranks) for trace in tensors.traces for ranks in trace.groups if len(ranks) > 1)
    split = [name.of for name in tensors.wrong("grads") if name in tensors.relations.split]
    for name, right in alone.gradients.items():
        if not any(of.startswith(f"{name}.") for of in split):
            continue
        for ranks in groups:
            parts = [tensors.traces[rank].gradients.get(name) for rank in ranks if rank < len(tensors.traces)]
            known = [part for part in parts if part is not None and part.shape == right.shape]
            if len(known) < len(ranks) or all(_are_rows_of(part, right, scaled=True) for part in known):
                continue
            if _is_sum(known, right):
                return name, ranks
    return None


def _is_sum(parts: Sequence[torch.Tensor], right: torch.Tensor) -> bool:
    import torch

    off = (torch.stack([part.double() for part in parts]).sum(0) - right.double()).abs()
    return right.numel() > 1 and bool((off <= _CLOSE * float(right.abs().max())).all())


def _first(
    alone: Mapping[str, torch.Tensor], ranks: Sequence[Mapping[str, torch.Tensor]], divided: set[str], scaled: bool
) -> tuple[str, tuple[int, ...]] | None:
    for name in alone:
        if any(name == part or part.startswith(f"{name}.") for part in divided):
            continue
        wrong = tuple(
            rank
            for rank, one in enumerate(ranks)
            if (got := one.get(name)) is not None and not _are_rows_of(got, alone[name], scaled)
        )
        if wrong:
            return name, wrong
    return None


def _are_rows_of(got: torch.Tensor, right: torch.Tensor, scaled: bool) -> bool:
    """Return whether each row of `got` equals a row of `right`; True if the tensors are not comparable."""
    import torch

    if got.shape[-1] != right.shape[-1]:
        return True
    rows, known = (value.reshape(-1, value.shape[-1]).double() for value in (got, right))
    if len(rows) > _MOST_ROWS or len(known) > _MOST_ROWS or not (rows.isfinite().all() and known.isfinite().all()):
        return True
    if scaled:
        rows, known = (value[value.norm(dim=1) > 0] for value in (rows, known))
        if rows.shape[-1] < 2 or not len(rows) or not len(known):
            return True
        rows, known = (value / value.norm(dim=1, keepdim=True) for value in (rows, known))
    largest = float(known.abs().max()) if known.numel() else 0.0
    return bool((torch.cdist(rows, known).amin(1) <= _CLOSE * largest * rows.shape[-1] ** 0.5).all())
