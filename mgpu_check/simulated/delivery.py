"""Results that a device delivers later than the call that asked for them, and what stands in their place until then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from mgpu_check.simulated.capturing import Recording, refuse_in_thread

__all__ = ["Clock", "Late", "Waiting", "clock", "poison", "use_clock"]


class Clock:
    """The time that streams take: that of the wall, in seconds."""

    def now(self) -> float:
        return time.perf_counter()

    def past(self, moment: float, whose: object) -> bool:
        """Return whether the moment has come at which this stream or event is done."""
        return moment <= self.now()

    def wait_until(self, moment: float) -> None:
        left = moment - self.now()
        if left > 0:
            time.sleep(left)

    def touch(self, device: torch.device | None) -> None:
        """Ask the driver about a device: where that is lost, this raises."""


_wall = Clock()
_clock = _wall


def clock() -> Clock:
    """Return the clock of all streams and events."""
    return _clock


def use_clock(other: Clock | None) -> None:
    """Have streams and events go by another clock; None: that of the wall."""
    global _clock
    _clock = other or _wall


def poison(t: torch.Tensor) -> None:
    """Fill a plain tensor with what no correct program computes: NaN, or the least integer (0xFF.. where unsigned)."""
    with torch.no_grad():
        if t.is_floating_point() or t.is_complex():
            t.fill_(float("nan"))
        elif t.dtype is torch.bool:
            t.logical_not_()
        else:
            info = torch.iinfo(t.dtype)
            t.fill_(info.min or info.max)


class Late:
    """A result that is delivered once, when something waits for it."""

    __slots__ = ("_deliver", "_lock")

    def __init__(self, deliver: Callable[[], object]) -> None:
        self._deliver: Callable[[], object] | None = deliver
        self._lock = threading.Lock()

    def deliver(self) -> None:
        with self._lock:
            deliver, self._deliver = self._deliver, None
        if deliver is not None:
            deliver()

    @property
    def done(self) -> bool:
        return self._deliver is None


class Waiting(Recording):
    """The common part of streams and events: results that are late, and a time when all before it is done."""

    _late: list[Late]
    _reached: float
    device: torch.device | None

    def query(self) -> bool:
        """Return whether all is done. Deliver results that were asked for: the next question gets yes."""
        self.refuse_wait()
        refuse_in_thread()
        _clock.touch(self.device)
        if not _clock.past(self._reached, self):
            return False
        done = all(late.done for late in self._late)
        self.synchronize()
        return done

    def synchronize(self) -> None:
        self.refuse_wait()
        _clock.touch(self.device)
        _clock.wait_until(self._reached)
        late, self._late = self._late, []
        for one in late:
            one.deliver()
