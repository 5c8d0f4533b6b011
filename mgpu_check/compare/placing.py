"""Find, in the script's process, which slices of the tensors of one device its parameters are.

FullyShardedDataParallel (FSDP1) says it of its flat parameters. Other slices are found by their values before the first
step, in what the run on one device has left in a file; see `mgpu_check.compare.wholes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from mgpu_check.compare.naming import Names
from mgpu_check.compare.summaries import Cut, shape_of
from mgpu_check.numerics.placement.content import Wholes
from mgpu_check.numerics.placement.flat_parameters import flat_ranges, local_ranges
from mgpu_check.numerics.placement.neighbours import beside
from mgpu_check.numerics.placement.slices import Slice, Unplaced
from mgpu_check.torch_hooks.tensors import copied

__all__ = ["Part", "Placing"]


@dataclass(frozen=True)
class Part:
    """A tensor of the trace: all of a parameter, or what it has of one whole tensor.

    Attributes:
        label: its name in the trace of this rank.
        cut: None for a whole tensor.
        unplaced: why it is not known which slice it is, where that was asked.
    """

    label: str
    order: int
    shape: list[int]
    cut: Cut | None = None
    unplaced: str = ""


class Placing:
    """Places the parameters of a rank.

    Args:
        wholes: the parameters of one device, where they are known.
    """

    def __init__(self, names: Names, wholes: Wholes | None) -> None:
        self._names, self._wholes = names, wholes
        self._found: dict[str, list[tuple[torch.Size, Slice]]] = {}
        self._open: set[str] = set()

    def parts(self, parameters: Sequence[tuple[torch.Tensor, str]]) -> list[list[Part]]:
        """Return the parts of each parameter, before it is trained.

        Args:
            parameters: each with the name that it has where no model has it.
        """
        found = [self._parts(parameter, otherwise) for parameter, otherwise in parameters]
        # Neighbours, which are placed by now, may decide where values do not.
        for index, (parameter, _) in enumerate(parameters):
            if found[index] and found[index][0].label in self._open:
                found[index] = [self._beside(parameter, found[index][0])]
        return found

    def _parts(self, parameter: torch.Tensor, otherwise: str) -> list[Part]:
        ranges = flat_ranges(parameter)
        if ranges is not None:
            names = [self._names.of_key(module, key) for module, key in ranges.owners]
            if None not in names:
                return [
                    _part(name[0], name[1], parameter, Slice(name[0], shape, at, within))
                    for name, shape, (at, within) in zip(names, ranges.shapes, ranges.parts, strict=True)
                    if name is not None and at is not None
                ]
        name, order = self._names.name(parameter, otherwise)
        if getattr(parameter, "_fsdp_flattened", False):
            here = local_ranges(parameter, self._names.modules())
            if here is not None:
                at, shape = here
                return [_part(name, order, parameter, Slice(name, shape, at))] if len(at) else []
        whole = Part(name, order, shape_of(parameter))
        if self._wholes is None or hasattr(parameter, "full_tensor") or parameter.layout is not torch.strided:
            return [whole]
        return list(self._by_content(parameter, whole))

    def _by_content(self, parameter: torch.Tensor, whole: Part) -> Iterator[Part]:
        assert self._wholes is not None
        found = self._wholes.find(copied(parameter), whole.label, trusted=True)
        # By its name and shape it may be a whole that has begun elsewhere, or one of constants.
        known = self._wholes.shape(whole.label) == tuple(parameter.shape)
        if isinstance(found, Unplaced):
            if found is Unplaced.AMBIGUOUS:
                self._open.add(whole.label)
            yield whole if known else replace(whole, unplaced=str(found))
            return
        if len(found) == 1 and found[0].at is None:
            if not known:
                self._open.add(whole.label)  # zeros, which are another bias, too
            yield whole
            return
        for index, part in enumerate(found):
            if part.within is None:
                self._found.setdefault(whole.label.rpartition(".")[0], []).append((parameter.shape, part))
            label = whole.label if len(found) == 1 else f"{whole.label}[{index}]"
            yield _part(label, whole.order, parameter, part)

    def _beside(self, parameter: torch.Tensor, part: Part) -> Part:
        neighbours = self._found.get(part.label.rpartition(".")[0], ())
        assert self._wholes is not None
        found = beside(part.label, copied(parameter), neighbours, self._wholes) if parameter.dim() else None
        return part if found is None else _part(part.label, part.order, parameter, found)


def _part(label: str, order: int, parameter: torch.Tensor, part: Slice) -> Part:
    cut = Cut(part, parameter.is_complex())
    return Part(label, order, cut.shape, None if cut.is_whole and part.within is None else cut)
