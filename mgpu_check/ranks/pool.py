"""The pool: warm worlds by size, the node process, and what keeps them fresh."""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import Any

from mgpu_check.ranks import protocol, transport
from mgpu_check.ranks.failures import NODE
from mgpu_check.ranks.launcher import Launcher
from mgpu_check.ranks.world import Function, World

__all__ = ["CannotTravel", "RankPool"]

# Idle worlds of other sizes are kept, because a property that draws the world size returns to them all the time.
_LEAST_KEPT, _KEPT_PER_DEVICE = 64, 4


class CannotTravel(TypeError):
    """A function, or an argument of a call, cannot be pickled."""


class RankPool:
    """Warm ranks of every world size up to `devices`, and the node process. Nothing starts before it is needed.

    Args:
        devices: how many devices there are; the largest world size.
        simulate: backing device of the simulated node, or None on real devices.
        timeout: seconds that a call gets where it does not say.
        wrap: put around every function before it is sent; must travel by reference.
    """

    def __init__(
        self,
        launcher: Launcher,
        devices: int,
        simulate: str | None,
        timeout: float,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
    ) -> None:
        self.devices = devices
        self.timeout = timeout
        self.wrap = wrap
        self.sizes: set[int] = set()
        self._lock = threading.RLock()  # calls from several threads wait for each other
        self._launcher = launcher
        self._simulate = simulate
        self._worlds: dict[tuple[int, str | None], World] = {}
        self._used: set[tuple[int, str | None]] = set()
        self._made = 0
        self._functions = 0
        self._directory: str | None = None

    def start(self) -> None:
        """Begin to come up, in the background."""
        self._launcher.start()

    def function(self, function: Callable[..., Any], reused: bool = False) -> Function:
        """Pickle `function`, by value where it cannot be imported elsewhere.

        Args:
            reused: it will be called many times in this test.

        Raises:
            CannotTravel: it, or something that it refers to, cannot be pickled.
        """
        name = getattr(function, "__name__", type(function).__name__)
        self._functions += 1
        try:
            return Function(str(self._functions), transport.dumps(self.wrap(function)), name, reused)
        except Exception as error:
            raise CannotTravel(
                f"{name} cannot run in another process: it refers to {_culprit_of(function) or error}; "
                "make files, locks, processes and the like inside of it"
            ) from error

    def run(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        size: int | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank of a world of `size` ranks.

        A parameter of `fn` called ``rank`` is given the `Rank`. Tensors on devices come back as CPU tensors.

        Args:
            size: world size, 1 to `devices`; default all. A size that was used before costs nothing to return to.
            timeout: seconds for all ranks to return; default ``--rank-timeout``.

        Returns:
            One result per rank, in rank order.

        Raises:
            RankFailure: a rank raised. RankDied: a process ended. RankHang: not all returned in time.
            ValueError: a size or timeout out of range. TypeError: `fn` or an argument cannot be sent.
        """
        if size is None:
            size = self.devices
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= self.devices:
            raise ValueError(f"ranks.run: size={size!r} is not a world size of this run; choose 1 to {self.devices}")
        args, kwargs = _with_rank(fn, args, kwargs)
        return self.call(self.function(fn), args, kwargs, size=size, timeout=timeout)

    def call(
        self,
        function: Function,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        size: int,
        backend: str | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """As `run`, for a function that is pickled already; `size` 0 stands for the node process."""
        timeout = self.timeout if timeout is None else timeout
        if not timeout > 0:
            raise ValueError(f"timeout={timeout!r} is not valid; choose a number of seconds above 0")
        try:
            arguments = transport.dumps((args, dict(kwargs)))
        except Exception as error:
            raise CannotTravel(
                f"{function.name} cannot be called in another process: argument {_culprit(args, kwargs) or error}"
            ) from error
        with self._lock:
            world = self._world(size, backend)
            if size:
                self.sizes.add(size)
            results = world.run(function, arguments, _surroundings(self._simulate), timeout)
        return [transport.loads(result) for result in results]

    def in_fresh_process(self, fn: Callable[[], Any]) -> Any:
        """Call `fn` in a process of its own, on this machine as it is, without a simulated node; its result."""
        world = self._new_world(0, None, simulate=None)
        try:
            function = self.function(fn)
            arguments = transport.dumps(((), {}))
            (result,) = world.run(function, arguments, _surroundings(None), 300.0)
            return transport.loads(result)
        finally:
            world.discard()

    def prepare(self, size: int, backend: str | None = None) -> None:
        """Have the world of `size` (0: the node process) up, so that it does not count as time of a test."""
        with self._lock:
            self._world(size, backend)

    def _world(self, size: int, backend: str | None) -> World:
        key = (size, backend)
        world = self._worlds.pop(key, None)
        if world is not None and world.broken:
            world.discard()
            world = None
        if world is None:
            self._make_room(max(size, 1))
            world = self._new_world(size, backend, self._simulate)
        self._worlds[key] = world  # at the end: the order is that of the last use
        if key not in self._used:
            self._used.add(key)
            world.mark_output()
        return world

    def _make_room(self, wanted: int) -> None:
        most = max(_LEAST_KEPT, _KEPT_PER_DEVICE * self.devices)
        for key in list(self._worlds):
            if wanted + sum(len(world.processes) for world in self._worlds.values()) <= most:
                return
            if key not in self._used:
                self._worlds.pop(key).discard()

    def _new_world(self, size: int, backend: str | None, simulate: str | None) -> World:
        if self._directory is None:
            self._directory = tempfile.mkdtemp(prefix="mgpu-check-")
        self._made += 1
        store = os.path.join(self._directory, f"world-{self._made}")
        surroundings = _surroundings(simulate)

        def spec_of(index: int) -> protocol.RankSpec:
            rank = None if index == NODE else index
            return protocol.RankSpec(
                index=rank,
                size=max(size, 1),
                devices=self.devices,
                simulate=simulate,
                backend=backend,
                store=store,
                group_timeout=max(1800.0, 10 * self.timeout),
                # In the node process DataParallel has a thread for each device, as ranks are a process each.
                threads=max(1, (os.cpu_count() or 1) // (size or self.devices)),
                surroundings=surroundings,
                own_environment={
                    "RANK": str(rank or 0),
                    "LOCAL_RANK": str(rank or 0),
                    "WORLD_SIZE": str(max(size, 1)),
                    "LOCAL_WORLD_SIZE": str(max(size, 1)),
                },
            )

        return World(self._launcher, spec_of, range(size) if size else [NODE])

    def begin_test(self) -> None:
        """Start the account of a new test."""
        self.sizes = set()
        self._used = set()

    def end_test(self, failed: bool) -> list[str]:
        """Let the next test find fresh ranks; what this one left behind and could not be undone, in lines.

        Raises:
            RankDied: a rank died after it had done its part of the test.
        """
        left: list[str] = []
        errors: list[BaseException] = []
        with self._lock:
            for key in self._used & self._worlds.keys():
                world = self._worlds[key]
                try:
                    left += world.end_test()
                except BaseException as error:
                    errors.append(error)
                if failed or world.broken:
                    self._worlds.pop(key).discard()
            self._used = set()
        if errors:
            raise errors[0]
        return left

    def died_idle(self) -> list[str]:
        """A line for each world of which a process ended while no test used it. Those worlds are gone then."""
        lines = []
        for key, world in list(self._worlds.items()):
            try:
                world.check_alive("while no test used it")
            except AssertionError as error:
                lines.append(str(error))
                self._worlds.pop(key).discard()
        return lines

    def explain(self, error: BaseException) -> None:
        """Give a failure that ranks have just raised the best text that they can make of it."""
        for world in self._worlds.values():
            world.explain(error)

    def output(self) -> list[tuple[str, str, str]]:
        """What the processes of this test wrote: (process, "stdout" or "stderr", text), where there is any."""
        found = []
        for key, world in self._worlds.items():
            if key in self._used:
                for index, process in world.processes.items():
                    who = "node process" if index == NODE else f"rank {index} of {key[0]}"
                    for name in ("stdout", "stderr"):
                        if text := process.output(name):
                            found.append((who, name, text))
        return found

    def close(self) -> None:
        """End every process, and remove every file, of the pool."""
        for world in self._worlds.values():
            world.discard()
        self._worlds.clear()
        self._launcher.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


def _surroundings(simulate: str | None) -> protocol.Surroundings:
    """Those of this process now, as its ranks are to have them."""
    environment = dict(os.environ)
    environment.pop("PYTEST_CURRENT_TEST", None)  # it differs for each test and phase, and means this process
    if simulate == "cpu":
        # It says which real devices may be used, often none; of the simulated ones there are as many as asked for.
        environment.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        directory = os.sep
    return protocol.Surroundings(tuple(sys.path), directory, environment)


def _with_rank(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with the rank's placeholder where `fn` has a parameter of that name."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return args, kwargs
    if "rank" not in parameters or "rank" in kwargs:
        return args, kwargs
    placeholder = protocol.Placeholder("rank")
    position = list(parameters).index("rank")
    if parameters["rank"].kind is inspect.Parameter.KEYWORD_ONLY or position > len(args):
        return args, {**kwargs, "rank": placeholder}
    return (*args[:position], placeholder, *args[position:]), kwargs


def _culprit_of(function: Callable[..., Any]) -> str | None:
    """Which variable that `function` refers to cannot be pickled."""
    try:
        variables = inspect.getclosurevars(function)
    except (TypeError, ValueError):
        return None
    return _culprit((), {**variables.globals, **variables.nonlocals})


def _culprit(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    for name, value in (*enumerate(args), *kwargs.items()):
        try:
            transport.dumps(value)
        except Exception as error:
            return f"{name!r}, of type {type(value).__name__}, cannot be pickled: {error}"
    return None
