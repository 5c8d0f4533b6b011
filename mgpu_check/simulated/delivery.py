"""Deliver results later than the call that requested them, with poison in their place until then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from mgpu_check.simulated.capturing import Recording, refuse_in_thread


class WorkClock:
    """The clock of streams and events: wall time in seconds."""

    def now(self) -> float:
        return time.perf_counter()

    def past(self, moment: float, whose: object) -> bool:
        """Return whether ``moment``, when the stream or event ``whose`` is done, has passed."""
        return moment <= self.now()

    def wait_until(self, moment: float) -> None:
        left = moment - self.now()
        if left > 0:
            time.sleep(left)

    def touch(self, device: torch.device | None) -> None:
        """Call the driver of a device; simulated hardware raises here if the device is lost."""


_wall = WorkClock()
_clock = _wall


def clock() -> WorkClock:
    return _clock


def use_clock(other: WorkClock | None) -> None:
    """Use another clock for streams and events; None restores wall time."""
    global _clock
    _clock = other or _wall


def poison(t: torch.Tensor) -> None:
    """Fill a plain tensor with NaN, or with the least integer (the greatest if unsigned); invert booleans."""
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
    """The base class of streams and events: late results, and the time when all queued work is done."""

    _late: list[Late]
    _reached: float
    device: torch.device | None

    def query(self) -> bool:
        """Return whether all work is done.

        If its time has come, deliver late results, so that the next query returns True.
        """
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
