"""Keep worlds warm between calls, as many as the devices allow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait

from mgpu_check.devices.placement import Slot
from mgpu_check.engine.launcher import Launcher
from mgpu_check.engine.own_environment import OwnEnvironment
from mgpu_check.engine.world import World

# Processes of idle worlds to keep. A property that draws the world size returns to each size all the time.
_LEAST_KEPT, _KEPT_PER_DEVICE = 64, 4

# On real devices the context and communicators of a process take half a GiB or more. All processes together may take an
# eighth of the memory.
_BYTES_OF_PROCESS = 640 << 20
_SHARE = 8
_LEAST_PROCESSES = 2
_UNKNOWN_MEMORY = 16 << 30

_EXIT_TIMEOUT = 10.0  # seconds: a killed process with a device context takes seconds to end


@dataclass(frozen=True)
class WorldKey:
    """The properties that identify a world.

    Attributes:
        slots: of its ranks, in rank order; empty for a node process.
        visible: the slots whose devices its processes see, on all of its hosts.
        backend: of its default process group; None for the default backend.
        environment: variables that its processes have from their start.
    """

    slots: tuple[Slot, ...]
    visible: tuple[Slot, ...]
    backend: str | None
    environment: OwnEnvironment = ()

    @property
    def occupied(self) -> tuple[Slot, ...]:
        """The slots of the devices that may hold a context of this world."""
        return self.slots or self.visible


class WarmWorlds:
    """The warm worlds by their key, the least recently used first.

    Args:
        real: whether they are on real devices, which share their memory and may refuse a second process.
        memory: returns the bytes of the smallest device, None while unknown.
    """

    def __init__(self, launcher: Launcher, real: bool, memory: Callable[[], int | None]) -> None:
        self._launcher = launcher
        self._real = real
        self._memory = memory
        self._worlds: dict[WorldKey, World] = {}
        self._alone = False
        """Set once a device has refused a second process."""

    def __iter__(self) -> Iterator[tuple[WorldKey, World]]:
        return iter(list(self._worlds.items()))

    def take(self, key: WorldKey) -> World | None:
        """Remove and return the world of a key; None if there is no usable world."""
        world = self._worlds.pop(key, None)
        if world is not None and world.broken:
            world.discard()
            return None
        return world

    def keep(self, key: WorldKey, world: World) -> None:
        self._worlds[key] = world

    def get(self, key: WorldKey) -> World | None:
        return self._worlds.get(key)

    def let_go(self, key: WorldKey) -> None:
        self._worlds.pop(key).discard()

    def make_room(self, key: WorldKey, slots: int, used: set[WorldKey]) -> None:
        """End the least recently used worlds if a new world would make too many processes.

        Args:
            used: worlds of the current test. They end only if a real device has no room otherwise.
        """
        wanted, most = max(len(key.slots), 1), max(_LEAST_KEPT, _KEPT_PER_DEVICE * slots)
        for other in list(self._worlds):
            if wanted + sum(len(world.processes) for world in self._worlds.values()) <= most:
                break
            if other not in used:
                self.let_go(other)
        if self._real:
            most = 1 if self._alone else _most_on_device(self._memory())
            for slot in key.occupied:
                beside = [other for other in self._worlds if slot in other.occupied]
                for other in sorted(beside[: max(0, len(beside) + 1 - most)], key=lambda other: other in used):
                    self._worlds[other].check_alive("while no call used it")
                    self.let_go(other)
            self.await_exits()

    def clear_devices(self, key: WorldKey) -> bool:
        """End all worlds on the devices of `key`, and return whether there were any.

        A device in compute mode exclusive-process, or with full memory, refuses a second process. If there were any
        worlds, devices hold one process at a time from now on.
        """
        if not self._real:
            return False
        beside = [other for other in self._worlds if set(other.occupied) & set(key.occupied)]
        for other in beside:
            self.let_go(other)
        self._alone |= bool(beside)
        self.await_exits()
        return bool(beside)

    def await_exits(self) -> list[int]:
        """Wait until killed processes have ended and freed their memory, and return those that still have not.

        Only real devices need this: the exit takes seconds there, and other worlds use the devices next.
        """
        if not self._real:
            return []
        deadline = time.monotonic() + _EXIT_TIMEOUT
        while (ending := self._launcher.ending()) and wait(
            self._launcher.waitables(), max(0.0, deadline - time.monotonic())
        ):
            self._launcher.collect()
        return ending

    def close(self) -> None:
        for key in list(self._worlds):
            self.let_go(key)


def _most_on_device(memory: int | None) -> int:
    return max(_LEAST_PROCESSES, (memory or _UNKNOWN_MEMORY) // _SHARE // _BYTES_OF_PROCESS)
