"""Set up simulation and recording in every Python that ``mgpu-check simulate`` and ``mgpu-check compare`` start.

The directory of this file is first on the path of such a Python. Once the program imports torch, this module simulates
GPUs if `_MGPU_CHECK_SIMULATE` is set, and records training if `_MGPU_CHECK_COMPARE` is set. Until then it imports no
module of this package. At its end it runs the user's own ``sitecustomize``. Child processes of the program are
simulated, too, and recorded once one turns out to be the process that trains.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.machinery
import importlib.util
import os
import sys

TYPE_CHECKING = False  # importing typing would slow down the start of every Python
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType
    from typing import Any

_PR_SET_PDEATHSIG = 1
_HERE = os.path.dirname(os.path.abspath(__file__))
_HOME = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))

_entered: list[object] = []
"""Keeps the node alive: from Python 3.13 on, a forked child of multiprocessing clears atexit, which would end the
simulation (python/cpython#83856)."""


class _OurPackage:
    """Makes this copy of the package importable for a `with` block, even if none, or another version, is installed."""

    def __enter__(self) -> None:
        if "mgpu_check" not in sys.modules:
            sys.path.insert(0, _HOME)
            try:
                importlib.import_module("mgpu_check")
            finally:
                del sys.path[0]
        self.added = _HOME not in sys.path
        if self.added:
            sys.path.append(_HOME)

    def __exit__(self, *_: object) -> None:
        if self.added:
            sys.path.remove(_HOME)


def _simulate(count: int, backing: str) -> None:
    with _OurPackage():
        from mgpu_check.simulated.activation import simulated_node
    node = simulated_node(count, backing)
    node.__enter__()
    _entered.append(node)
    atexit.register(node.__exit__, None, None, None)
    # The command may have ended, or run on another host.
    file = os.environ.get("_MGPU_CHECK_ENTERED")
    if file:
        try:
            with open(file, "ab") as marks:
                marks.write(b".")
        except OSError:
            pass


def _record(settings: dict[str, Any], held: bool = False) -> Any:
    with _OurPackage():
        from mgpu_check.compare.in_script.placements import Files
        from mgpu_check.compare.in_script.recorder import install
    # Simulated collectives block as gloo's do, so the stacks show where a rank waits, and no count is needed.
    entered = None if os.environ.get("_MGPU_CHECK_SIMULATE") else settings["entered"]
    own = {name: settings[name] for name in ("steps", "taped", "moved", "store", "places")}
    files = Files(**{name: settings.get(name) for name in Files._fields})
    return install(settings["trace"], entered, distinct=settings["apart"], files=files, held=held, **own)


def _watch_for_ranks(settings: dict[str, Any]) -> None:
    """Record this process, which the script has started or is, once it turns out to be a rank."""
    with _OurPackage():
        from mgpu_check.compare.in_script import script_calls
        from mgpu_check.compare.process_watch import files_of, install_rank_watch

    def record(files: Mapping[str, int]) -> Any:
        opened = files_of(settings["runner"], files)
        _write_stacks(settings["signal"], opened["stacks"])
        return _record({**settings, **opened, "store": None, "places": {}}, held=True)

    store = settings["store"]
    if store is not None and settings["size"] == 1:
        script_calls.install_meeting(lambda event, **fields: None, tuple(store), {})
    install_rank_watch(settings["ranks"], settings["size"], record, meets=store is not None)


def _end_before_training() -> None:
    with _OurPackage():
        from mgpu_check.cli.init_arguments import end_before_training
    end_before_training()


def _act_after(actions: dict[str, list[Callable[[], None]]]) -> None:
    """Call each of the `actions` of a module once, after the module is imported.
    Its loader calls them, because every import uses a loader: also a lazy import, one that asks a finder directly, and
    one after a change of `sys.meta_path`. A program that only looks for a module causes no call."""

    def act_after(loader: Any, waiting: list[Callable[[], None]]) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            collecting = gc.isenabled()
            if collecting:
                gc.collect()  # cycles that the program has left so far; later collections do not visit them
            gc.disable()  # collecting takes a quarter of the time of these imports, and finds almost nothing
            try:
                execute(module)
                if sys.modules.get(module.__name__) is module:  # else a program has loaded a file under this name
                    while waiting:
                        waiting.pop(0)()
            finally:
                if collecting:
                    gc.freeze()  # later collections, and those at exit, would visit all its objects again
                    gc.enable()

        loader.exec_module = exec_module

    def watch(watched_class: Any) -> None:
        original = watched_class.__init__

        # A replaced `exec_module` would have a frame in each traceback of an import. This function returns before.
        @functools.wraps(original)
        def __init__(self: Any, fullname: str, *rest: Any, **named: Any) -> None:
            original(self, fullname, *rest, **named)
            if waiting := actions.get(fullname):
                act_after(self, waiting)

        watched_class.__init__ = __init__

    watch(importlib.machinery.SourceFileLoader)
    watch(importlib.machinery.SourcelessFileLoader)


def _prepare_recording(settings: dict[str, Any]) -> None:
    """Make the script's first process end with the recording command, and write its stacks for a signal of it."""
    import ctypes
    import signal

    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != settings["runner"]:
        os._exit(1)
    files = settings["ranks"][0]
    for name in ("trace", "stacks", "entered"):
        os.set_inheritable(files[name], False)
    _write_stacks(settings["signal"], files["stacks"])
    if "trace" in settings:
        settings["places"] = _watch_variables("MASTER_ADDR", "MASTER_PORT")


def _write_stacks(number: int, fd: int) -> None:
    import faulthandler

    faulthandler.register(number, file=fd, all_threads=True, chain=False)


def _watch_variables(*variables: str) -> dict[str, tuple[str, int]]:
    """Return a dict that receives name -> (file, line) when the program sets one of these variables.
    Errors in the variables show up only later, when torch reads them."""
    places: dict[str, tuple[str, int]] = {}
    environ_class: Any = type(os.environ)
    original = environ_class.__setitem__

    @functools.wraps(original)
    def __setitem__(self: object, key: str, value: str) -> None:
        if key in variables:
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_code.co_filename.startswith(("<frozen ", os.__file__)):
                frame = frame.f_back
            places[key] = frame.f_code.co_filename, frame.f_lineno
        original(self, key, value)

    environ_class.__setitem__ = __setitem__
    return places


def _leave_environment() -> None:
    """Remove this directory from PYTHONPATH, so that child processes of the program do not run this module."""
    kept = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != _HERE]
    if kept:
        os.environ["PYTHONPATH"] = os.pathsep.join(kept)
    else:
        os.environ.pop("PYTHONPATH", None)


def _fake_data() -> dict[str, list[Callable[[], None]]]:
    with _OurPackage():
        from mgpu_check.compare.fake_data.paths import install
    return {name: [act] for name, act in install().items()}


def _chain() -> None:
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _main() -> None:
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
    faking = "_MGPU_CHECK_FAKE_DATA" in os.environ
    waiting = _fake_data() if faking else {}
    actions = waiting.setdefault("torch", [])
    simulated = os.environ.get("_MGPU_CHECK_SIMULATE")
    if simulated:
        count, _, backing = simulated.partition(",")
        actions.append(functools.partial(_simulate, int(count), backing))
    elif "_MGPU_CHECK_COMPARE" not in os.environ and not faking:
        _leave_environment()
    if "_MGPU_CHECK_ARGUMENTS" in os.environ:
        actions.append(_end_before_training)
    settings_text = os.environ.get("_MGPU_CHECK_COMPARE")
    if settings_text is not None:
        import json  # imported here, because most Pythons do not need it

        settings = json.loads(settings_text)
        first = settings["first"]
        if first:
            os.environ["_MGPU_CHECK_COMPARE"] = json.dumps({**settings, "first": False})
            _prepare_recording(settings)
        is_rank = first and "trace" in settings
        # After the simulation, if any.
        actions.append(functools.partial(_record if is_rank else _watch_for_ranks, settings))
    if "torch" in sys.modules:  # a .pth file may import torch
        for act in actions:
            act()
        actions.clear()
    if any(waiting.values()):
        _act_after(waiting)
    _chain()


_main()
