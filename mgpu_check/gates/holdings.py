"""Trace the tensors of a rank to the parameters and buffers of the built model.

A step may replace parameters by shards, keep one stage of several, rebuild modules, or train flat buffers. Each tensor
that it holds in the end is traced to the tensor, or to the slice of it, that one device holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from mgpu_check.gates.program import Unusable
from mgpu_check.numerics.placement.content import Wholes
from mgpu_check.numerics.placement.declared import Coordinates, Placement, by_attributes, by_user, is_of_expert
from mgpu_check.numerics.placement.distinct import make_distinct
from mgpu_check.numerics.placement.flat_parameters import flat_ranges, local_ranges
from mgpu_check.numerics.placement.slices import Slice, Unplaced
from mgpu_check.torch_hooks.members import named_modules, named_parameters
from mgpu_check.torch_hooks.tensors import copied, plain_copy

_Kind = Literal["params", "buffers"]


@dataclass(frozen=True)
class Held:
    """A tensor that a rank holds at the end.

    Attributes:
        label: its name in the model now, or its place in an optimizer.
        whole: name of the built tensor that it is, with the same shape; None if it is not a whole one.
        slices: the slices of built tensors that it consists of, perhaps empty; None if it is a whole built tensor, or
            if its placement is unknown.
        reason: why its placement is unknown; None if it is known.
        copy: an optimizer trains it, but the model uses another tensor in its place.
        idle: it is a parameter that no optimizer of this rank steps, although they step others.
        replaced: an optimizer steps another tensor that has some of its elements.
        local: it is a DTensor, and only its part on this rank was placed.
        outside: it is not part of the model that is compared: a replica that is trained beside the model, or a tensor
            that the built model does not have.
        late: its optimizer was made for a later step than the first.
    """

    kind: _Kind
    label: str
    tensor: torch.Tensor
    whole: str | None = None
    slices: tuple[Slice, ...] | None = None
    reason: Unplaced | None = None
    copy: bool = False
    idle: bool = False
    replaced: bool = False
    local: bool = False
    outside: bool = False
    late: bool = False

    def copy_of(self, value: Any) -> torch.Tensor:
        """Return a copy of the tensor, its gradient or its state; of a DTensor placed locally, the local part."""
        if not self.local or not hasattr(value, "to_local"):
            return plain_copy(value)
        whole: Any = self.tensor
        same = value.placements == whole.placements
        return plain_copy((value if same else value.redistribute(placements=whole.placements)).to_local())

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor that `copy_of` returns."""
        return _here(self.tensor).shape if self.local else self.tensor.shape

    @property
    def wholes(self) -> set[str]:
        """The names of the built tensors that it is part of; its own label if it is placed in none."""
        return {self.whole or self.label} if self.slices is None else {part.whole for part in self.slices}


class Holdings:
    """The tensors of a built model, and the tensors that a rank holds in place of these.

    Args:
        modules: the modules as built, by the prefix of their names.
        placement: the placement that the user declares; see `by_user`.
        coordinates: the coordinates of this rank in the mesh and the world.
        rebuilt: builds a fresh copy of the model in the precision of this run.
        located: the tensors of optimizers that the unperturbed run placed, by label; None in that run. The values of a
            perturbed run match no other tensor.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        rank: Any,
        placement: Placement,
        coordinates: Coordinates,
        rebuilt: Callable[[], Mapping[str, nn.Module]],
        located: Mapping[str, Held] | None = None,
    ) -> None:
        self._modules, self._rank, self._placement, self._coordinates = modules, rank, placement, coordinates
        self._rebuilt, self._located = rebuilt, located
        self._built: dict[int, str] = {}
        self._names: set[tuple[int, str]] = set()
        self._kinds: dict[str, _Kind] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._origins: dict[tuple[int, str], str] = {}
        self._kept: list[object] = []  # so that no other object gets the id of one that is gone
        for kind, name, tensor, module, key in named_tensors(modules, aliases=True):
            self._kept += [tensor, module]
            self._origins[id(module), key] = name
            self._built.setdefault(id(tensor), name)
            self._names.add((id(tensor), name))
            self._kinds[name], self._shapes[name] = kind, tuple(tensor.shape)
        self._called: dict[int, nn.Module] = {}
        self._firsts: dict[int, torch.Tensor] = {}
        self._stepped: dict[int, tuple[str, torch.Tensor]] = {}
        self._optimizers: set[int] = set()
        self._in_modules: set[int] = set()  # ids of the parameters of called modules
        self._late: set[int] = set()
        # On one device: the built tensors with their perturbed values, once a tensor outside of the model is seen.
        self._moved: Wholes | None = None

    def calls(self, module: nn.Module) -> None:
        if id(module) in self._called:
            return
        self._called[id(module)] = module
        self._in_modules.update(map(id, module._parameters.values()))
        for tensor in module._parameters.values():
            if tensor is not None and self.is_foreign(tensor):
                self._keep(tensor)

    def steps(self, optimizer: Optimizer, late: bool) -> None:
        """Record the parameters of an optimizer that is about to step; do nothing at its later steps.

        A parameter that is not a built tensor is also copied, because it still has its initial value. The copy shows
        which slices of built tensors it consists of.

        Args:
            late: the first call of the step under test has ended.
        """
        if id(optimizer) in self._optimizers:
            return
        self._kept.append(optimizer)
        number = len(self._optimizers)
        self._optimizers.add(id(optimizer))
        which = f" of optimizer {number}" if number else ""
        for index, group in enumerate(optimizer.param_groups):
            for position, tensor in enumerate(group["params"]):
                self._stepped[id(tensor)] = f"parameter {position} of group {index}{which}", tensor
                if late:
                    self._late.add(id(tensor))
                if self.is_foreign(tensor):
                    self._keep(tensor)

    def is_foreign(self, tensor: torch.Tensor) -> bool:
        name = self._built.get(id(tensor))
        return name is None or tuple(tensor.shape) != self._shapes[name]

    def _keep(self, tensor: torch.Tensor) -> None:
        self._kept.append(tensor)
        if tensor.layout != torch.strided or not _is_there(tensor):
            return
        with _disable_current_modes():  # a mode would perturb the copies
            self._firsts[id(tensor)] = copied(_here(tensor))
            if self._moved is None and self._rank.size == 1:
                self._moved = _wholes_of(self._modules)

    def is_late(self, tensor: torch.Tensor) -> bool:
        """Return whether an optimizer that was made for a later step than the first trains a tensor."""
        return id(tensor) in self._late

    def is_beside_model(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is trained by an optimizer, and is no tensor of the model."""
        return self._is_stepped(tensor) and all(tensor is not now for _, now in parameters_of(self._modules))

    def now(self) -> Iterator[torch.Tensor]:
        seen: set[int] = set()
        for module in self._modules.values():
            for _, tensor in named_parameters(module):
                seen.add(id(tensor))
                yield tensor
        yield from (one for number, (_, one) in self._stepped.items() if number not in seen and _is_there(one))

    def held(self) -> list[Held]:
        """Return the tensors of the model and of the optimizers that the rank holds, each with its placement."""
        found = [
            self._placed(kind, name, tensor, self._origin(tensor, module, key, name))
            for kind, name, tensor, module, key in named_tensors(self._modules)
        ]
        known = {id(one.tensor) for one in found}
        flat = {id(view) for one in found for view in getattr(one.tensor, "_params", None) or ()}
        owned = {one.whole for one in found if one.whole is not None and self._is_stepped(one.tensor)}
        used = self._used().union(*(one.wholes for one in found if one.tensor.grad is not None))
        mine = used.intersection(set().union(*(one.wholes for one in found)))
        in_model = {one.whole: one.tensor for one in found if one.whole is not None}
        for number, (label, tensor) in self._stepped.items():
            if number in known or number in flat or not _is_there(tensor):
                continue
            if self._located is not None:
                if label in self._located:
                    found.append(replace(self._located[label], tensor=tensor))
                continue
            one = self._placed("params", label, tensor, "")
            if one.reason is not None:
                found.append(replace(one, outside=True, late=self.is_late(tensor)))
            # A second copy of a trained tensor, such as a teacher's, is judged by the first copy.
            elif not one.wholes or not owned.issuperset(one.wholes):
                replica = one.whole is not None and self._is_replica(tensor, in_model.get(one.whole))
                found.append(replace(one, copy=replica or one.wholes <= mine, outside=replica))
        stepped = set().union(*(one.wholes for one in found if self._is_stepped(one.tensor)))
        return [self._beside(stepped, one) for one in found]

    def _is_replica(self, tensor: torch.Tensor, in_model: torch.Tensor | None) -> bool:
        """Return whether a copy of the model is trained beside the model, whose own tensor changes too.

        Local SGD, federated averaging and DiLoCo train such replicas. Master weights are used in no module, and a copy
        that is trained in place of the model leaves the model as it was.
        """
        first = self._firsts.get(id(tensor))
        if in_model is None or first is None or id(tensor) not in self._in_modules or hasattr(in_model, "to_local"):
            return False
        return not torch.equal(first, copied(in_model))

    def _beside(self, stepped: set[str], one: Held) -> Held:
        """Return the tensor with `idle` and `replaced` set, which depend on the built tensors that optimizers step."""
        mine = self._is_stepped(one.tensor)
        idle = one.kind == "params" and bool(stepped) and one.tensor.requires_grad and not one.wholes & stepped
        return replace(one, idle=idle, replaced=not mine and bool(one.wholes & stepped))

    def unused(self, touched: Iterable[str]) -> set[str]:
        """Return the unused parameters and buffers: no module with them was called, and they are not in `touched`.

        Args:
            touched: names of parameters and buffers that have a gradient, or that differ from their initial value.
        """
        return set(self._shapes) - self._used() - set(touched)

    def _used(self) -> set[str]:
        """Return the built tensors that a called module has, or had before they were replaced."""
        used: set[str] = set()
        for module in self._called.values():
            for key in (*module._parameters, *module._buffers):
                if (name := self._origins.get((id(module), key))) is not None:
                    used.add(name)
            used.update(self._built[id(one)] for one in module._parameters.values() if id(one) in self._built)
        return used

    def _is_stepped(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._stepped

    def _origin(self, tensor: torch.Tensor, module: nn.Module, key: str, name: str) -> str:
        if (id(tensor), name) in self._names:
            return name
        return self._built.get(id(tensor)) or self._origins.get((id(module), key)) or name

    def _placed(self, kind: _Kind, label: str, tensor: torch.Tensor, origin: str) -> Held:
        as_built = self._shapes.get(origin) == tuple(tensor.shape) and self._kinds[origin] == kind
        if as_built and self._rank.size == 1:
            return Held(kind, label, tensor, origin)  # declarations apply to several ranks only
        if self._placement is not None and kind == "params":
            try:
                declared = by_user(self._placement, label, self._rank, self._coordinates, self._shapes)
            except ValueError as error:
                raise Unusable(str(error)) from None
            if declared is not None:
                return self._as_declared(kind, label, tensor, declared)
        if as_built:
            return Held(kind, label, tensor, self._expert(tensor, origin))
        local = hasattr(tensor, "to_local")
        declared = self._by_library(tensor, origin)
        slices = self._by_content(tensor, origin or label) if declared is None else declared
        if isinstance(slices, Unplaced):
            unlike = local and slices is Unplaced.NOWHERE
            return Held(kind, label, tensor, reason=Unplaced.OF_OTHER_SHAPE if unlike else slices, local=local)
        if len(slices) == 1 and slices[0].at is None and slices[0].within is None:
            return Held(kind, label, tensor, slices[0].whole, local=local)
        return Held(kind, label, tensor, slices=tuple(slices), local=local)

    def _expert(self, tensor: torch.Tensor, origin: str) -> str:
        """Return the name of the built tensor; for an expert that was rebuilt, find it by values, not by name."""
        if not is_of_expert(tensor) or not self.is_foreign(tensor) or hasattr(tensor, "to_local"):
            return origin
        found = self._by_content(tensor, origin)
        alone = isinstance(found, list) and len(found) == 1 and found[0].at is None and found[0].within is None
        return found[0].whole if isinstance(found, list) and alone else origin

    def _as_declared(self, kind: _Kind, label: str, tensor: torch.Tensor, declared: list[Slice]) -> Held:
        (part,) = declared
        count = tensor.numel() if part.at is None else len(part.at)
        if part.at is None and tuple(tensor.shape) == part.shape:
            return Held(kind, label, tensor, part.whole)
        if count != tensor.numel() or part.at is None:
            raise Unusable(
                f"placement of {label!r} selects {count if part.at is not None else 'all'} elements of "
                f"{part.whole} with shape {list(part.shape)}, but rank {self._rank.index} holds shape "
                f"{list(tensor.shape)}; declare the slice that it holds"
            )
        return Held(kind, label, tensor, slices=(part,))

    def _by_library(self, tensor: torch.Tensor, origin: str) -> list[Slice] | None:
        ranges = flat_ranges(tensor)
        if ranges is not None:
            names = [self._origins.get((id(module), key)) for module, key in ranges.owners]
            if None not in names:
                return [
                    Slice(name, self._shapes[name], at, within)
                    for name, (at, within) in zip(names, ranges.parts, strict=True)
                    if name is not None and at is not None
                ]
        if origin in self._shapes:
            ranges_here = local_ranges(tensor, self._called.values())
            if ranges_here is not None:
                at, _ = ranges_here
                return [Slice(origin, self._shapes[origin], at)] if len(at) else []
            return by_attributes(tensor, origin, self._shapes[origin], self._coordinates)
        return None

    def _by_content(self, tensor: torch.Tensor, hint: str) -> list[Slice] | Unplaced:
        first, now = self._firsts.get(id(tensor)), _here(tensor)
        if first is None or first.shape != now.shape:
            first = copied(now)
        found = self._wholes.find(first, hint)
        if isinstance(found, Unplaced) and self._moved is not None:
            return self._moved.find(first, hint)
        return found

    @functools.cached_property
    def _wholes(self) -> Wholes:
        return _wholes_of(self._rebuilt())


def _is_there(tensor: torch.Tensor) -> bool:
    """Return whether a tensor still has memory: FSDP frees the memory of whole parameters, and keeps the tensors."""
    if tensor.is_meta or not tensor.numel() or hasattr(tensor, "full_tensor"):
        return not tensor.is_meta
    return tensor.untyped_storage().size() > 0


def named_tensors(
    modules: Mapping[str, nn.Module], aliases: bool = False
) -> Iterator[tuple[_Kind, str, torch.Tensor, nn.Module, str]]:
    """Yield each parameter and buffer of modules named by prefixes: kind, name, tensor, its module, its key.

    Args:
        aliases: also yield a tensor that a module has under several names once for each.
    """
    kinds: tuple[tuple[_Kind, str], ...] = (("params", "_parameters"), ("buffers", "_buffers"))
    for prefix, module in modules.items():
        inside = list(named_modules(module))
        seen: set[int] = set()
        for kind, where in kinds:
            for path, part in inside:
                for key, tensor in getattr(part, where).items():
                    if tensor is not None and (aliases or id(tensor) not in seen):
                        seen.add(id(tensor))
                        yield kind, prefix + (f"{path}.{key}" if path else key), tensor, part, key


def parameters_of(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter of modules that are named by prefixes: its name, its value."""
    return ((name, value) for kind, name, value, _, _ in named_tensors(modules) if kind == "params")


def _here(tensor: Any) -> torch.Tensor:
    """Return the part of a DTensor that this rank has; any other tensor itself."""
    here: torch.Tensor = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor
    return here


def _wholes_of(modules: Mapping[str, nn.Module]) -> Wholes:
    dense = [(name, one) for _, name, one, _, _ in named_tensors(modules) if not hasattr(one, "full_tensor")]
    return Wholes({name: copied(one) for name, one in dense if not one.is_meta})


def moved_apart(modules: Mapping[str, nn.Module]) -> None:
    """Make the elements of floating-point parameters and saved buffers distinct, in place, always in the same way.

    Equal values, such as the zeros of a bias, do not show which slice a rank holds.
    """
    generator = torch.Generator().manual_seed(0)
    parts = [part for module in modules.values() for _, part in named_modules(module)]
    caches = {id(part._buffers[key]) for part in parts for key in part._non_persistent_buffers_set}
    for _, _, tensor, _, _ in named_tensors(modules):
        if id(tensor) not in caches and tensor.is_floating_point() and tensor.numel():
            make_distinct(tensor, float(tensor.detach().float().square().mean().sqrt()), generator)
