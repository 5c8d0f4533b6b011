"""Links that deliver wrong data."""

from __future__ import annotations

import abc
from collections.abc import Callable

import torch

from mgpu_check.simulated.defects.chance import SPOIL, Chance
from mgpu_check.simulated.defects.parameters import Parameters
from mgpu_check.simulated.hardware import Copy, Defect

_TAIL = 1000


def _zeros(data: torch.Tensor, chance: Chance) -> None:
    data.zero_()


def _offset(data: torch.Tensor, chance: Chance) -> None:
    data.copy_(data.roll(64 if data.numel() > 64 else 1))


def _tail(data: torch.Tensor, chance: Chance) -> None:
    tail = data[-min(_TAIL, data.numel() // 2 + 1) :]
    tail ^= 0x5A


def _half(data: torch.Tensor, chance: Chance) -> None:
    data[data.numel() // 2 :] = 0


def _words(pattern: str) -> Callable[[torch.Tensor, Chance], None]:
    def spoil(data: torch.Tensor, chance: Chance) -> None:
        words = data[: data.numel() // 4 * 4].view(torch.int32) if data.numel() >= 4 and _aligned(data) else data
        SPOIL[pattern](words if words is not data else data.view(torch.int8), chance.random)

    return spoil


def _aligned(data: torch.Tensor) -> bool:
    return data.storage_offset() % 4 == 0


_SPOIL: dict[str, Callable[[torch.Tensor, Chance], None]] = {
    "zeros": _zeros,
    "offset": _offset,
    "tail": _tail,
    "half": _half,
    "bit": _words("bit"),
    "lane": _words("lane"),
}


class _Spoiled(Defect, abc.ABC):
    """Some copies deliver wrong data, of the kind `what` in `_SPOIL`. Its parameters select the copies."""

    def __init__(self, parameters: Parameters, what: str = "zeros") -> None:
        self.parameters = parameters
        self.chance = Chance(parameters)
        self._spoil = _SPOIL[what]

    @abc.abstractmethod
    def concerns(self, copy: Copy) -> bool:
        """Return whether a copy uses the defective link."""

    def copied(self, copy: Copy) -> None:
        given = self.parameters
        if (
            self.concerns(copy)
            and copy.data.numel() > int(given.get("above", 0))
            and given.get("path", "any") in ("any", copy.path)
            and copy.load >= int(given.get("load", 0))
            and self.chance.now()
        ):
            self.spoil(copy)

    def spoil(self, copy: Copy) -> None:
        """Change the delivered data."""
        self._spoil(copy.data, self.chance)


class Link(_Spoiled):
    """The link from ``device`` to ``peer``."""

    def concerns(self, copy: Copy) -> bool:
        return (copy.source, copy.target) == (self.parameters["device"], self.parameters["peer"])


class Stale(Link):
    """Leave the old content of the memory. If it was new, deliver the previous data of the link, or zeros."""

    _last: torch.Tensor | None = None

    def spoil(self, copy: Copy) -> None:
        arrived = copy.data.clone()
        stale = copy.before if copy.before is not None else self._last
        if stale is None:
            copy.data.zero_()
        else:
            size = min(stale.numel(), copy.data.numel())
            copy.data[:size] = stale[:size]
        self._last = arrived


class Wrapping(Link):
    """Copies that land ``reach`` bytes or more into an allocation arrive ``reach`` bytes in front of their place."""

    def spoil(self, copy: Copy) -> None:
        reach = int(self.parameters["reach"])
        if copy.before is None or copy.before.storage_offset() < reach:
            return
        size, offset = copy.data.numel(), copy.before.storage_offset() - reach
        copy.before.as_strided((size,), (1,), offset).copy_(copy.data)
        copy.data.copy_(copy.before)


class AnotherPeer(Link):
    """Deliver the last data that another peer sent to the same device, or zeros."""

    _other: torch.Tensor | None = None

    def copied(self, copy: Copy) -> None:
        given = self.parameters
        if copy.target == given["peer"] and copy.source not in (None, given["device"]):
            self._other = copy.data.clone()
        super().copied(copy)

    def spoil(self, copy: Copy) -> None:
        if self._other is None:
            copy.data.zero_()
        else:
            size = min(self._other.numel(), copy.data.numel())
            copy.data[:size] = self._other[:size]


class Egress(_Spoiled):
    """All links from ``device`` to other devices, but not to the host: its own port is at fault."""

    def concerns(self, copy: Copy) -> bool:
        return copy.source == self.parameters["device"] and copy.target is not None


class HostLink(_Spoiled):
    """The link between the host and ``device``.

    Parameters: memory ("pinned", "pageable", "any").
    """

    def __init__(self, parameters: Parameters, what: str, upload: bool = False, download: bool = False) -> None:
        super().__init__(parameters, what)
        self._upload, self._download = upload, download

    def concerns(self, copy: Copy) -> bool:
        device = self.parameters["device"]
        there = (self._upload and (copy.source, copy.target) == (None, device)) or (
            self._download and (copy.source, copy.target) == (device, None)
        )
        return there and self.parameters.get("memory", "any") in ("any", "pinned" if copy.pinned else "pageable")
