"""The pool of warm worlds and node processes, which runs calls and resets the processes between tests. It keeps as
many worlds warm as the devices allow.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from mgpu_check.devices.inventory import Inventory, Mask, Masks, Slot, slots_for, take_inventory
from mgpu_check.engine.failures import NODE
from mgpu_check.engine.launcher import Launcher
from mgpu_check.engine.rank_side.rank import with_rank
from mgpu_check.engine.world import Begun, Function, World, call_context, pickled_arguments, pickled_function
from mgpu_check.engine.world_processes import send_rest
from mgpu_check.errors import AgentLost, RankFailure, RankHang, StartupFailure
from mgpu_check.processes import channel, pickling
from mgpu_check.processes.environments import OwnEnvironment, own_environment

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
    """The properties that identify a world."""

    slots: tuple[Slot, ...]  # of its ranks, in rank order; empty for a node process
    visible: tuple[Slot, ...]  # the slots whose devices its processes see, on all of its hosts
    backend: str | None  # of its default process group; None for the default backend
    environment: OwnEnvironment = ()  # variables that its processes have from their start

    @property
    def occupied(self) -> tuple[Slot, ...]:
        """The slots of the devices that may hold a context of this world."""
        return self.slots or self.visible


class WarmWorlds:
    """The warm worlds by their key, the least recently used first.

    `RankPool` makes one, takes a world from it for each call, and keeps it here again. A world ends when it is broken,
    when others need its room, or with the pool.

    `real`: whether they are on real devices, which share their memory and may refuse a second process. `memory`:
    returns the bytes of the smallest device, None while unknown.
    """

    def __init__(self, launcher: Launcher, real: bool, memory: Callable[[], int | None]) -> None:
        self._launcher, self._real, self._memory = launcher, real, memory
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

    def let_go(self, key: WorldKey) -> None:
        self._worlds.pop(key).discard()

    def make_room(self, key: WorldKey, slots: int, in_use: set[WorldKey]) -> None:
        """End the least recently used worlds, those `in_use` last, if a new world would make too many processes."""
        wanted, most = max(len(key.slots), 1), max(_LEAST_KEPT, _KEPT_PER_DEVICE * slots)
        for kept_key in list(self._worlds):
            if wanted + sum(len(world.processes) for world in self._worlds.values()) <= most:
                break
            if kept_key not in in_use:
                self.let_go(kept_key)
        if self._real:
            memory = self._memory() or _UNKNOWN_MEMORY
            most = 1 if self._alone else max(_LEAST_PROCESSES, memory // _SHARE // _BYTES_OF_PROCESS)
            for slot in key.occupied:
                beside = [kept_key for kept_key in self._worlds if slot in kept_key.occupied]
                for kept_key in sorted(beside[: max(0, len(beside) + 1 - most)], key=in_use.__contains__):
                    self._worlds[kept_key].check_alive("while no call used it")
                    self.let_go(kept_key)
            self.await_exits()

    def clear_devices(self, key: WorldKey) -> bool:
        """End all worlds on the devices of `key`, and return whether there were any.
        A device in compute mode exclusive-process, or with full memory, refuses a second process. If there were any
        worlds, devices hold one process at a time from now on."""
        if not self._real:
            return False
        beside = [kept_key for kept_key in self._worlds if set(kept_key.occupied) & set(key.occupied)]
        for kept_key in beside:
            self.let_go(kept_key)
        self._alone |= bool(beside)
        self.await_exits()
        return bool(beside)

    def await_exits(self) -> list[int]:
        """Wait until killed processes have ended and freed their memory, and return those that still have not.
        Only real devices need this: the exit takes seconds there, and other worlds use the devices next."""
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


_LONGEST_GROUP_TIMEOUT = 1e8  # seconds
_AFTER_A_HANG = 1.0  # seconds for calls beside a hanging one to send their answers: their timeout has passed, too

Hear = Callable[[Mapping[int, Sequence[tuple[str, Any]]]], None]
"""Receives the messages that each rank reported in a call: see `worker.tell`."""


class RankPool:
    """Warm ranks of every world size up to `devices`, and the node process, each started on its first use.

    `GpuSession` makes one in a run with GPUs. The fixture `ranks` and `execution` call it; `begin_test` and `end_test`
    enclose each test, and reset or replace its worlds. `close` ends all processes, at the end of the run.

    Args:
        slots: where ranks can run; a number means that many devices of this machine.
        simulate: backing device of the simulated node, or None on real devices.
        wrap: wraps every function before it is sent; the wrapper must be picklable by reference.
        masks: returns the mask that restricts a process to its real devices.
        memory: returns the bytes of the smallest real device, None while unknown.
        hear: receives the messages that ranks reported in a call, before the call returns or raises.
    """

    def __init__(
        self,
        launcher: Launcher,
        slots: int | Sequence[Slot],
        simulate: str | None,
        timeout: float,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
        masks: Masks = lambda slots: Mask(),
        memory: Callable[[], int | None] = lambda: None,
        hear: Hear = lambda messages: None,
    ) -> None:
        self.timeout, self.wrap, self.masks, self.hear = timeout, wrap, masks, hear
        self.sizes: set[int] = set()
        self._lock = threading.RLock()  # calls from several threads wait for each other
        self._launcher, self._simulate = launcher, simulate
        self._worlds = WarmWorlds(launcher, simulate is None, memory)
        self._used: set[WorldKey] = set()
        self._made = 0
        self._functions = 0
        self.set_slots(slots)

    def set_slots(self, slots: int | Sequence[Slot]) -> None:
        """Replace the slots; a number means that many devices of this machine."""
        self.slots = tuple(Slot(0, index) for index in range(slots)) if isinstance(slots, int) else tuple(slots)
        self.available = self.slots

    @property
    def devices(self) -> int:
        """The number of devices that the current test may use, which is the largest world size."""
        return len(self.available)

    def start(self) -> None:
        self._launcher.start()

    def function(self, function: Callable[..., Any], reused: bool = False) -> Function:
        """Pickle `function`, by value if another process cannot import it; see `sending.pickled_function`."""
        self._functions += 1
        return pickled_function(function, self.wrap(function), str(self._functions), reused)

    def run(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        size: int | None = None,
        timeout: float | None = None,
        devices: Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank of a world of `size` ranks, and return the results in rank order.

        The fixture `ranks` describes the arguments and errors, see `mgpu_check.plugin.ranks.Ranks.run`. A size that was
        used before starts no new processes.
        """
        try:
            slots_for(size, self.available, devices)
            own_environment(environment)
        except ValueError as error:
            raise ValueError(f"ranks.run: {error}") from None
        args, kwargs = with_rank(fn, args, kwargs)
        size = self.devices if size is None else size
        return self.call(
            self.function(fn), args, kwargs, size=size, timeout=timeout, devices=devices, environment=environment
        )

    def run_apart(
        self, fn: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], *, timeout: float | None = None
    ) -> list[Any]:
        """Call ``fn(*args)`` for each of `arguments` at once, call ``i`` in its own world of size 1 on device ``i``.
        `arguments`: the `args` of each call, for at most `devices` calls. `timeout`: seconds for each call, as in
        `run`. Returns one result per call, in the order of `arguments`."""
        timeout = self._seconds(timeout)
        function = self.function(fn)
        begun: list[tuple[World, Begun]] = []
        results: list[Any] = []
        errors: list[BaseException] = []
        refused: list[BaseException] = []  # of the call that could not begin, after the calls in `begun`
        with self._lock:
            for index, args in enumerate(arguments):
                try:
                    begun.append(self._begin(self._key(1, None, 0, [index]), function, *with_rank(fn, args, {})))
                except (Exception, RankHang) as error:
                    refused.append(error)
                    break
            send_rest([process for world, _ in begun for process in world.processes.values()], timeout)
            for world, call in begun:
                try:
                    results += self._finish(world, call, timeout)
                except (Exception, RankHang) as error:  # wait for the other calls
                    errors.append(error)
                    timeout = min(timeout, _AFTER_A_HANG) if isinstance(error, RankHang) else timeout
        if failed := errors + refused:
            raise failed[0]
        return results

    def run_in_node_process(
        self, fn: Callable[..., Any], /, *args: Any, host: int = 0, timeout: float | None = None
    ) -> list[Any]:
        """Call ``fn(*args)`` in the node process of `host`, and return ``[result]``. Raises the errors of `run`."""
        return self.call(self.function(fn), args, {}, size=0, timeout=timeout, host=host)

    def call(
        self,
        function: Function,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        size: int,
        backend: str | None = None,
        timeout: float | None = None,
        host: int = 0,
        devices: Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Run a pickled function as `run` does; `size` 0 means the node process of `host`.
        `devices`: as in `run`; if given, their number overrides `size`."""
        timeout = self._seconds(timeout)
        with self._lock:
            key = self._key(size, backend, host, devices, environment)
            return self._finish(*self._begin(key, function, args, kwargs), timeout)

    def _seconds(self, timeout: float | None) -> float:
        timeout = self.timeout if timeout is None else timeout
        if not 0 < timeout < math.inf:
            raise ValueError(f"timeout={timeout!r} is not valid; choose a finite number of seconds above 0")
        return timeout

    def _begin(
        self, key: WorldKey, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[World, Begun]:
        arguments = pickled_arguments(function.name, args, kwargs)
        world = self._world(key)
        if key.slots:
            self.sizes.add(len(key.slots))
        return world, world.begin(function, arguments, self._call_context(self._simulate))

    def _finish(self, world: World, call: Begun, timeout: float) -> list[Any]:
        try:
            results = world.finish(call, timeout)
        finally:
            if world.messages:
                self.hear(world.messages)
        return [world.loaded(index, result) for index, result in enumerate(results)]

    def in_fresh_process(self, fn: Callable[[], Any], host: int = 0) -> Any:
        """Call `fn` in a new process on a host, without simulation or device masks, and return its result."""
        world = self._new_world(WorldKey((), (Slot(host, 0),), None), simulate=None, masked=False)
        try:
            function = self.function(fn)
            (result,) = world.run(function, pickling.dumps(((), {})), self._call_context(None), 300.0)
            return pickling.loads_apart(result)
        finally:
            world.discard()

    def prepare(self, size: int, backend: str | None = None, host: int = 0) -> None:
        """Start the world of `size` (0: the node process of `host`) now, outside the measured time of a test."""
        with self._lock:
            self._world(self._key(size, backend, host))

    def _key(
        self,
        size: int,
        backend: str | None,
        host: int,
        devices: Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> WorldKey:
        slots = slots_for(None if devices else size, self.available, devices) if size else ()
        hosts = {slot.host for slot in slots} or {host}
        visible = tuple(slot for slot in self.available if slot.host in hosts)
        return WorldKey(slots, visible, backend, own_environment(environment))

    def _world(self, key: WorldKey) -> World:
        world = self._worlds.take(key)
        if world is None:
            self._worlds.make_room(key, len(self.slots), self._used)
            try:
                world = self._new_world(key, self._simulate)
            except StartupFailure:
                if not self._worlds.clear_devices(key):
                    raise
                world = self._new_world(key, self._simulate)
        self._worlds.keep(key, world)
        if key not in self._used:
            self._used.add(key)
            world.mark_output()
        return world

    def _new_world(self, key: WorldKey, simulate: str | None, masked: bool = True) -> World:
        self._made += 1
        store = self._launcher.store(f"world-{self._made}")
        context = self._call_context(simulate)
        slots = key.slots or key.visible[:1]
        hosts = sorted({slot.host for slot in slots})

        def spec_of(index: int) -> channel.RankSpec:
            rank = None if index == NODE else index
            slot = slots[rank or 0]
            visible_on_host = [other_slot for other_slot in key.visible if other_slot.host == slot.host]
            beside = [other_slot for other_slot in slots if other_slot.host == slot.host]
            node_index, local_index = hosts.index(slot.host), beside.index(slot)
            device, devices = (
                (visible_on_host.index(slot), len(visible_on_host))
                if simulate
                else self._launcher.binding(slot, visible_on_host)
            )
            environment = dict(key.environment) | {
                "RANK": str(rank or 0),
                "LOCAL_RANK": str(local_index),
                "GROUP_RANK": str(node_index),
                "WORLD_SIZE": str(len(slots)),
                "LOCAL_WORLD_SIZE": str(len(beside)),
                "GROUP_WORLD_SIZE": str(len(hosts)),
            }
            if simulate and self._launcher.host_name(slot.host):
                environment["NCCL_HOSTID"] = str(slot.host)  # the hosts of a simulated run may be one machine
            if simulate is None and "TORCH_NCCL_RETHROW_CUDA_ERRORS" not in context.environment | environment:
                # Torch's watchdog would end a process 0.1 s after a kernel of it fails: it rethrows errors of CUDA by
                # default (ProcessGroupNCCL.hpp, TORCH_NCCL_RETHROW_CUDA_ERRORS, torch 2.13). Ranks synchronize their
                # devices after each call instead: the error is reported with its site, and the process is replaced.
                environment["TORCH_NCCL_RETHROW_CUDA_ERRORS"] = "0"
            mask = self.masks(visible_on_host) if masked and simulate is None else Mask()
            environment.update(mask.environment)
            return channel.RankSpec(
                index=rank,
                size=len(slots),
                local_index=local_index,
                node_index=node_index,
                device=device,
                devices=devices,
                simulate=simulate,
                backend=key.backend,
                store=store,
                group_timeout=min(_LONGEST_GROUP_TIMEOUT, max(1800.0, 10 * self.timeout)),
                # DataParallel runs a thread per device in the node process, which gets the threads of one rank.
                threads=max(1, (os.cpu_count() or 1) // (len(beside) if key.slots else len(visible_on_host))),
                call_context=context,
                own_environment=environment,
                uuids=mask.uuids,
            )

        return World(self._launcher, spec_of, range(len(slots)) if key.slots else [NODE], slots, self.timeout)

    def _call_context(self, simulate: str | None) -> channel.CallContext:
        return self._launcher.call_context(call_context(simulate))

    def begin_test(self, available: Sequence[Slot] | None = None) -> None:
        """Reset what is recorded per test. The new test may use the slots `available`, by default all."""
        self.available = self.slots if available is None else tuple(available)
        self.sizes = set()
        self._used = set()

    def end_test(self, failed: bool) -> list[str]:
        """Reset the ranks for the next test, and return a line for each change of this test that cannot be undone."""
        leftovers: list[str] = []
        errors: list[BaseException] = []
        with self._lock:
            for key, world in self._worlds:
                if key not in self._used:
                    continue
                try:
                    leftovers += world.end_test()
                    if world.messages:
                        self.hear(world.messages)
                except BaseException as error:
                    errors.append(error)
                if failed or world.broken:
                    self._worlds.let_go(key)
            self._used = set()
            if still := self._worlds.await_exits():
                leftovers.append(
                    f"processes that do not end, and hold memory of its devices: {', '.join(map(str, still))}"
                )
        if errors:
            raise errors[0]
        return leftovers

    def died_idle(self, after: str = "") -> list[str]:
        """Discard each world that lost a process while no test used it, and return a text for each."""
        lines = [f"{loss} while no test used it{after}" for loss in self._launcher.losses()]
        for key, world in self._worlds:
            try:
                world.check_idle("while no test used it", after)
            except AgentLost:
                self._worlds.let_go(key)  # `losses` has reported it once, though it may end many worlds
            except AssertionError as error:
                lines.append(str(error))
                self._worlds.let_go(key)
        return lines

    def explain(self, error: BaseException) -> None:
        """Replace the text of a failure by a fuller explanation from the ranks that have just raised it."""
        for _, world in self._worlds:
            world.explain(error)

    def stopped(self) -> BaseException | None:
        """Return an error with the places of the ranks, if an outside event interrupted a call; otherwise None."""
        return next(filter(None, [world.stopped() for _, world in self._worlds]), None)

    def output(self) -> list[tuple[str, str, str]]:
        return [entry for key, world in self._worlds if key in self._used for entry in world.output()]

    def close(self) -> None:
        self._worlds.close()
        self._launcher.close()


def devices_of_host(pool: RankPool, host: int = 0) -> Inventory:
    """Take the inventory of a host's GPUs in a separate process, because a driver may hang or crash."""
    try:
        inventory: Inventory = pool.in_fresh_process(take_inventory, host)
    except AgentLost:
        raise
    except (RankFailure, RankHang) as error:
        headline = str(error).splitlines()[0]
        return Inventory((), f"the GPUs of this machine cannot be listed: {headline}\n  does nvidia-smi answer?")
    return inventory
