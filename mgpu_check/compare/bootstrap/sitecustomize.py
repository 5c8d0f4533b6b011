"""First on the path of every Python that ``mgpu-check compare`` starts: records what it trains once torch is imported.

It imports nothing of ours until then, is gone from the path and the environment for the processes that the script
starts, and hands on to the ``sitecustomize`` that it stands before.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys

TYPE_CHECKING = False  # importing typing would slow down every Python that is started
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType
    from typing import Any

_PR_SET_PDEATHSIG = 1
_HERE = os.path.dirname(os.path.abspath(__file__))


def _leave() -> None:
    """What the script starts is not recorded."""
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
    kept = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != _HERE]
    if kept:
        os.environ["PYTHONPATH"] = os.pathsep.join(kept)
    else:
        os.environ.pop("PYTHONPATH", None)


def _chain() -> None:
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _end_with(runner: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != runner:
        os._exit(1)


def _record(settings: dict[str, Any]) -> None:
    home = settings["home"]
    added = home not in sys.path
    if added:
        sys.path.append(home)
    try:
        from mgpu_check.compare.recorder import install
    finally:
        if added:
            sys.path.remove(home)
    install(settings["trace"], settings["steps"], settings["moved"])


class _AfterTorch:
    """Finds torch like the finders behind it, and has its loader call ``_record`` when the import is done."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _record(self.settings)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this loader alone
        return spec


def _main() -> None:
    told = os.environ.pop("_MGPU_CHECK_COMPARE", None)
    _leave()
    if told is None:
        _chain()
        return
    settings = json.loads(told)
    _end_with(settings["runner"])
    for name in ("trace", "stacks"):
        os.set_inheritable(settings[name], False)
    faulthandler.register(settings["signal"], file=settings["stacks"], all_threads=True, chain=False)
    _chain()
    # After the others, so that it is found before them, and records what runs on a simulated node if there is one.
    if "torch" in sys.modules:
        _record(settings)
    else:
        sys.meta_path.insert(0, _AfterTorch(settings))


_main()
