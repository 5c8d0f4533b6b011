"""Collectives with a wrong result on one device."""

from __future__ import annotations

import torch

from mgpu_check.simulated.defects.chance import SPOIL, Chance, dtype_matches
from mgpu_check.simulated.defects.parameters import Parameters
from mgpu_check.simulated.hardware import Defect, EndedCollective, cells
from mgpu_check.torch_hooks.table import TRANSFERS

_ANY = tuple(name for name, transfer in TRANSFERS.items() if transfer.takers == "all" and name != "scatter")
"""Transfers that are wrong by default: those that give each rank a result. A wrong scatter could be an error of its
root too."""


class WrongCollective(Defect):
    """The result on ``device`` is wrong.

    Parameters: operation (a transfer, or "any"), dtype, bytes (exactly; 0 for any), ranks (at least), pattern, every,
    probability, seed.
    """

    def __init__(self, parameters: Parameters, pattern: str = "bits") -> None:
        self._parameters = parameters
        operation = str(parameters.get("operation", "any"))
        self._names = _ANY if operation == "any" else (operation,)
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
