"""Bare processes: forked like ranks, but without a default process group, a device or a simulated node of their own.

They are for code that brings all of this itself, such as a test harness. Nothing that this code does with collectives
is judged, and nothing is restored between its calls.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mgpu_check.devices.placement import Slot
from mgpu_check.engine import hash_seeds
from mgpu_check.engine.launcher import LocalLauncher
from mgpu_check.engine.pauses import Pauses
from mgpu_check.engine.process import STREAMS
from mgpu_check.engine.rank_argument import with_rank
from mgpu_check.engine.sending import call_context, pickled_arguments, pickled_function
from mgpu_check.engine.world import Begun, World
from mgpu_check.processes import protocol

_TIMEOUT = 300.0  # seconds: the usual one of a call; `results` has its own


class BareProcesses:
    """Forks worlds of bare processes from a server of their own."""

    def __init__(self, preload: Sequence[str]) -> None:
        self._launcher = LocalLauncher(preload, None, hash_seeds.FIRST)

    def start(self) -> None:
        self._launcher.start()

    def fork(self, size: int) -> BareWorld:
        """Return a new world of `size` processes."""
        return BareWorld(self._launcher, size)

    def close(self) -> None:
        self._launcher.close()


class BareWorld(World):
    """Bare processes that all run the same function."""

    def __init__(self, launcher: LocalLauncher, size: int) -> None:
        self._keys = itertools.count()
        # One for all calls: a process adopts a new one, and would lose the variables that the harness has set in it.
        self._context = call_context(None)
        spec = protocol.RankSpec(
            index=None,
            size=size,
            local_index=0,
            node_index=0,
            device=0,
            devices=0,
            simulate=None,
            backend=None,
            store="",
            group_timeout=_TIMEOUT,
            threads=max(1, (os.cpu_count() or 1) // size),
            call_context=self._context,
            own_environment={},
            bare=True,
        )
        slots = [Slot(0, index) for index in range(size)]
        super().__init__(
            launcher, lambda index: replace(spec, index=index, local_index=index), range(size), slots, _TIMEOUT
        )

    def send(self, name: str, fn: Callable[..., Any], *args: Any) -> Begun:
        """Call ``fn(*args)`` on every process; a parameter ``rank`` receives the `Rank`. `results` waits for it."""
        given, named = with_rank(fn, args, {})
        function = replace(pickled_function(fn, fn, str(next(self._keys)), reused=False), name=name)
        return self.begin(function, pickled_arguments(function.name, given, named), self._context)

    def results(self, call: Begun, timeout: float) -> list[Any]:
        """Wait up to `timeout` seconds, and return the results in rank order; raises as `World.run` does."""
        results = [self.loaded(index, result) for index, result in enumerate(self.finish(call, timeout))]
        self.broken = False  # each has answered, and may have entered other collectives than the others
        return results

    def returned(self) -> dict[int, Any]:
        outcomes = {index: end for index, end in self._answers.items() if isinstance(end, protocol.Outcome)}
        return {index: self.loaded(index, end.value) for index, end in outcomes.items() if end.value is not None}

    def output(self) -> list[tuple[str, str, str]]:
        found = []
        for index, process in self.processes.items():
            for name in STREAMS:
                if text := process.output(name):
                    found.append((self.who.full([index]), name, text))
            process.mark_output()
        return found

    def exit_codes(self) -> list[int | None]:
        return [None if process.killed else process.exit_code for process in self.processes.values()]

    def _pauses(self) -> Pauses:
        return _Unwatched(self.processes, self.who)

    def _check_agreement(self, outcomes: Mapping[int, protocol.Outcome], left: object) -> None:
        """Check nothing: a test of collectives may enter different ones on purpose."""


class _Unwatched(Pauses):
    """Ends no call early: a test may wait in vain on purpose, until a timeout of torch."""

    def look(self, waiting: object) -> bool:
        return True
