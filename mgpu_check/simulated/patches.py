"""Replace attributes of torch while a simulation is active, and put every one of them back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

__all__ = ["Patches"]

_ABSENT = object()


class Patches:
    """A list of replacements with an exact undo.

    ``set`` replaces one attribute of one owner. ``replace`` replaces an object by another under every name that any
    loaded module has for it, so that ``from torch import randn`` of a module loaded earlier is covered too; names that
    are bound while the simulation is active are taken back as well.
    """

    def __init__(self) -> None:
        self._undo: list[tuple[object, str, object]] = []
        self._new_of: dict[int, object] = {}
        self._old_of: dict[int, object] = {}
        self._at_exit: list[Callable[[], object]] = []

    def set(self, owner: object, name: str, value: object) -> None:
        """Set ``owner.name``, remembering whether the owner itself (not a base class) had it before."""
        self._undo.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def replace(self, old: object, new: object) -> None:
        """Let ``new`` stand for ``old`` in the namespaces of all loaded modules, from the next ``apply`` on."""
        self._new_of[id(old)] = new
        self._old_of[id(new)] = old

    def replaced(self) -> list[tuple[int, object]]:
        """Return the ``id`` of each object that is replaced, and what stands for it."""
        return list(self._new_of.items())

    def changed(self, owner: object) -> frozenset[str]:
        """Return which attributes of ``owner`` have been set."""
        return frozenset(name for other, name, _ in self._undo if other is owner)

    def at_exit(self, call: Callable[[], object]) -> None:
        """Call this when the patches are undone, before anything is put back."""
        self._at_exit.append(call)

    def apply(self) -> None:
        for module, name, value in _names(self._new_of):
            setattr(module, name, value)

    def undo(self) -> None:
        """Put everything back, also where one of the calls of ``at_exit`` raises."""
        try:
            for call in reversed(self._at_exit):
                call()
        finally:
            for owner, name, value in reversed(self._undo):
                if value is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, value)
            for module, name, value in _names(self._old_of):
                setattr(module, name, value)


def _names(mapping: dict[int, object]) -> list[tuple[ModuleType, str, object]]:
    found = []
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.startswith("mgpu_check.simulated"):
            continue
        for name, value in list(vars(module).items()):
            other = mapping.get(id(value), _ABSENT)
            if other is not _ABSENT:
                found.append((module, name, other))
    return found
