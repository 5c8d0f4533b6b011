"""Runs of pytest, and of scripts that are compared, from processes that have imported torch already.

An inner run starts two interpreters that import torch: its own, for its test files, and its fork server's. The imports
take four of its five seconds of processor time, and are the same each time. `mgpu-check compare` starts six, and needs
little more time itself. Here a *template* imports once; each run is forked from it. `template.py` holds the
template; this module is the side of the tests.

To the run and its test all is as if an interpreter had been started: arguments, environment (also in /proc), directory,
standard streams, a session of its own, `__main__`, the end by `sys.exit`, and its exit code. Different are: torch and
torch._dynamo are in `sys.modules` from the beginning, with the package come all modules that pytest's process may import
of it, whose assertions pytest does not rewrite, a fork server has not the umask and the limits that the run has
given itself, and the interpreter ends after its threads and what was registered with `atexit`, without destroying the
thousands of objects that torch has made: that takes half a second. So a run starts a new interpreter where that is what
a test is about (`Template.fits`), or if it is started without the fixture `warm`.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence

from tests import template
from tests.template import NUMBER, ROOM, STANDBY, STANDBYS_OF_LAUNCHED, Process

__all__ = ["COMPARED_ON_ONE_DEVICE", "STANDBY", "STANDBYS_OF_LAUNCHED", "Forked", "Template", "program_of"]

COMPARED_ON_ONE_DEVICE = 3  # runs of a comparison, beside that on ranks
_READ_AT_IMPORT = ("PYTHON", "TORCH", "PYTORCH", "OMP_", "MKL_", "KMP_", "LD_", "NUMPY", "MALLOC_")
# PYTHONPATH is each run's own; torch._dynamo writes the third into the environment of who imports it.
_READ_LATER = ("PYTHONPATH", "PYTHONBREAKPOINT", "TORCHINDUCTOR_CACHE_DIR")


class Forked(Process):
    """A process that was forked from the template: what is used of `subprocess.Popen`."""

    stdin = stdout = stderr = None

    def __init__(self, status: socket.socket) -> None:
        self._status = status
        self.pid = self._next()
        self.returncode: int | None = None

    def _next(self) -> int:
        data = self._status.recv(NUMBER.size, socket.MSG_WAITALL)
        assert len(data) == NUMBER.size, "the template of inner runs has ended"
        return int(NUMBER.unpack(data)[0])

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("pytest", timeout or 0.0)
            self.returncode = self._next()
            self._status.close()
        return self.returncode


class Template:
    """The template, as the tests see it; it starts when it is first used."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._lock = threading.Lock()
        # PYTHONPATH is each run's own.
        self._environment = {name: value for name, value in environment.items() if name != "PYTHONPATH"}

    def fits(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Return whether `command` is a program of this interpreter, in an environment with the same
        imports."""
        return command[0] == sys.executable and bool(program_of(command)[0]) and self.has(environment)

    def has(self, environment: Mapping[str, str]) -> bool:
        """Return whether imports in `environment` give the same modules as here."""
        return all(
            environment.get(name) == self._environment.get(name)
            for name in {*environment, *self._environment}
            if name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER
        )

    def popen(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        stdout: int,
        stderr: int,
        *,
        program: Sequence[str] = ("-m", "pytest"),
        standbys: int | None = None,
        imports: Sequence[str] = (),
        directory: str | os.PathLike[str] = ".",
        stdin: int | None = None,
    ) -> Forked:
        """``python -m pytest`` with `arguments`.

        Args:
            program: what the interpreter runs instead: ``-m`` and a module, or ``-c`` and code, or a script.
            standbys: how many processes it will start that can be forked; None: as `arguments` say.
            imports: modules that it, and its standbys, have imported.
            stdin: its standard input; None: one that is at its end.
        """
        self._start()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        opened = os.open(directory, os.O_RDONLY)
        asked = {
            "words": [*program, *arguments],
            "environment": dict(environment),
            "standbys": _standbys([*program, *arguments]) if standbys is None else standbys,
            "imports": list(imports),
        }
        with theirs, tempfile.TemporaryFile() as request, open(os.devnull) as nothing:
            request.write(json.dumps(asked).encode())
            request.flush()
            read = nothing.fileno() if stdin is None else stdin
            files = [request.fileno(), theirs.fileno(), opened, read, stdout, stderr]
            with self._lock:
                socket.send_fds(self._control, [b"R"], files)
        os.close(opened)
        return Forked(ours)

    def _start(self) -> None:
        with self._lock:
            if self._process is not None:
                return
            self._control, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, template.__file__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=self._environment | {ROOM: "x" * 32768},
                    cwd="/",
                    start_new_session=True,
                )

    def close(self) -> None:
        """End it, and the runs that have not ended."""
        if self._process is not None and self._control is not None:
            self._control.close()
            self._process.wait()


def program_of(command: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Return the script that the interpreter of `command` runs, and its arguments; none if it has own options."""
    first, *rest = [*command[1:], ""]
    if first in ("-m", "-c"):
        return (first, rest[0]), rest[1:-1]
    if first.startswith("-m"):
        return ("-m", first[2:]), rest[:-1]
    return ((first,) if first and not first.startswith("-") else ()), rest[:-1]


def _standbys(words: Sequence[str]) -> int:
    """How many a program needs: for ranks and one device of a comparison; or one for each worker, or one fork
    server."""
    line = " ".join([*words, ""])
    if line.startswith("-m mgpu_check compare "):
        ranks = re.search(r" --gpus=(\d+) ", line)
        return (int(ranks[1]) if ranks else 2) + COMPARED_ON_ONE_DEVICE
    if line.startswith("-m mgpu_check doctor "):
        return 2  # it looks at the GPUs in a process of its own, and then starts ranks
    workers = re.search(r" -n ?([1-9]\d*) ", line)
    # Who hands out the tests counts real devices in a process that ends before those of the workers are there.
    return int(workers[1]) + ("--simulate" not in words) if workers else 1
