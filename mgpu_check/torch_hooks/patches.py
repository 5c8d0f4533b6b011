"""Replace attributes of torch, of Python or of recipes, and put every one of them back. Imports no torch.

`unittest.mock` replaces single attributes; here an object is replaced under all names that modules have for it, too.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

__all__ = ["Patches", "replaced"]

_ABSENT = object()


class Patches:
    """A list of replacements with an exact undo, in reverse order. Where they are to last, nobody calls `undo`.

    `set` and `wrap` replace one attribute of one owner. `replace` replaces an object by another under every name that a
    loaded module has for it, so that ``from torch import randn`` of a module loaded earlier is covered too; names that
    are bound before the undo are taken back as well.
    """

    def __init__(self, *, among: str = "", sparing: str | None = None) -> None:
        """Begin without any.

        Args:
            among: how the names of the modules begin in which `replace` looks for names of an object.
            sparing: how the names of those begin that keep the object itself.
        """
        self._among, self._sparing = among, sparing
        self._undo: list[tuple[object, str, object]] = []
        self._new_of: dict[int, object] = {}
        self._old_of: dict[int, object] = {}
        self._at_exit: list[Callable[[], object]] = []

    def set(self, owner: object, name: str, value: object) -> None:
        """Set ``owner.name``, remembering whether the owner itself (not a base class) had it before."""
        self._undo.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def wrap(self, owner: object, name: str, around: Callable[[Any], Any]) -> None:
        """Set ``owner.name`` to ``around(function)``, where the function is what it is now.

        A static method stays one, and so does a class method, whose function takes the class.
        """
        found = inspect.getattr_static(owner, name) if isinstance(owner, type) else None
        if isinstance(found, (staticmethod, classmethod)):
            self.set(owner, name, type(found)(around(found.__func__)))
        else:
            self.set(owner, name, around(getattr(owner, name)))

    def replace(self, old: object, new: object) -> None:
        """Let `new` stand for `old` in the namespaces of loaded modules, from the next `apply` on."""
        self._new_of[id(old)] = new
        self._old_of[id(new)] = old

    def replaced(self) -> list[tuple[int, object]]:
        """Return the ``id`` of each object that is replaced, and what stands for it."""
        return list(self._new_of.items())

    def changed(self, owner: object) -> frozenset[str]:
        """Return which attributes of `owner` have been set."""
        return frozenset(name for other, name, _ in self._undo if other is owner)

    def at_exit(self, call: Callable[[], object]) -> None:
        """Call this when the patches are undone, before anything is put back."""
        self._at_exit.append(call)

    def apply(self) -> None:
        """Put what `replace` was told in place."""
        for module, name, value in self._names(self._new_of):
            setattr(module, name, value)

    def undo(self) -> None:
        """Put everything back, also where one of the calls of `at_exit` raises."""
        try:
            for call in reversed(self._at_exit):
                call()
        finally:
            for owner, name, value in reversed(self._undo):
                if value is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, value)
            for module, name, value in self._names(self._old_of):
                setattr(module, name, value)

    def _names(self, mapping: dict[int, object]) -> list[tuple[ModuleType, str, object]]:
        found = []
        for module in list(sys.modules.values()) if mapping else ():
            if not isinstance(module, ModuleType) or not module.__name__.startswith(self._among):
                continue
            if self._sparing is not None and module.__name__.startswith(self._sparing):
                continue
            for name, value in list(vars(module).items()):
                other = mapping.get(id(value), _ABSENT)
                if other is not _ABSENT:
                    found.append((module, name, other))
        return found


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set attribute `name` of `owner` to `value`, and back on exit; one that was inherited is inherited again.

    Raises:
        AttributeError: `owner` has no such attribute.
    """
    getattr(owner, name)
    patches = Patches()
    patches.set(owner, name, value)
    try:
        yield
    finally:
        patches.undo()
