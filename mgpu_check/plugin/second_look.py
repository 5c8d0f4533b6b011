"""Rerun a failed example of the packaged suite to localise the fault: unchanged, and on other devices and world
sizes."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from mgpu_check.errors import RankFailure, RankHang, StartupFailure, UnexpectedError
from mgpu_check.plugin.packaged import SUITE, package_of
from mgpu_check.plugin.ranks import Ranks
from mgpu_check.plugin.report.example import draws_on
from mgpu_check.plugin.report.explaining import worlds
from mgpu_check.plugin.report.suspects import Rerun, Reruns
from mgpu_check.plugin.requirements import Needs
from mgpu_check.plugin.session import GpuSession
from mgpu_check.processes import protocol

_REPEATS = 20
_REPEATS_FIRST = 3
_REPEATS_RELIABLE = 6
_SECONDS = {"quick": 5.0, "standard": 20.0, "long": 120.0}
"""Time limit of one second look on a fast machine, by level."""
_RERUNS = {False: 60, True: 150}
"""A second look may take as long as this number of reruns take on average, on a slow machine...

By whether an unchanged rerun has passed: then each control must pass many times.
"""
_SLOWEST = 10
"""... but at most this multiple of its limit on a fast one."""
_SHARE = 4
"""All second looks of a run may take this multiple of the limit of one. Each gets one such part of the rest."""
_COUNTS = (("size", "ranks"), ("sizes", "ranks"), ("devices", "gpus"), ("devices", "ranks"))
"""Arguments of a check that hold the number of ranks or devices, or several, each with the fixture that has them."""
_ORDER = "order"
"""The argument that holds indices of the devices of the fixture `gpus`, in their order."""
_PLACE = re.compile(r"cuda:(\d+)")


@dataclass(frozen=True)
class Failed:
    """The arguments of an example that has failed."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def is_packaged(item: pytest.Item) -> bool:
    """Return whether a test is a check of the packaged suite."""
    return package_of(item) == SUITE


def look_again(body: Callable[..., Any], failed: Failed, needs: Needs, session: GpuSession, error: object) -> Reruns:
    """Rerun the failed example, and return the results.

    Return an empty `Reruns` if ranks hang or fail to start, or if the example draws while it runs: it cannot draw
    again.
    """
    if any(map(draws_on, failed.kwargs.values())) or isinstance(error, (RankHang, StartupFailure)):
        return Reruns()
    return _Second(body, failed, needs, session, error).look()


class _OutOfTime(Exception):
    pass


class _OnDevices(Ranks):
    """The fixture `ranks` on a selection of the devices, in a given order.

    Attributes:
        used: the devices of all calls, in the order of their ranks; None if a call has chosen its devices itself.
    """

    def __init__(self, session: GpuSession, devices: Sequence[int]) -> None:
        super().__init__(session)
        self._devices = tuple(devices)
        self.used: tuple[int, ...] | None = ()

    @property
    def size(self) -> int:
        return len(self._devices)

    def run(self, fn: Callable[..., Any] | str, /, *args: Any, size: int | None = None, **kwargs: Any) -> list[Any]:
        chosen = kwargs.pop("devices", None)
        which = range(len(self._devices) if size is None else size) if chosen is None else chosen
        devices = [self._devices[index] for index in which]
        if self.used is not None:
            self.used = tuple(dict.fromkeys((*self.used, *devices)))
        return super().run(fn, *args, devices=devices, **kwargs)

    def _run_apart(self, fn: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        self.used = None
        return super()._run_apart(fn, arguments)


class _Second:
    def __init__(
        self, body: Callable[..., Any], failed: Failed, needs: Needs, session: GpuSession, error: object
    ) -> None:
        self._body = body
        self._failed = failed
        self._session = session
        self._kind = _kind_of(error)
        given = failed.kwargs
        self._count = next((name for name, of in _COUNTS if of in given and _sizes_in(given.get(name))), None)
        self._all = tuple(range(needs.count or session.pool.devices))
        self._order = given[_ORDER] if "gpus" in given and _sizes_in(given.get(_ORDER)) else ()
        self._all_given = self._count is None and not self._order and "gpus" in given
        named = _PLACE.findall(repr([value for name, value in given.items() if name != "gpus"]))
        self._least = max(1, needs.least, *(int(place) + 1 for place in named if self._all_given))
        self._seen = Reruns(partial=self._all_given)
        self._began = time.monotonic()
        self._runs = 0
        self._hung = False
        self._until = self._began + _SECONDS[session.settings.depth]
        self._why = "reached its time limit; --gpu-level=long allows more time"

    def look(self) -> Reruns:
        seen = self._seen
        most = max(_sizes_in(self._failed.kwargs[self._count])) if self._count else len(self._all)
        usual = self._order or self._all[:most]
        try:
            for _ in range(_REPEATS_FIRST):
                self._session.pool.renew()  # an earlier example may have left something in the processes
                self._repeat(seen, usual, len(seen.repeats) + 1, self._until)
            if not any(rerun.failed for rerun in seen.repeats):
                seen.notes.append("no part is named: it passes in fresh processes, so it may need what ran before")
                self._repeat(seen, usual, _REPEATS, self._until)
                return seen
            if seen.unreliable:
                self._repeat(seen, usual, _REPEATS, self._half)
            self._localise(seen, seen.tries if seen.unreliable else 1)
            self._repeat(seen, usual, _REPEATS_RELIABLE, self._half)
            if seen.unreliable:
                self._repeat(seen, usual, _REPEATS, self._half)
            self._prove(seen)
            needed = seen.tries
            self._repeat(seen, usual, _REPEATS, self._half)
            if seen.tries > needed:
                self._prove(seen)
        except _OutOfTime:
            seen.notes.append(f"the second look {self._why}")
        finally:
            self._session.looked += time.monotonic() - self._began
        return seen

    def _allow_time(self) -> None:
        """Set the time limit: by the speed of the machine, and by the time that second looks of this run have left."""
        fast = _SECONDS[self._session.settings.depth]
        took = (time.monotonic() - self._began) / self._runs
        limit = min(max(fast, _RERUNS[self._seen.unreliable] * took), _SLOWEST * fast)
        self._until = self._began + max(0.0, _SHARE * limit - self._session.looked) / _SHARE

    @property
    def _half(self) -> float:
        """The time when half of the remaining time is over."""
        now = time.monotonic()
        return now + (self._until - now) / 2

    def _repeat(self, seen: Reruns, usual: tuple[int, ...], most: int, until: float) -> None:
        while len(seen.repeats) < most and time.monotonic() < until:
            seen.repeats.append(self._as_it_was(usual))

    def _prove(self, seen: Reruns) -> None:
        self._confirm(seen)
        self._localise(seen, seen.tries)

    def _confirm(self, seen: Reruns) -> None:
        """Repeat the reruns that passed too few times: chance may have cleared a part."""
        seen.settled = False
        for place, rerun in enumerate(seen.elsewhere):
            while not rerun.failed and rerun.tries < seen.tries:
                again = self._try(rerun.devices)
                rerun = dataclasses.replace(rerun, failed=again.failed, tries=rerun.tries + 1)
                seen.elsewhere[place] = rerun

    def _localise(self, seen: Reruns, tries: int) -> None:
        """Run the example elsewhere, until no further rerun rules out a part.

        Args:
            tries: how often it must pass there.
        """
        if not self._movable() or not tries or not seen.repeats[0].devices:
            return
        asked: set[tuple[int, ...]] = set()
        while True:
            failed = min((one.devices for one in (*seen.repeats, *seen.elsewhere) if one.failed), key=len, default=())
            most = len(seen.repeats[0].devices)
            fewer = self._count or self._order or self._all_given
            sizes = range(self._least if fewer else most, most + 1)
            new = (one for one in worlds(self._all, sizes, failed) if one not in asked)
            devices = seen.next_trial(new, tries)
            if devices is None:
                seen.settled = tries >= seen.tries
                return
            asked.add(devices)
            trial = self._try_until_it_fails(devices, tries)
            if trial.devices and not trial.refused:
                seen.elsewhere = [*(one for one in seen.elsewhere if one.devices != trial.devices), trial]

    def _as_it_was(self, usual: tuple[int, ...]) -> Rerun:
        """Run the example on its original devices. It can run there, so any error is a failure."""
        trial = self._try(usual)
        return dataclasses.replace(trial, failed=trial.failed or trial.refused, refused=False)

    def _try_until_it_fails(self, devices: tuple[int, ...], most: int) -> Rerun:
        """Run the example on these devices, up to `most` times until it fails: a flaky example may pass at first."""
        trial = self._try(devices)
        for tries in range(2, most + 1):
            if trial.failed or trial.refused:
                break
            trial = dataclasses.replace(self._try(devices), tries=tries)
        return trial

    def _movable(self) -> bool:
        """Return whether the example can run on other devices."""
        if len(self._all) < 2 or self._session.settings.per_host:
            return False
        return bool(self._count or self._order or self._all_given or "ranks" in self._failed.kwargs)

    def _try(self, devices: tuple[int, ...]) -> Rerun:
        if self._runs:
            self._allow_time()
        if self._hung or time.monotonic() > self._until:
            raise _OutOfTime
        self._runs += 1
        kwargs = dict(self._failed.kwargs)
        ranks = None
        if self._count is not None and len(devices) < max(_sizes_in(kwargs[self._count])):
            kwargs[self._count] = len(devices) if isinstance(kwargs[self._count], int) else (len(devices),)
        if "ranks" in kwargs:
            # A check that decides by itself how many devices it uses gets all, these first.
            rest = () if self._count else (device for device in self._all if device not in devices)
            ranks = kwargs["ranks"] = _OnDevices(self._session, (*devices, *rest))
        elif self._order:
            kwargs[_ORDER] = devices
        elif self._count is not None or self._all_given:
            if self._all_given:  # arguments may also name devices by their place among all
                moved = dict(enumerate(devices))
                kwargs = {name: _moved(value, moved) for name, value in kwargs.items()}
            kwargs["gpus"] = protocol.Placeholder("gpus", order=devices)
        try:
            self._body(*self._failed.args, **kwargs)
        except RankHang:
            self._hung = True  # stop, because each further trial could hang as long
            self._why = "ended early, because a rerun hung"
            return Rerun(devices, False, refused=True)  # a busy machine also makes ranks late
        except Exception as error:
            if not self._is_finding(error):
                return Rerun(devices, False, refused=True)
            named = tuple(rank for rank in getattr(error, "ranks", ()) if isinstance(rank, int))
            return _rerun(devices, ranks, failed=True, named=named if ranks is not None else ())
        return _rerun(devices, ranks, failed=False)

    def _is_finding(self, error: Exception) -> bool:
        """Return whether an error is a failure of the check, not a sign that the check cannot run on these devices."""
        kind = _kind_of(error)
        is_assertion = isinstance(kind, type) and issubclass(kind, AssertionError)
        return not isinstance(error, StartupFailure) and (is_assertion or kind == self._kind)


def _sizes_in(value: object) -> tuple[int, ...]:
    """Return the numbers in an argument: itself, or those of a tuple; empty for anything else."""
    numbers = value if isinstance(value, tuple) else (value,)
    return numbers if all(isinstance(one, int) and not isinstance(one, bool) for one in numbers) else ()


def _kind_of(error: object) -> type | str:
    """Return the class of an error, of a `RankFailure` that of the error on the rank; the name of an unexpected one."""
    cause = (isinstance(error, RankFailure) and error.__cause__) or error
    return cause.kind if isinstance(cause, UnexpectedError) else type(cause)


def _rerun(devices: tuple[int, ...], ranks: _OnDevices | None, *, failed: bool, named: tuple[int, ...] = ()) -> Rerun:
    """Return the result of a rerun, with the devices that took part: a check may use fewer, and in another order.

    The result has no devices if the check did not say which it used.
    """
    if ranks is None or ranks.used == ():
        return Rerun(devices, failed, named)
    return Rerun(ranks.used or (), failed, named)


def _moved(value: Any, devices: Mapping[int, int]) -> Any:
    """Return a plain value with each ``cuda:i`` in it replaced by ``cuda:<devices[i]>``."""
    if isinstance(value, str):
        return _PLACE.sub(lambda found: f"cuda:{devices.get(int(found[1]), int(found[1]))}", value)
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_moved(one, devices) for one in value)
    if isinstance(value, dict):
        return {name: _moved(one, devices) for name, one in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, protocol.Placeholder)):
        changed = {field.name: _moved(getattr(value, field.name), devices) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: one for name, one in changed.items() if one != getattr(value, name)})
    return value
