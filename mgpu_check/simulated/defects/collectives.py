"""Collectives with a wrong result on one device."""

from __future__ import annotations

import torch

from mgpu_check.simulated.defects.chance import SPOIL, Chance, dtype_matches
from mgpu_check.simulated.defects.parameters import Parameters
from mgpu_check.simulated.hardware import Defect, EndedCollective, cells

__all__ = ["FAMILIES", "WrongCollective"]

FAMILIES = {
    "all_reduce": ("all_reduce", "allreduce_coalesced"),
    "all_gather": ("all_gather", "_all_gather_base"),
    "reduce_scatter": ("reduce_scatter", "_reduce_scatter_base"),
    "broadcast": ("broadcast",),
    "all_to_all": ("all_to_all",),
}
_ALL = tuple(name for names in FAMILIES.values() for name in names)


class WrongCollective(Defect):
    """The result on ``device`` is wrong.

    Parameters: operation (a family, or "any"), dtype, bytes (exactly; 0 for any), ranks (at least), pattern, every,
    probability, seed.
    """

    def __init__(self, parameters: Parameters, pattern: str = "bits") -> None:
        self._parameters = parameters
        operation = str(parameters.get("operation", "any"))
        self._names = _ALL if operation == "any" else FAMILIES[operation]
        self._chance = Chance(parameters)
        self._pattern = SPOIL[pattern]

    def reduced(self, collective: EndedCollective) -> None:
        given = self._parameters
        if (
            collective.device == given["device"]
            and collective.name in self._names
            and dtype_matches(given, collective.dtype)
            and int(given.get("bytes", 0)) in (0, collective.bytes)
            and len(collective.group) >= int(given.get("ranks", 2))
            and self._chance.now()
        ):
            for output in collective.outputs:
                elements = cells(output)
                if elements is None or not elements.numel():
                    continue
                if output.dtype is torch.bool:
                    elements[:1] ^= 1
                else:
                    self._pattern(elements, self._chance.random)
