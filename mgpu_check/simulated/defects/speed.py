"""Devices and links that are slow, hang, or are gone."""

from __future__ import annotations

import abc
import threading

from mgpu_check.simulated.defects.chance import dtype_matches
from mgpu_check.simulated.defects.parameters import UNITS, Parameters
from mgpu_check.simulated.hardware import Copy, Defect, EndedCollective, Operation
from mgpu_check.simulated.state import cuda_error

Event = Operation | Copy | EndedCollective


class _Slow(Defect, abc.ABC):
    """Some events take ``factor`` times as long; with ``below``, only those of at most that many bytes."""

    def __init__(self, parameters: Parameters) -> None:
        self.given = parameters

    @abc.abstractmethod
    def concerns(self, event: Event) -> bool:
        """Return whether the slow part handles an event."""

    def factor(self, event: Event) -> float:
        most = int(self.given.get("below", 0))
        slow = self.concerns(event) and (not most or 0 < _bytes(event) <= most)
        return float(self.given["factor"]) if slow else 1.0


def _bytes(event: Event) -> int:
    if isinstance(event, Operation):
        return sum(one.nbytes for one in event.outputs)
    return event.data.numel() if isinstance(event, Copy) else event.bytes


class SlowDevice(_Slow):
    """Operators of ``device`` are slow.

    Parameters: unit (a key of `UNITS`, or "any"), dtype (of the first input), heat (seconds that the device has been
    busy before).
    """

    def concerns(self, event: Event) -> bool:
        given = self.given
        unit = str(given.get("unit", "any"))
        return (
            isinstance(event, Operation)
            and event.device == given["device"]
            and event.heat >= float(given.get("heat", 0))
            and (unit == "any" or event.name in UNITS[unit])
            and (not event.inputs or dtype_matches(given, event.inputs[0].dtype))
        )


class SlowLink(_Slow):
    """Copies from ``device`` to ``peer`` are slow. Parameters: path ("engine", "kernel", "any")."""

    def concerns(self, event: Event) -> bool:
        return (
            isinstance(event, Copy)
            and (event.source, event.target) == (self.given["device"], self.given["peer"])
            and self.given.get("path", "any") in ("any", event.path)
        )


class SlowPort(_Slow):
    """Copies between ``device`` and each other device are slow, but not those to the host."""

    def concerns(self, event: Event) -> bool:
        ends = (event.source, event.target) if isinstance(event, Copy) else (None,)
        return None not in ends and self.given["device"] in ends


class SlowHostLink(_Slow):
    """Copies between the host and ``device`` are slow.

    Parameters: way ("upload", "download", "any"), memory ("pinned", "pageable", "any").
    """

    def concerns(self, event: Event) -> bool:
        if not isinstance(event, Copy) or {event.source, event.target} != {None, self.given["device"]}:
            return False
        way, memory = ("upload" if event.source is None else "download"), "pinned" if event.pinned else "pageable"
        return self.given.get("way", "any") in ("any", way) and self.given.get("memory", "any") in ("any", memory)


class SlowCollective(_Slow):
    """Collectives with ``device`` are slow on all ranks, which wait for it.

    Parameters: operation (a transfer, or "any").
    """

    def concerns(self, event: Event) -> bool:
        return (
            isinstance(event, EndedCollective)
            and self.given["device"] in event.group
            and self.given.get("operation", "any") in ("any", event.name)
        )


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
