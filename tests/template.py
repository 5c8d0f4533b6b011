"""The template of the tests' inner runs, and what is forked from it: run as a script by `warm.Template`.

A run that is forked here forks *standbys* before it does anything, which become its fork server, the workers of
pytest-xdist, the processes of the script, or the driver of a launched run, when it asks for them.

Hypothesis, and what pytest's process has of the project, are imported and hidden: a run finds them when it imports them.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import runpy
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, NoReturn

from _pytest.assertion import rewrite

ROOM = "MGPU_TEST_ROOM"  # a variable that makes room for the environments of the processes to come
STANDBYS_OF_LAUNCHED = 2  # what the ranks of a launched process are forked from, and perhaps the driver
STANDBY = "standby"  # the name of a process that has no task yet, and ends with the run that it waits for
NUMBER = struct.Struct("q")  # a process id, and then an exit code
_IMPORTS = ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "pytest")
_OURS = (  # what a run imports before its ranks replace functions of torch: the last is what replaces them
    "mgpu_check.plugin.plugin",
    "mgpu_check.plugin.execution",
    "mgpu_check.plugin.replacements",
    "mgpu_check.plugin.session",
    "mgpu_check.plugin.report.failures",
    "mgpu_check.plugin.session",
    "mgpu_check.plugin.report.terminal",
    "mgpu_check.devices.leases",
    "mgpu_check.engine.pool",
    "mgpu_check.torch_hooks.collectives",
)
_THREADS = "OMP_NUM_THREADS"  # torch can be told later, too
_COMPARED = "_MGPU_CHECK_COMPARE"  # a variable that processes of a script have which is compared
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_OF_TORCHRUN = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
_WORKER = "import sys;exec(eval(sys.stdin.readline()))"  # how execnet starts a process


class Process:
    """The used part of `subprocess.Popen`, for a process with any parent."""

    pid: int

    def wait(self, timeout: float | None = None) -> int:
        raise AssertionError("each kind of process is waited for in its own way")

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _serve(control: socket.socket) -> Callable[[], None]:
    """The loop of the template. Returns in a forked process, what that is to do."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(read, selectors.EVENT_READ)
    children: dict[int, socket.socket] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is not control:
                os.read(read, 4096)
                continue
            byte, files, _, _ = socket.recv_fds(control, 1, 6)
            if not byte:
                for pid in children:
                    os.killpg(pid, signal.SIGKILL)
                os._exit(0)
            status = socket.socket(fileno=files[1])
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                selector.close()
                for file in (read, write):
                    os.close(file)
                for open_ in (control, status, *children.values()):
                    open_.close()
                return functools.partial(_run, files[0], *files[2:])
            for file in (files[0], *files[2:]):
                os.close(file)
            status.sendall(NUMBER.pack(pid))
            children[pid] = status
        while children:
            pid, code = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            with children.pop(pid) as status:
                try:
                    status.sendall(NUMBER.pack(os.waitstatus_to_exitcode(code)))
                except BrokenPipeError:
                    pass  # nobody waits for it


def _become(environment: dict[str, str], directory: int, streams: Sequence[int], session: bool) -> None:
    """Be as a process that was started with these, and in a session of its own or not."""
    if session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # which the template has found by its own environment
    _show_environment(environment)
    os.fchdir(directory)
    os.close(directory)
    for number, file in enumerate(streams):
        os.dup2(file, number)
    for file in {*streams} - {0, 1, 2}:
        os.close(file)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    _Hidden.forget_if_it_differs()


def _show_environment(environment: Mapping[str, str]) -> None:
    """Set the variables that /proc shows: tests find the processes of a run by them.

    Nothing may use the variables of before any more.
    """
    with open("/proc/self/stat") as file:
        start, end = (int(word) for word in file.read().rpartition(")")[2].split()[47:49])
    data = b"".join(f"{name}={value}".encode(errors="surrogateescape") + b"\0" for name, value in environment.items())
    assert len(data) <= end - start, "the environment of a run is larger than the room for it"
    ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)


def _run(request: int, directory: int, *streams: int) -> None:
    """Do what the template was asked for, and end the interpreter."""
    with open(request) as file:
        file.seek(0)
        asked = json.load(file)
    _become(asked["environment"], directory, streams, session=True)
    for name in asked["imports"]:
        importlib.import_module(name)
    for _ in range(asked["standbys"]):
        _Standby()
    _adopt()
    _end(_interpret, asked["words"])


def _adopt() -> None:
    """Let standbys be what this process starts."""
    subprocess.Popen = _Popen  # type: ignore[misc]  # a class, which mypy does not let go
    if _OF_TORCHRUN in sys.modules:  # it has a name of its own for it
        setattr(sys.modules[_OF_TORCHRUN], "Popen", _Popen)  # noqa: B010  # a module has no such attribute to mypy


def _end(function: Callable[[list[str]], None], words: list[str]) -> NoReturn:
    """Call `function`, and end the process as an interpreter does that has, except that objects are not destroyed.

    Other exceptions than SystemExit are the interpreter's to report.
    """
    code: object = None
    try:
        function(words)
    except SystemExit as error:
        code = error.code
    status = code if isinstance(code, int) else 0 if code is None else 1
    if status == 1 and not isinstance(code, int):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]  # private: what an interpreter calls at its end
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except OSError:
        sys.exit(status)  # nobody reads it: the interpreter knows what that means
    os._exit(status & 0xFF)


def _interpret(words: Sequence[str]) -> None:
    """Be ``python WORDS…`` from where it begins with what they name."""
    if words[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(words[1], module.__dict__)
        return
    sys.argv = list(words)
    path = Path(words[0]).absolute()
    sys.path.insert(0, str(path.parent))
    module.__file__ = str(path)
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)


class _Standby:
    """A process that will be a fork server, a worker of pytest-xdist, or one of a script."""

    waiting: ClassVar[list[_Standby]] = []

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid:
            theirs.close()
            self.waiting.append(self)
            return
        for ours in (self, *self.waiting):
            ours.socket.close()
        self.waiting.clear()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        name = Path("/proc/self/comm").read_bytes().strip()
        _prctl(_PR_SET_NAME, STANDBY.encode())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's is for the run
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):  # who waits for the end of the run's output is not to wait for this
            os.dup2(nothing, number)
        os.close(nothing)
        byte, files, _, _ = socket.recv_fds(theirs, 1, 16)
        if not byte:
            os._exit(0)
        theirs.close()
        _prctl(_PR_SET_NAME, name)
        _prctl(_PR_SET_PDEATHSIG, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _start(*files)

    def start(
        self,
        words: Sequence[str],
        streams: Sequence[int],
        *,
        kept: Sequence[int] = (),
        group: Literal["session", "own", "same"] = "same",
        environment: Mapping[str, str] | None = None,
        directory: str | os.PathLike[str] | None = None,
        role: Literal["plain", "worker", "launched", "script"] = "plain",
    ) -> int:
        """Be ``python WORDS…`` now; the process id.

        Args:
            streams: stdin, stdout and stderr.
            kept: file descriptors that it has under the same numbers.
            group: a session of its own, a process group of its own, or none.
            role: of a worker, which starts a fork server; of what torchrun launches, which starts one, too, and perhaps
                the driver; of a script, before which our `sitecustomize` runs.
        """
        asked = {
            "words": list(words),
            "kept": list(kept),
            "session": group == "session",
            "role": role,
            "environment": dict(os.environ if environment is None else environment),
        }
        if group == "own":
            os.setpgid(self.pid, self.pid)  # from here, where it is needed at once
        opened = os.open(directory or ".", os.O_RDONLY)
        with self.socket, tempfile.TemporaryFile() as request:
            request.write(json.dumps(asked).encode())
            request.flush()
            socket.send_fds(self.socket, [b"S"], [request.fileno(), opened, *streams, *kept])
        os.close(opened)
        return self.pid


def _start(request: int, directory: int, stdin: int, stdout: int, stderr: int, *kept: int) -> NoReturn:
    """In a standby: be what it was asked to be, up to and with the end of the interpreter."""
    with open(request) as file:
        file.seek(0)
        asked = json.load(file)
    for path in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if path in sys.path:
            sys.path.remove(path)
    _become(asked["environment"], directory, (stdin, stdout, stderr), session=asked["session"])
    above = max((*kept, *asked["kept"]), default=0) + 1  # where neither those that came are, nor what they shall be
    moved = [fcntl.fcntl(received, fcntl.F_DUPFD, above) for received in kept]
    for received in kept:
        os.close(received)
    for received, number in zip(moved, asked["kept"], strict=True):
        os.dup2(received, number)
        os.close(received)
    if asked["role"] == "worker":
        sys.path.insert(0, "")
        _Standby()  # its fork server
        _adopt()
    elif asked["role"] == "launched":
        for _ in range(STANDBYS_OF_LAUNCHED):
            _Standby()
        _adopt()
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # nearly what -u does
    elif asked["role"] == "script":
        _customize()
    _end(_interpret, asked["words"])


def _customize() -> None:
    """Do what an interpreter does of its own accord, and what torch does when it is imported in this environment."""
    torch: Any = sys.modules["torch"]
    if _THREADS in os.environ:
        torch.set_num_threads(int(os.environ[_THREADS]))
    torch._dynamo.config.disable = os.environ.get("TORCH_COMPILE_DISABLE") == "1"
    _ToBeImported(sys.modules.pop("torch"))  # so that what is done after it has its place among what the script does
    sys.modules.pop("sitecustomize", None)
    importlib.import_module("sitecustomize")


class _ToBeImported(importlib.machinery.SourceFileLoader):
    """Finds and loads a module that was imported already, and with it the `others` that its import has brought."""

    def __init__(self, module: types.ModuleType, others: Mapping[str, types.ModuleType] | None = None) -> None:
        self._module, self._spec = module, module.__spec__
        self.others = others or {}
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._module.__name__:
            return None
        super().__init__(name, self._module.__file__ or "")  # our start-up code watches loaders of files
        spec = importlib.machinery.ModuleSpec(name, self)
        spec.submodule_search_locations = getattr(self._module, "__path__", None)  # `-m` needs it to know a package
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec
        sys.meta_path.remove(self)
        sys.modules.update(self.others)


class _Hidden:
    """Packages that a run is to find when it imports them, and not before: pytest asks whether Hypothesis is there."""

    finders: ClassVar[list[_ToBeImported]] = []
    asks: ClassVar[Callable[[], bool]] = staticmethod(lambda: "CI" in os.environ)  # as Hypothesis does

    @classmethod
    def hide(cls) -> None:
        """Import them, as in an environment without variables, which they look at; and take them away again."""
        environment = dict(os.environ)
        os.environ.clear()
        for name in ("hypothesis", *_OURS):
            importlib.import_module(name)
        # Hypothesis 6.130 warns of a generator that it makes after objects are frozen.
        with sys.modules["hypothesis.internal.entropy"].deterministic_PRNG():
            os.environ.update(environment)
        cls.asks = getattr(sys.modules["hypothesis._settings"], "is_in_ci", cls.asks)
        for package in ("hypothesis", "_hypothesis_globals", "mgpu_check"):
            if package in sys.modules:  # the second is in some versions of Hypothesis
                others = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(f"{package}.")}
                cls.finders.append(_ToBeImported(sys.modules.pop(package), others))
        rewritten = rewrite.AssertionRewritingHook.find_spec

        def find_spec(hook: Any, name: str, *rest: Any) -> Any:
            hidden = any(one in sys.meta_path and one.find_spec(name) for one in cls.finders)
            return None if hidden else rewritten(hook, name, *rest)  # of pytest, which stands before

        rewrite.AssertionRewritingHook.find_spec = find_spec  # type: ignore[assignment]  # with fewer types

    @classmethod
    def forget_if_it_differs(cls) -> None:
        """Leave the imports to the run, if its environment has variables that decide what they do, or measure them."""
        if cls.asks() or any(name.startswith(("HYPOTHESIS", "COVERAGE")) for name in os.environ):
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in cls.finders]


class _Adopted(Process):
    """A process that a standby has become: what is used of `subprocess.Popen`."""

    stderr = None

    def __init__(self, pid: int, stdin: IO[bytes] | None, stdout: IO[bytes] | None) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            descriptor = os.pidfd_open(self.pid)
            try:
                if not select.select([descriptor], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("a standby", timeout or 0.0)
            finally:
                os.close(descriptor)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class _Popen(subprocess.Popen):  # type: ignore[type-arg]  # it is not generic when it runs
    """As `subprocess.Popen`; what a run starts that can be forked are its standbys, as long as there are some."""

    def __new__(cls, args: Any, *rest: Any, **options: Any) -> Any:
        words = list(args)
        if not _Standby.waiting or words[:1] != [sys.executable]:
            return super().__new__(cls)
        if words[-1] == _WORKER:
            return _worker(words[words.index("-c") :])
        asked = _asked_of_standby(words[1:], options)
        if asked is None:
            return super().__new__(cls)
        with open(os.devnull) as nothing:
            streams = (nothing.fileno(), *asked.pop("outputs"))
            pid = _Standby.waiting.pop().start(streams=streams, environment=options["env"], **asked)
        return _Adopted(pid, None, None)


def _asked_of_standby(words: list[str], options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the request to a standby in place of ``python WORDS…``, and its outputs; None if it cannot replace it."""
    if words[:2] == ["-P", "-c"] and "import forkserver" in words[2]:
        outputs = options["stdout"].fileno(), options["stderr"].fileno()
        return {"words": words[1:], "outputs": outputs, "kept": options["pass_fds"], "group": "session"}
    if words[:3] == ["-u", "-m", "mgpu_check"]:
        outputs = options["stdout"] or 1, options["stderr"] or 2
        return {"words": words[1:], "outputs": outputs, "group": "session", "role": "launched"}
    if words[:2] == ["-m", "mgpu_check"] and options.get("start_new_session"):
        return {"words": words, "outputs": (1, 2), "kept": options["pass_fds"], "group": "session"}
    if _COMPARED in (options.get("env") or {}):
        outputs = options["stdout"].fileno(), options["stderr"].fileno()
        script = {"kept": options["pass_fds"], "group": "own", "directory": options["cwd"], "role": "script"}
        return {"words": words, "outputs": outputs, **script}
    return None


def _worker(words: list[str]) -> _Adopted:
    """Let a standby be a worker of pytest-xdist, which is talked to through pipes."""
    (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
    pid = _Standby.waiting.pop().start(words, (theirs_in, theirs_out, 2), role="worker")
    os.close(theirs_in)
    os.close(theirs_out)
    return _Adopted(pid, open(ours_in, "wb"), open(ours_out, "rb"))


def main(control: str) -> None:
    del sys.path[0]  # this file's directory
    gc.disable()
    # Where a test file imports torch, its filters are gone again when pytest has read the file.
    with warnings.catch_warnings():
        for name in _IMPORTS:
            importlib.import_module(name)
        _Hidden.hide()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # private
        finalizer.atexit = False  # of torch's 174 libraries of operators, each run would remove each: 45 ms
    gc.freeze()
    gc.enable()
    _serve(socket.socket(fileno=int(control)))()


if __name__ == "__main__":
    main(sys.argv[1])
