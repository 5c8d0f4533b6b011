"""The names of shared memory and semaphores that a rank makes: noted in a file, so that they can be removed after it.

Python notes them in a tracker, a process that it starts for that. The tracker of a rank would be killed with the process group
of the rank, before it has removed anything, and it would count as left behind by the test.
"""

from __future__ import annotations

import functools
import os
from multiprocessing import resource_tracker, shared_memory
from typing import Any

from mgpu_check.processes.leftovers import file_of_names

__all__ = ["note_names"]


def note_names(directory: str) -> None:
    """Note, in a file of the run's `directory`, what this process, and what it spawns, makes by a name from now on."""
    # As it is done in processes that Python spawns, to which the tracker of their parent is given.
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = os.open(
        file_of_names(directory, os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
    )
    tracker._pid = None
    _pass_over_attached()


def _pass_over_attached() -> None:
    """Keep Python from noting shared memory of others that is merely attached: they would lose it at the end of this
    process.
    """
    original = shared_memory.SharedMemory.__init__
    made: set[str] = set()

    @functools.wraps(original)
    def initialize(self: Any, name: str | None = None, create: bool = False, size: int = 0, **options: Any) -> None:
        original(self, name, create, size, **options)
        if create:
            made.add(self._name)
        elif self._name not in made:
            resource_tracker.unregister(self._name, "shared_memory")

    shared_memory.SharedMemory.__init__ = initialize  # type: ignore[method-assign]
