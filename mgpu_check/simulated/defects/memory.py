"""Memory cells that do not keep their content."""

from __future__ import annotations

import time

import torch

from mgpu_check.simulated.defects.chance import Chance
from mgpu_check.simulated.defects.parameters import Parameters
from mgpu_check.simulated.hardware import Defect


class _Cells(Defect):
    """Some bytes of one device, from the parameter ``address`` on."""

    def __init__(self, parameters: Parameters, length: int = 1) -> None:
        self.places = ((int(parameters["device"]), int(parameters["address"]), length),)


class StuckBit(_Cells):
    """One bit always has the value ``value``."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        self._mask = 1 << int(parameters["bit"])
        self._is_one = bool(parameters["value"])

    def remembered(self, *memory: torch.Tensor) -> None:
        if self._is_one:
            memory[0].bitwise_or_(self._mask)
        else:
            memory[0].bitwise_and_(0xFF - self._mask)


class DeadRow(_Cells):
    """A row reads as zeros."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, int(parameters["length"]))

    def remembered(self, *memory: torch.Tensor) -> None:
        memory[0].zero_()


class WeakBit(_Cells):
    """One bit sometimes flips."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        self._mask = 1 << int(parameters["bit"])
        self._chance = Chance(parameters)

    def remembered(self, *memory: torch.Tensor) -> None:
        if self._chance.now():
            memory[0].bitwise_xor_(self._mask)


class LeakyBit(_Cells):
    """One bit turns to 0 ``seconds`` after its byte was last changed."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        self._mask = 1 << int(parameters["bit"])
        self._seconds = float(parameters["seconds"])
        self._was, self._changed = -1, 0.0

    def remembered(self, *memory: torch.Tensor) -> None:
        value, now = int(memory[0][0]), time.monotonic()
        if value != self._was:
            self._was, self._changed = value, now
        if now - self._changed >= self._seconds:
            memory[0].bitwise_and_(0xFF - self._mask)
            self._was = value & ~self._mask


class Aliased(Defect):
    """The ``length`` bytes at ``address`` are the same cells as the bytes ``distance`` behind them."""

    def __init__(self, parameters: Parameters) -> None:
        device, address, length = (int(parameters[name]) for name in ("device", "address", "length"))
        self.places = ((device, address, length), (device, address + int(parameters["distance"]), length))
        self._known: torch.Tensor | None = None

    def remembered(self, *memory: torch.Tensor) -> None:
        first, second = memory
        if self._known is None or not torch.equal(second, self._known):
            first.copy_(second)  # if both were written, the higher address counts as the last write
        else:
            second.copy_(first)
        self._known = first.clone()


class Coupled(Defect):
    """A bit that changes from 0 to 1 flips the same bit of the next byte."""

    def __init__(self, parameters: Parameters) -> None:
        self.places = ((int(parameters["device"]), int(parameters["address"]), 2),)
        self._mask = 1 << int(parameters["bit"])
        self._was = 0xFF

    def remembered(self, *memory: torch.Tensor) -> None:
        value = int(memory[0][0])
        if value & self._mask & ~self._was:
            memory[0][1] ^= self._mask
        self._was = value
