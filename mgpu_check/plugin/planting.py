"""Plant a fault around each call of a rank. The plugin has no faults; it knows what plants them by name."""

from __future__ import annotations

import pkgutil
from contextlib import AbstractContextManager
from dataclasses import dataclass


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
        context: AbstractContextManager[None] = pkgutil.resolve_name(self.function)(self.fault)
        return context
