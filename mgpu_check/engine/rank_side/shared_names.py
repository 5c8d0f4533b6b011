"""Note the names of a rank's shared memory and semaphores in a file, so that they can be removed after the rank has
ended.

Python notes them in a resource tracker, a separate process. A rank's tracker would be killed with the rank's process
group before it could remove the names, and would count as left behind by the test.
"""

from __future__ import annotations

import functools
import os
from multiprocessing import resource_tracker, shared_memory
from typing import Any

from mgpu_check.processes.leftovers import file_of_names


def note_names(directory: str) -> None:
    """Note the names that this process and its spawned children make from now on, in a file in `directory`."""
    # A file descriptor replaces the tracker, as in spawned processes, which inherit that of their parent's tracker.
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = os.open(
        file_of_names(directory, os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
    )
    tracker._pid = None
    _pass_over_attached()


def _pass_over_attached() -> None:
    """Keep Python from noting shared memory that is only attached, whose owner would lose it when this process ends."""
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
