"""Units of a device that compute wrongly."""

from __future__ import annotations

import torch

from mgpu_check.simulated.defects.chance import SPOIL, Chance, dtype_matches
from mgpu_check.simulated.defects.parameters import UNITS, Parameters
from mgpu_check.simulated.hardware import Defect, Operation, cells

_SIDES = (("inner", "inputs", -1), ("rows", "outputs", -2), ("columns", "outputs", -1))
"""Parameter, the tensors of an operation, and the dimension of the first of them."""


class Unit(Defect):
    """Some operators give wrong elements. Its parameters select the operators and elements; `tf32` those that round."""

    def __init__(self, parameters: Parameters, operations: tuple[str, ...], tf32: bool = False) -> None:
        self._parameters = parameters
        self._operations = frozenset(operations)
        self._tf32 = tf32
        self._chance = Chance(parameters)
        self._pattern = SPOIL[str(parameters.get("pattern", "bits"))]

    def operated(self, operation: Operation) -> None:
        given = self._parameters
        if operation.device != given["device"] or operation.name not in self._operations or not operation.outputs:
            return
        result = operation.outputs[0]
        dtype = operation.inputs[0].dtype if operation.inputs else result.dtype
        if (
            not dtype_matches(given, dtype)
            or result.numel() * result.itemsize <= int(given.get("above", 0))
            or not _has_sides(given, operation)
            or operation.heat < float(given.get("heat", 0))
            or (self._tf32 and (dtype is not torch.float32 or torch.get_float32_matmul_precision() == "highest"))
            or not self._chance.now()
        ):
            return
        elements = cells(result)
        if elements is not None and elements.numel():
            if result.dtype is torch.bool:
                elements[:1] ^= 1
            else:
                self._pattern(elements, self._chance.random)


def _has_sides(given: Parameters, operation: Operation) -> bool:
    """Return whether the dimensions of an operation are those that a defect needs; without any, all are."""
    for name, tensors, place in _SIDES:
        wanted, found = int(given.get(name, 0)), getattr(operation, tensors)
        if wanted and (not found or found[0].dim() < -place or found[0].shape[place] != wanted):
            return False
    if not given.get("transposed"):
        return True
    factors = [one for one in operation.inputs if one.dim() >= 2]
    return len(factors) >= 2 and factors[-1].stride(-1) != 1 and factors[-1].stride(-2) == 1


class RepeatingRandom(Defect):
    """Random numbers repeat: the second half of a tensor equals the first."""

    def __init__(self, parameters: Parameters) -> None:
        self._device = parameters["device"]

    def operated(self, operation: Operation) -> None:
        if operation.device == self._device and operation.name in UNITS["random numbers"]:
            for drawn in operation.outputs:
                elements = cells(drawn)
                if elements is not None:
                    half = elements.numel() // 2
                    elements[half : 2 * half] = elements[:half].clone()
