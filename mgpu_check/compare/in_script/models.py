"""Name the parameters and modules of the models that the script trains, and describe the models for the trace.

Parameters are named in the script's process, from the modules that own them. Modules that are never called are named
after those that contain called modules. An example is an expert in a `ModuleDict` that received no token. Python's
garbage collector lists all modules.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from mgpu_check.processes.collective_records import relative
from mgpu_check.torch_hooks.nested import named_buffers, named_modules, named_parameters
from mgpu_check.torch_hooks.tensors import is_distributed, name_of

_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)


class Surroundings:
    """The modules that exist now, and their relations.
    `Names` makes it when a name is missing, and drops it after the lookup: it refers to all modules of the process."""

    def __init__(self) -> None:
        self._parents: dict[int, list[nn.Module]] = defaultdict(list)
        self._owners: dict[int, nn.Module] = {}
        kinds = _subclasses(nn.Module)  # a set is faster than `issubclass` for each of a million objects
        for module in [candidate for candidate in gc.get_objects() if type(candidate) in kinds]:
            for child in vars(module).get("_modules", {}).values():
                if child is not None:
                    self._parents[id(child)].append(module)
            for parameter in vars(module).get("_parameters", {}).values():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), module)

    def roots(self, called: Sequence[nn.Module]) -> list[nn.Module]:
        """Return the modules that parameters of called modules are named from, each once.
        For a called module, this is the highest module that contains several called ones. If there is no such module,
        it is the outermost `ModuleList` or `ModuleDict` around it, or the called module itself."""
        above = [self._ancestors(module) for module in called]
        counts = Counter(number for ancestors in above for number in ancestors)
        roots: dict[int, nn.Module] = {}
        for module, ancestors in zip(called, above, strict=True):
            together = [ancestor for number, ancestor in ancestors.items() if counts[number] > 1]
            root = together[-1] if together else module
            while not together:
                parents = self._parents.get(id(root), ())
                outer = next((parent for parent in parents if isinstance(parent, _NEVER_CALLED)), None)
                if outer is None:
                    break
                root = outer
            roots.setdefault(id(root), root)
        return list(roots.values())

    def top_of(self, parameter: torch.Tensor) -> list[nn.Module]:
        """Return the highest module that contains a parameter; empty if no module has it."""
        owner = self._owners.get(id(parameter))
        return [] if owner is None else [owner, *self._ancestors(owner).values()][-1:]

    def _ancestors(self, module: nn.Module) -> dict[int, nn.Module]:
        ancestors: dict[int, nn.Module] = {}
        next_ = list(self._parents.get(id(module), ()))
        while next_:
            fresh = [parent for parent in next_ if id(parent) not in ancestors and parent is not module]
            ancestors.update((id(parent), parent) for parent in fresh)
            next_ = [outer for parent in fresh for outer in self._parents.get(id(parent), ())]
        return ancestors


def _subclasses(base: type) -> set[type]:
    subclasses, rest = {base}, [base]
    while rest:
        fresh: set[type] = set(rest.pop().__subclasses__()) - subclasses
        subclasses |= fresh
        rest += fresh
    return subclasses


_INNER = {
    "DistributedDataParallel": ("module",),
    "DataParallel": ("module",),
    "FullyShardedDataParallel": ("_fsdp_wrapped_module",),
    "CheckpointWrapper": ("_checkpoint_wrapped_module",),
    "OptimizedModule": ("_orig_mod",),
    "DeepSpeedEngine": ("module",),
}
"""Class name of a wrapper -> the attributes that may hold the wrapped model. In torch 2.13 the private ones are in
torch/distributed/fsdp/_common_utils.py, torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py, and
torch/_dynamo/eval_frame.py."""


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the user's own module without the wrappers of torch."""
    while True:
        # Compared with None: the truth value of a module with __len__ would call it.
        attributes = _INNER.get(type(module).__name__, ())
        inner = next((getattr(module, name) for name in attributes if getattr(module, name, None) is not None), None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


class Names:
    """The models that a script calls, and the names of their parameters.

    `ScriptRecorder` makes it once, and reports each outermost call. `Parameters`, `States` and `OutputRecorder` ask it
    for names until the process ends. It refers to models weakly.

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
        if parameter is not None and id(parameter) not in self._names:
            self._learn_of(self._around.top_of(parameter))

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
        while (unique := tried.pop(0)) in self._taken:
            if not tried:
                tried.append(f"{model or 'parameter'}#{number}.{name}")
                number += 1
        self._taken.add(unique)
        return unique


def in_training(module: nn.Module) -> bool:
    """Return whether a model is in training mode: its wrapper may have another mode, as that of Lightning."""
    return unwrapped(module).training


def is_fully_sharded(module: nn.Module, meshes: Iterable[Any], world: int) -> bool:
    """Return whether FSDP divides the parameters among all ranks, and nothing else divides them.

    `meshes`: those of the parameters that optimizers train. With tensor parallelism they have two dimensions.
    """
    classes = [type(layer) for _, layer in named_modules(module)]
    sizes = {mesh.size() if mesh.ndim == 1 else 0 for mesh in meshes}
    if any(cls.__name__ == "FSDPModule" for layer_class in classes for cls in layer_class.__mro__):
        return sizes == {world}
    group = getattr(module, "process_group", None) if classes[0].__name__ == "FullyShardedDataParallel" else None
    return group is not None and not sizes and group.size() == world


def described(module: nn.Module) -> dict[str, Any]:
    """Return the class of a model, its wrapper, and its layers that use batch statistics or dropout."""
    model = unwrapped(module)
    wrapper = type(module).__name__ if model is not module else None
    batch_norms, dropouts = set(), set()
    for _, layer in named_modules(model):
        name, p = type(layer).__name__, vars(layer).get("p")
        if "BatchNorm" in name and name != "SyncBatchNorm" and layer.training:
            batch_norms.add(name)
        if "Dropout" in name and isinstance(p, (int, float)) and p:
            dropouts.add(f"{name}(p={p:g})")
    return {
        "model": type(model).__name__,
        "wrapper": wrapper,
        "replicas": len(vars(module).get("device_ids") or ()) if wrapper == "DataParallel" else 1,
        "broadcasts": wrapper == "DistributedDataParallel" and bool(getattr(module, "broadcast_buffers", False)),
        "batch_norms": sorted(batch_norms),
        "dropouts": sorted(dropouts),
    }


def has_state(module: nn.Module) -> bool:
    """Return whether a module has parameters or buffers: transformations of data and losses have neither."""
    return next(itertools.chain(named_parameters(module), named_buffers(module)), None) is not None


def narrowed(module: nn.Module, output: Any) -> dict[str, str]:
    """Return the dtype of an output that is narrower than float32, and the class of its module; else nothing."""
    plain = isinstance(output, torch.Tensor) and output.is_floating_point() and not is_distributed(output)
    if not plain or output.element_size() >= 4:
        return {}
    return {"dtype": name_of(output.dtype), "module": type(module).__name__}


def method_of(owner: type, name: str) -> dict[str, str]:
    """Return the name and the line of a method, such as a model's forward."""
    code = getattr(inspect.unwrap(getattr(owner, name)), "__code__", None)
    line = f"{relative(code.co_filename)}:{code.co_firstlineno}" if code else "of no file"
    return {"what": f"{owner.__name__}.{name}", "line": line}
