"""Run the rank's side of a test harness of torch in a bare process. Only these processes import torch here."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import sys
import types
import unittest
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu_check.engine.rank_side.rank import Rank

HOME = "torch.testing._internal.common_distributed"  # the module of the harnesses


@dataclass(frozen=True)
class TestClass:
    """A test class that another process imports, as a process of its harness would."""

    __test__ = False  # no tests of ours

    module: str  # its name in the pytest process
    file: str  # of the module
    qualname: str

    @classmethod
    def of(cls, owner: type) -> TestClass:
        return cls(owner.__module__, getattr(sys.modules[owner.__module__], "__file__", None) or "", owner.__qualname__)

    def load(self) -> Any:
        module = sys.modules.get(self.module) or _imported(self.module, self.file)
        return functools.reduce(getattr, self.qualname.split("."), module)


@dataclass(frozen=True)
class Pipe:
    """A placeholder for a connection to the pytest process among arguments: the rank makes an unread pipe instead."""


def run(
    rank: Rank, owner: TestClass, of_ranks: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]
) -> tuple[int, str | None]:
    """Call ``_run`` of a `MultiProcessTestCase` with the arguments of this rank; raise the error of the test's body.
    Returns the exit code; and the reason if the body raised `SkipTest`, which the exit code does not show."""
    import torch.distributed as dist
    import torch.multiprocessing as multiprocessing

    cls = owner.load()
    logging.getLogger(HOME).setLevel(logging.CRITICAL)  # it logs the traceback that the report has anyway
    args, kwargs = of_ranks[rank.index]
    code = 0
    reason: str | None = None
    kept, passed = multiprocessing.Pipe()  # kept: an end that is closed would be an error of the other one
    with kept:
        try:
            cls._run(*(passed if isinstance(arg, Pipe) else arg for arg in args), **kwargs)
        except SystemExit as exit:
            if exit.code == cls.TEST_ERROR_EXIT_CODE and isinstance(exit.__context__, Exception):
                raise exit.__context__ from None
            reason = str(exit.__context__) if isinstance(exit.__context__, unittest.SkipTest) else None
            code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    if dist.is_initialized():
        # The end of a process of the harness closes its connections, and ranks that wait for it raise.
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    return code, reason


_skipped: str | None = None  # why the process group of a `MultiProcContinuousTest` was not made


def run_next(rank: Rank, owner: TestClass, test: str, fresh: bool, file: str) -> str | None:
    """Run a test of a `MultiProcContinuousTest`, and return why it is skipped, None if it is not.
    `test`: its id. `fresh`: whether this process has to make the process group first. `file`: of the rendezvous."""
    global _skipped
    cls = owner.load()
    if fresh:
        cls.rank, cls.world_size = rank.index, rank.size
        try:
            cls._init_pg(rank.index, rank.size, file)
        except SystemExit as exit:
            _skipped = _reason(exit)
    if _skipped is not None:
        return _skipped
    try:
        cls._run_test_given_id(test)
    except SystemExit as exit:
        return _reason(exit)
    except unittest.SkipTest as skip:
        return str(skip)
    return None


def _reason(exit: SystemExit) -> str:
    """Return why a test is skipped by an exit code of torch's harness; raises `RuntimeError` for other codes."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    for skip in TEST_SKIPS.values():
        if skip.exit_code == exit.code:
            return str(skip.message)
    raise RuntimeError(f"the test called sys.exit({exit.code!r})") from exit


def _imported(name: str, file: str) -> types.ModuleType:
    try:
        spec = importlib.util.find_spec(name)
    except ImportError:
        spec = None
    if spec is not None and spec.origin is not None and Path(spec.origin).samefile(file):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)  # as pytest does with --import-mode=importlib
    assert spec is not None and spec.loader is not None, f"no loader for {file}"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
