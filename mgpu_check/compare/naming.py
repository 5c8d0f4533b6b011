"""Name parameters in the script's process, from the modules that own them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from mgpu_check.compare.surroundings import Surroundings
from mgpu_check.torch_hooks.nested import named_modules

_INNER = {
    "DistributedDataParallel": ("module",),
    "DataParallel": ("module",),
    "FullyShardedDataParallel": ("_fsdp_wrapped_module",),
    "CheckpointWrapper": ("_checkpoint_wrapped_module",),
    "OptimizedModule": ("_orig_mod",),
}
"""Class name of a wrapper -> the attributes that may hold the wrapped model."""


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the user's own module without the wrappers of torch."""
    while True:
        # Compared with None: the truth value of a module with __len__ would call it.
        names = _INNER.get(type(module).__name__, ())
        inner = next((getattr(module, name) for name in names if getattr(module, name, None) is not None), None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


class Names:
    """The models that a script calls, and the names of their parameters.

    A parameter has its name in its model. If two models share a name, the name in the later model is preceded by the
    class of that model.
    """

    def __init__(self) -> None:
        self._models: list[weakref.ref[nn.Module]] = []
        self._seen: set[int] = set()
        self._names: dict[int, tuple[str, int]] = {}
        self._owners: dict[int, weakref.ref[nn.Module]] = {}
        self._prefixes: dict[int, tuple[str, str]] = {}
        self._of_keys: dict[tuple[int, str], tuple[str, int]] = {}
        self._taken: set[str] = set()
        self._around: Surroundings | None = None
        self._looked_for = 0  # number of models when `_around` was made

    def look_around(self) -> None:
        """Forget the modules around the called ones. The next missing name makes it find them again."""
        self._around, self._looked_for = None, 0

    def called(self, module: nn.Module) -> None:
        """Record that an outermost module was called."""
        if id(module) not in self._seen:
            self._seen.add(id(module))
            self._models.append(weakref.ref(module))

    def name(self, parameter: torch.Tensor, otherwise: str) -> tuple[str, int]:
        """Return the name of a parameter and its place in the model; `otherwise` if no called module has it."""
        if id(parameter) not in self._names:
            self._learn(parameter)
        if id(parameter) not in self._names:
            self._names[id(parameter)] = self._unique(otherwise, ""), 10**6 + len(self._names)
        return self._names[id(parameter)]

    def of_key(self, module: nn.Module, key: str) -> tuple[str, int] | None:
        """Return name and place of the parameter that a module had under a key; None outside of all models."""
        if id(module) not in self._prefixes:
            self._learn()
        if id(module) not in self._prefixes:
            return None
        if (id(module), key) not in self._of_keys:
            prefix, model = self._prefixes[id(module)]
            self._of_keys[id(module), key] = self._unique(prefix + key, model), len(self._names) + len(self._of_keys)
        return self._of_keys[id(module), key]

    def owner(self, parameter: torch.Tensor) -> nn.Module | None:
        """Return the module that owns a named parameter; None if unknown."""
        reference = self._owners.get(id(parameter))
        return None if reference is None else reference()

    def modules(self) -> Iterator[nn.Module]:
        """Yield all modules of the models, with their wrappers."""
        for reference in self._models:
            if (model := reference()) is not None:
                yield from (module for _, module in named_modules(model))

    def _learn(self, parameter: torch.Tensor | None = None) -> None:
        if self._around is None or self._looked_for != len(self._models):
            models = [model for reference in self._models if (model := reference()) is not None]
            self._around, self._looked_for = Surroundings(), len(self._models)
            self._learn_of(self._around.roots(models))
        if parameter is None or id(parameter) in self._names:
            return
        if (top := self._around.top_of(parameter)) is not None:
            self._learn_of([top])

    def _learn_of(self, models: Iterable[nn.Module]) -> None:
        for model in models:
            name = type(unwrapped(model)).__name__
            for path, module in named_modules(model, unwrapped):
                prefix = f"{path}." if path else ""
                self._prefixes.setdefault(id(module), (prefix, name))
                for key, parameter in module._parameters.items():
                    if parameter is not None and id(parameter) not in self._names:
                        self._names[id(parameter)] = self._unique(prefix + key, name), len(self._names)
                        self._owners[id(parameter)] = weakref.ref(module)

    def _unique(self, name: str, model: str) -> str:
        tried = [name, *([f"{model}.{name}"] if model else [])]
        number = 2
        while (made := tried.pop(0)) in self._taken:
            if not tried:
                tried.append(f"{model or 'parameter'}#{number}.{name}")
                number += 1
        self._taken.add(made)
        return made
