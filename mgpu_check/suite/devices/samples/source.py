"""Read torch's own table of operators and their sample inputs, `op_db`.

The table is a private part of torch. This module reads only its names, calls, dtypes and sample inputs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import itertools
import random
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mgpu_check.suite.common.values import ALL
from mgpu_check.torch_hooks.patches import Patches

_WITH_GRADIENTS = (torch.float32, torch.float64, torch.complex64, torch.complex128)
_TABLE = "torch.testing._internal.common_methods_invocations"


@dataclass(frozen=True, eq=False)
class SampledOperator:
    """An operator of torch's table.

    Attributes:
        name: its name there, such as "nn.functional.gelu" or "linalg.norm.subgradients_at_zero".
        paths: the functions that must give the same results: its own, then its aliases.
    """

    name: str
    paths: tuple[str, ...]
    info: Any

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that torch supports on the CPU and on CUDA."""
        both = set(self.info.dtypes) & set(self.info.supported_dtypes("cuda"))
        return [dtype for dtype in ALL if dtype in both]

    def samples(self, dtype: torch.dtype, seed: int, most: int | None = None) -> list[Any]:
        """Return the first `most` sample inputs, on the CPU, with the same elements for the same seed."""
        gradients = self.info.supports_autograd and dtype in _WITH_GRADIENTS
        # Not `sample_inputs`: it sets one seed for each sample, on all devices, which takes longer than the sample.
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        return list(itertools.islice(self.info.sample_inputs_func(self.info, "cpu", dtype, gradients), most))

    def call(self, path: str) -> Callable[..., Any]:
        """Return the present function of a path: a planted fault may have replaced the one of the table."""
        return _current(path) or self.info.op


@functools.cache
def operators() -> dict[str, SampledOperator]:
    """Return the operators of the installed torch by name, in its order.

    Raises:
        unittest.SkipTest: this torch has no such table, or it cannot be imported here.
    """
    try:
        table = table_of(_TABLE)
    except Exception as error:  # of a private module, which may raise anything
        raise unittest.SkipTest(
            f"torch's own samples of operators cannot be imported ({type(error).__name__}: {error}), so no operator "
            "was tried on them"
        ) from error
    found: dict[str, SampledOperator] = {}
    for info in table:
        name = ".".join(filter(None, (info.name, info.variant_test_name)))
        path = f"torch.{info.name}"
        # Other entries have a function of their own, which calls the one of this name with some options.
        own = path if _current(path) is info.op else name
        aliases = (f"torch.{alias.name}" for alias in info.aliases or ())
        found.setdefault(name, SampledOperator(name, (own, *filter(_current, aliases)), info))
    return found


def _current(path: str) -> Callable[..., Any] | None:
    module, *names = path.split(".")
    if module != "torch":
        return None
    value: Any = torch
    for name in names:
        value = getattr(value, name, None)
    return value  # type: ignore[no-any-return]


def table_of(module: str) -> list[Any]:
    """Import torch's table. The import changes nothing else in this process."""
    with _unchanged():
        return list(importlib.import_module(module).op_db)


@contextlib.contextmanager
def _unchanged() -> Iterator[None]:
    """Undo what the import of torch's tests changes, and stand in for packages that only those tests need."""
    patches = Patches()
    # Tests of torch forbid to set flags of backends, such as `cudnn.deterministic`.
    patches.set(torch.backends, "disable_global_flags", lambda: None)
    for script in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        patches.set(script, "__call__", script.__call__)
    hidden: dict[str, Any] = {"hypothesis": None}  # otherwise they load a profile of settings
    if importlib.util.find_spec("expecttest") is None:
        hidden["expecttest"] = types.ModuleType("expecttest")
        hidden["expecttest"].TestCase = unittest.TestCase  # the base class of test cases, which are not run here
    before = {name: sys.modules.get(name) for name in hidden}
    try:
        sys.modules.update(hidden)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
        patches.undo()
