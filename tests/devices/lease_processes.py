"""A program for the tests of leases: it forks processes that take and give back, and says what they did, in order.

One scenario per line of its input, as JSON, and one answer per line of its output. It is a process of its own, because
the one of pytest is too large, and has too many threads, to be forked a thousand times.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mgpu_check.devices import leases
from mgpu_check.devices.leases import DeviceLeases, Lease

LIMIT = 60.0  # only what is broken lasts as long


WAIT_FOR_END = """
import os, sys, time
while os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


class Journal:
    """A file that all processes append lines to, in the order of events."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, *words: object) -> None:
        os.write(self.file, (" ".join(map(str, words)) + "\n").encode())

    def lines(self) -> list[str]:
        return Path(self.path).read_text().splitlines()

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + LIMIT
        while not any(line == text or line.startswith(text + " ") for line in self.lines()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{text!r} has not happened")
            time.sleep(0.001)


class Watched(DeviceLeases):
    """Writes down when it joins the queue and is served, while that cannot change."""

    def __init__(self, name: int, journal: Journal, plan: dict[str, Any], directory: str) -> None:
        def sleep(seconds: float) -> None:
            if plan.get("dies_waiting"):
                kill_self(name, journal)
            time.sleep(seconds)

        super().__init__(plan["keys"], Path(directory), patience=LIMIT, sleep=sleep)
        self.name, self.journal = name, journal

    def _join(self, request: Any, directory: Path) -> bool:
        served = super()._join(request, directory)
        if served:
            self.journal.write("direct", self.name, *self.keys)
        return served

    @contextlib.contextmanager
    def _ticket(self, request: Any, directory: Path) -> Iterator[None]:
        with super()._ticket(request, directory):
            self.journal.write("queued", self.name, *self.keys)
            yield

    def _wait(self, request: Any, directory: Path) -> None:
        super()._wait(request, directory)
        self.journal.write("served", self.name)


class WithoutLocks(Watched):
    """A defect: every device seems to be free."""

    def _lock_device(self, request: Any, index: int, directory: Path) -> Any:
        class Lock:
            def release(self) -> None: ...

        return Lock()


class Pushing(Watched):
    """A defect: does not look at who is waiting already."""

    def _wants_ours(self, ticket: Path) -> bool:
        return False


KINDS = {"right": Watched, "without locks": WithoutLocks, "pushing": Pushing}


def kill_self(name: int, journal: Journal) -> None:
    journal.write("killed", name)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at_line(count: int, name: int, journal: Journal) -> None:
    """Have this process end when it executes its `count`-th line of the module that is tested."""
    left = count

    def on_line(frame: Any, event: str, argument: object) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if left <= 0:
                sys.settrace(None)
                kill_self(name, journal)
        return on_line

    def on_call(frame: Any, event: str, argument: object) -> Any:
        return on_line if frame.f_code.co_filename == leases.__file__ else None

    sys.settrace(on_call)


def live(name: int, plan: dict[str, Any], journal: Journal, directory: str) -> None:
    """One process: what it does, step by step."""
    mine = KINDS[plan.get("kind", "right")](name, journal, plan, directory)
    held: Lease | None = None
    if plan.get("dies_at"):
        kill_at_line(plan["dies_at"], name, journal)
    for what, *arguments in plan["steps"]:
        if what == "take":
            held = mine.take(*arguments)
            journal.write("has", name, *(mine.keys[place] for place in held.indices))
        elif what == "give":
            assert held is not None
            journal.write("gives", name)
            held.give_back()
        elif what == "yield":
            for _ in range(arguments[0]):
                os.sched_yield()
        elif what == "await":
            journal.wait_for(arguments[0])
        elif what == "fork":
            if os.fork() == 0:
                with contextlib.suppress(FileNotFoundError):
                    journal.wait_for("end")
                os._exit(0)
        elif what == "spawn":
            subprocess.Popen([sys.executable, "-c", WAIT_FOR_END, journal.path], close_fds=False)
        elif what == "die":
            kill_self(name, journal)


def play(scenario: dict[str, Any]) -> dict[str, Any]:
    journal = Journal(scenario["journal"])
    children = []
    for name, plan in enumerate(scenario["processes"]):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                live(name, plan, journal, scenario["directory"])
                code = 0
            except BaseException as error:
                journal.write("error", name, type(error).__name__, str(error).replace("\n", " "))
            finally:
                os._exit(code)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    journal.write("end")
    os.close(journal.file)
    return {"codes": codes, "journal": journal.lines()}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(play(json.loads(line))), flush=True)
