"""How many ranks or devices, and which ones: drawn up to the number that the run was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hypothesis import strategies as st

from mgpu_check import settings

__all__ = ["all_devices", "all_pairs", "device_counts", "device_pairs", "places", "world_sizes"]

T = TypeVar("T")


def _devices() -> int:
    return settings.active().gpus or 0


@st.composite
def _when_drawn(draw: st.DrawFn, make: Callable[[], st.SearchStrategy[T]]) -> T:
    """Draw from what `make` gives now: `st.deferred` would keep the first answer for good."""
    return draw(make())


def _up_to(least: int, most: int | None, argument: str) -> st.SearchStrategy[int]:
    available = _devices()
    if least > available:
        raise ValueError(
            f"{argument}: at least {least} were asked for, but the run has {available} (--gpus={available}); "
            f"give it more with --gpus={least}"
        )
    return st.integers(least, available if most is None else min(most, available))


def world_sizes(least: int = 1, most: int | None = None) -> st.SearchStrategy[int]:
    """World sizes from `least` to the number of devices of the run (or `most`, if that is less).

    The number of devices is read when an example is drawn, so a module may hold the strategy before options are known.

    Raises:
        ValueError: when drawn, if the run has fewer than `least` devices.
    """
    return _when_drawn(lambda: _up_to(least, most, "world_sizes"))


def device_counts(least: int = 1, most: int | None = None) -> st.SearchStrategy[int]:
    """Numbers of devices to spread work over, like `world_sizes`."""
    return _when_drawn(lambda: _up_to(least, most, "device_counts"))


def all_devices() -> st.SearchStrategy[int]:
    """The number of devices of the run."""
    return _when_drawn(lambda: st.just(_devices()))


def places(*, cpu: bool = True) -> st.SearchStrategy[str]:
    """One place for a tensor: "cpu" (unless `cpu` is false), "cuda:0", … as far as the run has devices."""
    return _when_drawn(lambda: st.sampled_from(_places(cpu)))


def device_pairs(*, cpu: bool = True) -> st.SearchStrategy[tuple[str, str]]:
    """Two different places, in either order.

    Raises:
        ValueError: when drawn, if there are no two: one device, and `cpu` is false.
    """
    return _when_drawn(lambda: st.sampled_from(all_pairs(cpu=cpu)))


def _places(cpu: bool) -> list[str]:
    return ["cpu"] * cpu + [f"cuda:{index}" for index in range(_devices())]


def all_pairs(*, cpu: bool = True) -> list[tuple[str, str]]:
    """All that `device_pairs` can draw in this run."""
    found = [(first, second) for first in _places(cpu) for second in _places(cpu) if first != second]
    if not found:
        raise ValueError("device_pairs: cpu=False needs two devices, but the run has 1 (--gpus=1); give it more")
    return found
