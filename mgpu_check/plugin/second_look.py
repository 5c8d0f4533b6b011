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

from mgpu_check.errors import RankFailure, RankHang, StartupFailure
from mgpu_check.plugin.packaged import SUITE, package_of
from mgpu_check.plugin.ranks import Ranks
from mgpu_check.plugin.report.example import draws_on
from mgpu_check.plugin.report.suspects import Rerun, Reruns
from mgpu_check.plugin.requirements import Needs
from mgpu_check.plugin.session import GpuSession
from mgpu_check.processes import protocol

__all__ = ["Failed", "is_packaged", "look_again"]

_REPEATS = 20
_SECONDS = {"quick": 5.0, "standard": 20.0, "long": 120.0}
"""Time limit of one second look, by level. All second looks of a run together may take four times as long."""
_COUNTS = ("size", "devices")
"""Arguments of a check that hold the number of ranks or devices."""
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
    """The fixture `ranks` on a selection of the devices, in a given order."""

    def __init__(self, session: GpuSession, devices: Sequence[int]) -> None:
        super().__init__(session)
        self._devices = tuple(devices)

    @property
    def size(self) -> int:
        return len(self._devices)

    def run(self, fn: Callable[..., Any] | str, /, *args: Any, size: int | None = None, **kwargs: Any) -> list[Any]:
        chosen = kwargs.pop("devices", None)
        which = range(len(self._devices) if size is None else size) if chosen is None else chosen
        return super().run(fn, *args, devices=[self._devices[index] for index in which], **kwargs)


class _Second:
    def __init__(
        self, body: Callable[..., Any], failed: Failed, needs: Needs, session: GpuSession, error: object
    ) -> None:
        self._body = body
        self._failed = failed
        self._session = session
        self._kind = _kind_of(error)
        self._count = next((name for name in _COUNTS if isinstance(failed.kwargs.get(name), int)), None)
        self._least = max(1, needs.least)
        self._all = tuple(range(needs.count or session.pool.devices))
        budget = _SECONDS[session.settings.gpu_level]
        left = 4 * budget - session.looked
        self._until = time.monotonic() + min(budget, left)
        self._began = time.monotonic()

    def look(self) -> Reruns:
        seen = Reruns()
        size = self._failed.kwargs[self._count] if self._count else self._takes_part()
        usual = self._all[:size] if self._count else self._all
        try:
            seen.repeats.append(self._as_it_was(usual))
            if self._movable():
                for devices in self._elsewhere(size, usual):
                    trial = self._try_until_it_fails(devices, 1 if seen.repeats[0].failed else 5)
                    if not trial.refused:
                        seen.elsewhere.append(trial)
            middle = time.monotonic() + (self._until - time.monotonic()) / 2
            while len(seen.repeats) < _REPEATS and (len(seen.repeats) < 3 or time.monotonic() < middle):
                seen.repeats.append(self._as_it_was(usual))
        except _OutOfTime:
            seen.notes.append("the second look reached its time limit; --gpu-level=long allows more time")
        finally:
            self._session.looked += time.monotonic() - self._began
        return seen

    def _as_it_was(self, usual: tuple[int, ...]) -> Rerun:
        """Run the example on its original devices. It can run there, so any error is a failure."""
        trial = self._try(usual)
        return dataclasses.replace(trial, failed=trial.failed or trial.refused, refused=False)

    def _try_until_it_fails(self, devices: tuple[int, ...], most: int) -> Rerun:
        """Run the example on these devices, up to `most` times until it fails: a flaky example may pass at first."""
        trial = self._try(devices)
        for _ in range(most - 1):
            if trial.failed or trial.refused:
                break
            trial = self._try(devices)
        return trial

    def _takes_part(self) -> int:
        """Return the number of devices named in the arguments of the example; all devices if it names none."""
        named = {int(index) for index in _PLACE.findall(repr(self._failed.kwargs))}
        return len(named) or len(self._all)

    def _movable(self) -> bool:
        """Return whether the example can run on other devices."""
        if len(self._all) < 2 or self._session.settings.per_host:
            return False
        return (
            self._count is not None or "ranks" in self._failed.kwargs or bool(_PLACE.search(repr(self._failed.kwargs)))
        )

    def _elsewhere(self, size: int, usual: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the devices for further trials: each alone, fewer, in rotated order, and all but one."""
        everything = len(self._all)
        turned = [tuple((device + by) % everything for device in usual) for by in range(1, everything)]
        if self._count is None:
            return turned
        found: list[tuple[int, ...]] = [(device,) for device in self._all] if self._least == 1 else []
        found += [self._all[:fewer] for fewer in range(max(2, self._least), size)]
        found += turned
        if everything > max(2, self._least) and size == everything:
            found += [tuple(other for other in self._all if other != one) for one in self._all]
        return list(dict.fromkeys(devices for devices in found if devices != usual))

    def _try(self, devices: tuple[int, ...]) -> Rerun:
        if time.monotonic() > self._until:
            raise _OutOfTime
        kwargs = dict(self._failed.kwargs)
        named = self._count is None and "ranks" not in kwargs
        if self._count is not None:
            kwargs[self._count] = len(devices)
        if "ranks" in kwargs:
            kwargs["ranks"] = _OnDevices(self._session, devices)
        elif named:
            kwargs = {name: _moved(value, devices) for name, value in kwargs.items()}
        elif "gpus" in kwargs:
            kwargs["gpus"] = protocol.Placeholder("gpus", order=devices)
        took = self._named(kwargs) if named else devices
        try:
            self._body(*self._failed.args, **kwargs)
        except RankHang:
            self._until = 0.0  # stop, because each further trial could hang as long
            return Rerun(took, True)
        except Exception as error:
            if not self._is_finding(error):
                return Rerun(took, False, refused=True)
            ranks = tuple(rank for rank in getattr(error, "ranks", ()) if isinstance(rank, int))
            cause = getattr(error.__cause__, "ranks", ()) if isinstance(error, RankFailure) else ()
            return Rerun(took, True, ranks if "ranks" in kwargs else tuple(cause))
        return Rerun(took, False)

    def _is_finding(self, error: Exception) -> bool:
        """Return whether an error is a failure of the check, not a sign that the check cannot run on these devices."""
        kind = _kind_of(error)
        return not isinstance(error, StartupFailure) and (issubclass(kind, AssertionError) or kind is self._kind)

    def _named(self, kwargs: Mapping[str, Any]) -> tuple[int, ...]:
        named = {name: value for name, value in kwargs.items() if name != "gpus"}
        return tuple(dict.fromkeys(int(index) for index in _PLACE.findall(repr(named))))


def _kind_of(error: object) -> type:
    """Return the class of an error; for a `RankFailure`, that of the error on the rank."""
    return type((isinstance(error, RankFailure) and error.__cause__) or error)


def _moved(value: Any, devices: Sequence[int]) -> Any:
    """Return a plain value with each ``cuda:i`` in it replaced by ``cuda:<devices[i]>``."""
    if isinstance(value, str):
        return _PLACE.sub(lambda found: f"cuda:{devices[int(found[1]) % len(devices)]}", value)
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_moved(one, devices) for one in value)
    if isinstance(value, dict):
        return {name: _moved(one, devices) for name, one in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, protocol.Placeholder)):
        changed = {field.name: _moved(getattr(value, field.name), devices) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: one for name, one in changed.items() if one != getattr(value, name)})
    return value
