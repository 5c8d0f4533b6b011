"""Devices and links that are slow, hang, or are gone."""

from __future__ import annotations

import threading

from mgpu_check.simulated.defects.chance import dtype_matches
from mgpu_check.simulated.defects.parameters import Parameters
from mgpu_check.simulated.hardware import Copy, Defect, Operation
from mgpu_check.simulated.state import cuda_error

__all__ = ["Hanging", "Lost", "SlowDevice", "SlowHostLink", "SlowLink"]


class SlowDevice(Defect):
    """Operators take ``factor`` times as long.

    Parameters: device, factor, dtype (of the first input), heat (seconds that the device has been busy before).
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters

    def factor(self, event: Operation | Copy) -> float:
        given = self._parameters
        if (
            isinstance(event, Operation)
            and event.device == given["device"]
            and event.heat >= float(given.get("heat", 0))
            and (not event.inputs or dtype_matches(given, event.inputs[0].dtype))
        ):
            return float(given["factor"])
        return 1.0


class SlowLink(Defect):
    """Copies from ``device`` to ``peer`` take ``factor`` times as long."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters

    def factor(self, event: Operation | Copy) -> float:
        given = self._parameters
        slow = isinstance(event, Copy) and (event.source, event.target) == (given["device"], given["peer"])
        return float(given["factor"]) if slow else 1.0


class SlowHostLink(Defect):
    """Copies between the host and ``device`` take ``factor`` times as long."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters

    def factor(self, event: Operation | Copy) -> float:
        given = self._parameters
        slow = (
            isinstance(event, Copy)
            and None in (event.source, event.target)
            and given["device"] in (event.source, event.target)
        )
        return float(given["factor"]) if slow else 1.0


class Lost(Defect):
    """``device`` is gone from the bus: the driver refuses all operations on it."""

    def __init__(self, parameters: Parameters) -> None:
        self._device = parameters["device"]

    def reached(self, device: int) -> None:
        if device == self._device:
            raise cuda_error(999, "unknown error")  # cudaErrorUnknown


class Hanging(Defect):
    """A call of the driver about ``device`` never returns."""

    def __init__(self, parameters: Parameters) -> None:
        self._device = parameters["device"]

    def reached(self, device: int) -> None:
        if device == self._device:
            threading.Event().wait()
