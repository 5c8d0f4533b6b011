"""Find the modules that contain called modules, in the script's process, to name modules that are never called.

An example is an expert in a `ModuleDict` that received no token. Python's garbage collector lists all modules.
"""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import nn

_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)


class Surroundings:
    """The modules that exist now, and their relations."""

    def __init__(self) -> None:
        self._parents: dict[int, list[nn.Module]] = defaultdict(list)
        self._owners: dict[int, nn.Module] = {}
        kinds = _subclasses(nn.Module)  # a set is faster than `issubclass` for each of a million objects
        for module in [one for one in gc.get_objects() if type(one) in kinds]:
            for child in vars(module).get("_modules", {}).values():
                if child is not None:
                    self._parents[id(child)].append(module)
            for parameter in vars(module).get("_parameters", {}).values():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), module)

    def roots(self, called: Sequence[nn.Module]) -> list[nn.Module]:
        """Return the modules that parameters of called modules are named from, each once.

        For a called module, this is the highest module that contains several called ones. If there is no such module,
        it is the outermost `ModuleList` or `ModuleDict` around it, or the called module itself.
        """
        above = [self._ancestors(module) for module in called]
        counts = Counter(number for some in above for number in some)
        found: dict[int, nn.Module] = {}
        for module, some in zip(called, above, strict=True):
            together = [one for number, one in some.items() if counts[number] > 1]
            root = together[-1] if together else self._container(module)
            found.setdefault(id(root), root)
        return list(found.values())

    def top_of(self, parameter: torch.Tensor) -> nn.Module | None:
        """Return the highest module that contains a parameter; None if no module has it."""
        owner = self._owners.get(id(parameter))
        return None if owner is None else next(reversed(self._ancestors(owner).values()), owner)

    def _container(self, module: nn.Module) -> nn.Module:
        while (outer := _first(self._parents.get(id(module), ()))) is not None:
            module = outer
        return module

    def _ancestors(self, module: nn.Module) -> dict[int, nn.Module]:
        """Return the modules that contain a module, nearest first, by id."""
        found: dict[int, nn.Module] = {}
        next_ = list(self._parents.get(id(module), ()))
        while next_:
            fresh = [one for one in next_ if id(one) not in found and one is not module]
            found.update((id(one), one) for one in fresh)
            next_ = [outer for one in fresh for outer in self._parents.get(id(one), ())]
        return found


def _subclasses(kind: type) -> set[type]:
    found, rest = {kind}, [kind]
    while rest:
        fresh: set[type] = set(rest.pop().__subclasses__()) - found
        found |= fresh
        rest += fresh
    return found


def _first(parents: Iterable[nn.Module]) -> nn.Module | None:
    return next((one for one in parents if isinstance(one, _NEVER_CALLED)), None)
