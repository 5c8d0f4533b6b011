"""Run an example of the packaged suite that has failed again: as it was, on each device alone, in smaller worlds, and with
the devices in another order.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from mgpu_check.errors import RankFailure, RankHang, StartupFailure
from mgpu_check.processes import protocol
from mgpu_check.pytest_plugin.ranks import Ranks
from mgpu_check.pytest_plugin.report.example import draws_on
from mgpu_check.pytest_plugin.report.suspects import Seen, Trial
from mgpu_check.pytest_plugin.requirements import Needs
from mgpu_check.pytest_plugin.session import GpuSession

__all__ = ["Failed", "is_packaged", "look_again"]

_REPEATS = 20
_SECONDS = {"quick": 5.0, "standard": 20.0, "long": 120.0}
"""Of one second look. A run has four times as long for all of them."""
_COUNTS = ("size", "devices")
"""Arguments of a check that say how many ranks or devices take part."""
_PLACE = re.compile(r"cuda:(\d+)")


@dataclass(frozen=True)
class Failed:
    """An example that has failed: what was called, with what."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def is_packaged(item: pytest.Item) -> bool:
    """Return whether a test is a check of the packaged suite."""
    return getattr(getattr(item, "module", None), "__name__", "").startswith("mgpu_check.suite.")


def look_again(body: Callable[..., Any], failed: Failed, needs: Needs, session: GpuSession, error: object) -> Seen:
    """Run the example again, and return what was seen; nothing where ranks do not come up, or hang, nor of an example that
    draws while it runs, which it can once only.
    """
    if any(map(draws_on, failed.kwargs.values())) or isinstance(error, (RankHang, StartupFailure)):
        return Seen()
    return _Second(body, failed, needs, session, error).look()


class _OutOfTime(Exception):
    pass


class _OnDevices(Ranks):
    """The fixture `ranks` on some of the devices, in an order of its own."""

    def __init__(self, session: GpuSession, devices: Sequence[int]) -> None:
        super().__init__(session)
        self._devices = tuple(devices)

    @property
    def size(self) -> int:
        return len(self._devices)

    def run(self, fn: Callable[..., Any], /, *args: Any, size: int | None = None, **kwargs: Any) -> list[Any]:
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

    def look(self) -> Seen:
        seen = Seen()
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
            seen.notes.append("the time for a second look was over: --gpu-level=long has more")
        finally:
            self._session.looked += time.monotonic() - self._began
        return seen

    def _as_it_was(self, usual: tuple[int, ...]) -> Trial:
        """Run the example on the devices that it had: there it can run, so that any error is a failure."""
        trial = self._try(usual)
        return dataclasses.replace(trial, failed=trial.failed or trial.refused, refused=False)

    def _try_until_it_fails(self, devices: tuple[int, ...], most: int) -> Trial:
        """Run the example on these devices; again where it passes, as that says little of one that passes at times."""
        trial = self._try(devices)
        for _ in range(most - 1):
            if trial.failed or trial.refused:
                break
            trial = self._try(devices)
        return trial

    def _takes_part(self) -> int:
        """Return how many devices the example names, where it does not count them; all of them where it names none."""
        named = {int(index) for index in _PLACE.findall(repr(self._failed.kwargs))}
        return len(named) or len(self._all)

    def _movable(self) -> bool:
        """Return whether the example can be had on other devices."""
        if len(self._all) < 2 or self._session.settings.per_host:
            return False
        return (
            self._count is not None or "ranks" in self._failed.kwargs or bool(_PLACE.search(repr(self._failed.kwargs)))
        )

    def _elsewhere(self, size: int, usual: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return on which devices to try the example: alone, fewer, turned round, and each left out in turn."""
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

    def _try(self, devices: tuple[int, ...]) -> Trial:
        """Run the example on these devices."""
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
            self._until = 0.0  # each more would take as long
            return Trial(took, True)
        except Exception as error:
            if not self._is_finding(error):
                return Trial(took, False, refused=True)
            ranks = tuple(rank for rank in getattr(error, "ranks", ()) if isinstance(rank, int))
            cause = getattr(error.__cause__, "ranks", ()) if isinstance(error, RankFailure) else ()
            return Trial(took, True, ranks if "ranks" in kwargs else tuple(cause))
        return Trial(took, False)

    def _is_finding(self, error: Exception) -> bool:
        """Return whether an error is a finding, or what was raised at first: others say that the check cannot run there."""
        kind = _kind_of(error)
        return not isinstance(error, StartupFailure) and (issubclass(kind, AssertionError) or kind is self._kind)

    def _named(self, kwargs: Mapping[str, Any]) -> tuple[int, ...]:
        named = {name: value for name, value in kwargs.items() if name != "gpus"}
        return tuple(dict.fromkeys(int(index) for index in _PLACE.findall(repr(named))))


def _kind_of(error: object) -> type:
    """Return the class of what was raised, on a rank if it was there."""
    return type((isinstance(error, RankFailure) and error.__cause__) or error)


def _moved(value: Any, devices: Sequence[int]) -> Any:
    """Return a plain value with each device that it names replaced by that of the same place in `devices`."""
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
