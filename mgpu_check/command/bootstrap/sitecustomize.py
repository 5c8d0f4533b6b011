"""First on the path of every Python that ``mgpu-check simulate`` starts: simulates GPUs once torch is imported.

It imports nothing of ours until then, and hands on to the ``sitecustomize`` that it stands before.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import os
import sys

TYPE_CHECKING = False  # importing typing would slow down every Python that is started
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


def _chain() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _simulate() -> None:
    count, _, backing = os.environ["_MGPU_CHECK_SIMULATE"].partition(",")
    home = os.environ["_MGPU_CHECK_HOME"]
    added = home not in sys.path
    if added:
        sys.path.append(home)
    try:
        from mgpu_check.node.simulated import simulated_node
    finally:
        if added:
            sys.path.remove(home)
    node = simulated_node(int(count), backing)
    node.__enter__()
    atexit.register(node.__exit__, None, None, None)


class _AfterTorch:
    """Finds torch like the finders behind it, and has its loader call ``_simulate`` when the import is done."""

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
            _simulate()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this loader alone
        return spec


if os.environ.get("_MGPU_CHECK_SIMULATE"):
    sys.meta_path.insert(0, _AfterTorch())
_chain()
