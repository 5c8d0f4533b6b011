"""Plant a fault around each call of a rank, by the name of the function that plants it: the plugin has no faults of its
own."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

__all__ = ["Planting"]


@dataclass(frozen=True)
class Planting:
    """A fault, and the function that plants it in a rank.

    Attributes:
        function: such as ``package.module:function``; it takes `fault`, and returns a context in which the fault is
            planted.
        fault: the name of the fault.
    """

    function: str
    fault: str

    def planted(self) -> AbstractContextManager[None]:
        """Return the context in which the fault is planted. Imports the module of the function.

        Raises:
            ValueError: the function knows no such fault.
        """
        module, _, name = self.function.partition(":")
        plant: Any = getattr(importlib.import_module(module), name)
        context: AbstractContextManager[None] = plant(self.fault)
        return context
