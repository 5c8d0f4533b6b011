"""The parameters, buffers and slices of them that ranks hold: trace them to the built model, and assemble wholes.

A step may replace parameters by shards, keep one stage of several, rebuild modules, or train flat buffers. Each tensor
that it holds in the end is traced to the tensor, or to the slice of it, that one device holds. The slices of all ranks
are put together for the comparison with the whole tensors of one device.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from mgpu_check.diagnosis.observations import HeldPiece, ObservedRun, Result
from mgpu_check.gates.gate_arguments import Unusable
from mgpu_check.numerics import placement as slicing
from mgpu_check.numerics.placement import Coordinates, Placement, Slice, Unplaced, Wholes
from mgpu_check.processes.rank_lists import named
from mgpu_check.torch_hooks.nested import named_modules, named_parameters
from mgpu_check.torch_hooks.tensors import copied, digest_of, local_part, plain_copy


def least_anywhere(counts: Sequence[tuple[torch.Tensor, int]]) -> list[int]:
    """Return for each tensor the smallest count among the ranks of its mesh; without a mesh, its own count.

    All ranks of a mesh must pass the same DTensors in the same order. Gathering a gradient or a state is a collective:
    if one rank skipped its step, the others would wait forever.
    """
    smallest = [count for _, count in counts]
    by_mesh: dict[int, tuple[Any, list[int]]] = {}
    for position, (tensor, _) in enumerate(counts):
        if (mesh := getattr(tensor, "device_mesh", None)) is not None:
            by_mesh.setdefault(id(mesh), (mesh, []))[1].append(position)
    for mesh, positions in by_mesh.values():
        least = torch.tensor([smallest[position] for position in positions], device=mesh.device_type)
        for dim in range(mesh.ndim):
            dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.get_group(dim))
        for position, count in zip(positions, least.tolist(), strict=True):
            smallest[position] = count
    return smallest


_Kind = Literal["params", "buffers"]


@dataclass(frozen=True)
class Held:
    """A tensor that a rank holds at the end.

    `Holdings.held` makes these after the last step; `step_runs` and `StepRecorder` read results from them.
    """

    kind: _Kind
    label: str  # its name in the model now, or its place in an optimizer
    tensor: torch.Tensor
    built_name: str | None = None  # the built tensor that it is, with the same shape; None if it is not a whole one
    # The slices of built tensors that it consists of; None if it is a whole built tensor, or its placement is unknown.
    slices: tuple[Slice, ...] | None = None
    reason: Unplaced | None = None  # why its placement is unknown; None if it is known
    copy: bool = False  # an optimizer trains it, but the model uses another tensor in its place
    idle: bool = False  # it is a parameter that no optimizer of this rank steps
    replaced: bool = False  # an optimizer steps another tensor that has some of its elements
    local: bool = False  # it is a DTensor, and only its part on this rank was placed
    outside: bool = False  # not part of the model: a replica beside it, or a tensor that the built model does not have
    late: bool = False  # its optimizer was made for a later step than the first

    def copy_of(self, value: Any) -> torch.Tensor:
        """Return a copy of the tensor, its gradient or its state; of a DTensor placed locally, the local part."""
        if not self.local or not hasattr(value, "to_local"):
            return plain_copy(value)
        dtensor: Any = self.tensor
        same = value.placements == dtensor.placements
        return plain_copy((value if same else value.redistribute(placements=dtensor.placements)).to_local())

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor that `copy_of` returns."""
        return local_part(self.tensor).shape if self.local else self.tensor.shape

    @property
    def wholes(self) -> set[str]:
        """The names of the built tensors that it is part of; its own label if it is placed in none."""
        return {piece.whole for piece in self.slices} if self.slices is not None else {self.built_name or self.label}


_WRAPPERS = re.compile(r"_(fsdp_wrapped_module|checkpoint_wrapped_module|orig_mod)\.")
"""Names that wrappers within a model add; compare's `in_script.models` says where torch defines them."""


class Holdings:
    """The tensors of a built model, and the tensors that a rank holds in place of these.

    `step_runs.observe` makes one before the step. During the step `StepRecorder` reports the modules that are called
    and the optimizers that step. After it, `observe` asks for the tensors; the holdings end with its call.

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
        for tensor_kind, name, tensor, module, key in named_tensors(modules, aliases=True):
            self._kept += [tensor, module]
            self._origins[id(module), key] = name
            self._built.setdefault(id(tensor), name)
            self._names.add((id(tensor), name))
            self._kinds[name], self._shapes[name] = tensor_kind, tuple(tensor.shape)
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
        which slices of built tensors it consists of. `late`: the first call of the step under test has ended.
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
            self._firsts[id(tensor)] = copied(local_part(tensor))
            if self._moved is None and self._rank.size == 1:
                self._moved = _wholes_of(self._modules)

    def is_late(self, tensor: torch.Tensor) -> bool:
        """Return whether an optimizer that was made for a later step than the first trains a tensor."""
        return id(tensor) in self._late

    def is_beside_model(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is trained by an optimizer, and is no tensor of the model."""
        return self._is_stepped(tensor) and all(tensor is not now for _, now in parameters_of(self._modules))

    def now(self) -> Iterator[torch.Tensor]:
        parameters = {id(tensor): tensor for module in self._modules.values() for _, tensor in named_parameters(module)}
        yield from parameters.values()
        others = (stepped for number, (_, stepped) in self._stepped.items() if number not in parameters)
        yield from filter(_is_there, others)

    def held(self) -> list[Held]:
        """Return the tensors of the model and of the optimizers that the rank holds, each with its placement."""
        held_tensors = []
        for tensor_kind, name, tensor, module, key in named_tensors(self._modules):
            origin = name
            if (id(tensor), name) not in self._names:
                origin = self._built.get(id(tensor)) or self._origins.get((id(module), key)) or _WRAPPERS.sub("", name)
            held_tensors.append(self._placed(tensor_kind, name, tensor, origin))
        ids_in_model = {id(holding.tensor) for holding in held_tensors}
        flat = {id(view) for holding in held_tensors for view in getattr(holding.tensor, "_params", None) or ()}
        built = [(holding.built_name, holding.tensor) for holding in held_tensors if holding.built_name is not None]
        in_model, owned = dict(built), {name for name, tensor in built if self._is_stepped(tensor)}
        with_gradient = (holding.wholes for holding in held_tensors if holding.tensor.grad is not None)
        mine = self._used().union(*with_gradient) & set().union(*(holding.wholes for holding in held_tensors))
        for number, (label, tensor) in self._stepped.items():
            if number in ids_in_model or number in flat or not _is_there(tensor):
                continue
            if self._located is not None:
                if label in self._located:
                    held_tensors.append(replace(self._located[label], tensor=tensor))
                continue
            holding = self._placed("params", label, tensor, "")
            if holding.reason is not None:
                held_tensors.append(replace(holding, outside=True, late=self.is_late(tensor)))
            # A second copy of a trained tensor, such as a teacher's, is judged by the first copy.
            elif not holding.wholes or not owned.issuperset(holding.wholes):
                replica = holding.built_name is not None and self._is_replica(tensor, in_model.get(holding.built_name))
                held_tensors.append(replace(holding, copy=replica or holding.wholes <= mine, outside=replica))
        stepped = set().union(*(holding.wholes for holding in held_tensors if self._is_stepped(holding.tensor)))
        return [self._beside(stepped, holding) for holding in held_tensors]

    def _is_replica(self, tensor: torch.Tensor, in_model: torch.Tensor | None) -> bool:
        """Return whether a copy of the model is trained beside it, as in local SGD, and its own tensor changes."""
        # Master weights are used in no module. A copy that is trained in place of the model leaves the model as it was.
        initial = self._firsts.get(id(tensor))
        if in_model is None or initial is None or id(tensor) not in self._in_modules:
            return False
        # The root of `fully_shard` stays gathered between steps, beside slices that may be the whole.
        if hasattr(in_model, "to_local") or hasattr(tensor, "to_local"):
            return False
        return not torch.equal(initial, copied(in_model))

    def _beside(self, stepped: set[str], holding: Held) -> Held:
        """Return the tensor with `idle` and `replaced` set, which depend on the built tensors that optimizers step."""
        common, trainable = holding.wholes & stepped, holding.kind == "params" and holding.tensor.requires_grad
        idle = trainable and not common
        return replace(holding, idle=idle, replaced=bool(common) and not self._is_stepped(holding.tensor))

    def unused(self, touched: Iterable[str]) -> set[str]:
        """Return the parameters and buffers that no called module has, and that have no gradient or change."""
        return set(self._shapes) - self._used() - set(touched)

    def _used(self) -> set[str]:
        """Return the built tensors that a called module has, or had before they were replaced."""
        built_names: set[str | None] = set()
        for module in self._called.values():
            built_names |= {self._origins.get((id(module), key)) for key in (*module._parameters, *module._buffers)}
            built_names |= {self._built.get(id(parameter)) for parameter in module._parameters.values()}
        return {name for name in built_names if name is not None}

    def _is_stepped(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._stepped

    def _placed(self, tensor_kind: _Kind, label: str, tensor: torch.Tensor, origin: str) -> Held:
        as_built = self._shapes.get(origin) == tuple(tensor.shape) and self._kinds[origin] == tensor_kind
        if as_built and self._rank.size == 1:
            return Held(tensor_kind, label, tensor, origin)  # declarations apply to several ranks only
        if self._placement is not None and tensor_kind == "params":
            try:
                declared = slicing.by_user(self._placement, label, self._rank, self._coordinates, self._shapes)
            except ValueError as error:
                raise Unusable(str(error)) from None
            if declared is not None:
                return self._as_declared(tensor_kind, label, tensor, declared)
        if as_built:
            return Held(tensor_kind, label, tensor, self._expert(tensor, origin))
        local = hasattr(tensor, "to_local")
        declared = self._by_library(tensor, origin)
        slices = self._by_content(tensor, origin or label) if declared is None else declared
        if isinstance(slices, Unplaced):
            unlike = local and slices is Unplaced.NOWHERE
            return Held(tensor_kind, label, tensor, reason=Unplaced.OF_OTHER_SHAPE if unlike else slices, local=local)
        if _is_one_whole(slices):
            return Held(tensor_kind, label, tensor, slices[0].whole, local=local)
        return Held(tensor_kind, label, tensor, slices=tuple(slices), local=local)

    def _expert(self, tensor: torch.Tensor, origin: str) -> str:
        """Return the name of the built tensor; for an expert that was rebuilt, find it by values, not by name."""
        if not slicing.is_of_expert(tensor) or not self.is_foreign(tensor) or hasattr(tensor, "to_local"):
            return origin
        slices = self._by_content(tensor, origin)
        return slices[0].whole if isinstance(slices, list) and _is_one_whole(slices) else origin

    def _as_declared(self, tensor_kind: _Kind, label: str, tensor: torch.Tensor, declared: list[Slice]) -> Held:
        (declared_slice,) = declared
        count = tensor.numel() if declared_slice.at is None else len(declared_slice.at)
        if declared_slice.at is None and tuple(tensor.shape) == declared_slice.shape:
            return Held(tensor_kind, label, tensor, declared_slice.whole)
        if count != tensor.numel() or declared_slice.at is None:
            raise Unusable(
                f"placement of {label!r} selects {count if declared_slice.at is not None else 'all'} elements of "
                f"{declared_slice.whole} with shape {list(declared_slice.shape)}, but rank {self._rank.index} holds "
                f"shape {list(tensor.shape)}; declare the slice that it holds"
            )
        return Held(tensor_kind, label, tensor, slices=(declared_slice,))

    def _by_library(self, tensor: torch.Tensor, origin: str) -> list[Slice] | None:
        ranges = slicing.flat_ranges(tensor)
        if ranges is not None:
            built_names = [self._origins.get((id(module), key)) for module, key in ranges.owners]
            if None not in built_names:
                return [
                    Slice(name, self._shapes[name], at, within)
                    for name, (at, within) in zip(built_names, ranges.parts, strict=True)
                    if name is not None and at is not None
                ]
        if origin not in self._shapes:
            return None
        if (ranges_here := slicing.local_ranges(tensor, self._called.values())) is not None:
            at, _ = ranges_here
            return [Slice(origin, self._shapes[origin], at)] if len(at) else []
        return slicing.by_attributes(tensor, origin, self._shapes[origin], self._coordinates)

    def _by_content(self, tensor: torch.Tensor, hint: str) -> list[Slice] | Unplaced:
        initial, now = self._firsts.get(id(tensor)), local_part(tensor)
        if initial is None or initial.shape != now.shape:
            initial = copied(now)
        slices = self._wholes.find(initial, hint)
        if isinstance(slices, Unplaced) and self._moved is not None:
            return self._moved.find(initial, hint)
        return slices

    @functools.cached_property
    def _wholes(self) -> Wholes:
        return _wholes_of(self._rebuilt())


def _is_one_whole(slices: Sequence[Slice]) -> bool:
    return len(slices) == 1 and slices[0].at is None and slices[0].within is None


def _is_there(tensor: torch.Tensor) -> bool:
    """Return whether a tensor still has memory."""
    # FSDP1 resizes the storage of a gathered parameter to 0, and keeps the tensor
    # (torch/distributed/fsdp/_flat_param.py, _free_storage, torch 2.13).
    if tensor.is_meta or not tensor.numel() or hasattr(tensor, "full_tensor"):
        return not tensor.is_meta
    return tensor.untyped_storage().size() > 0


def named_tensors(
    modules: Mapping[str, nn.Module], aliases: bool = False
) -> Iterator[tuple[_Kind, str, torch.Tensor, nn.Module, str]]:
    """Yield each parameter and buffer of modules named by prefixes: kind, name, tensor, its module, its key."""
    kinds: tuple[tuple[_Kind, str], ...] = (("params", "_parameters"), ("buffers", "_buffers"))
    for prefix, module in modules.items():
        inside = list(named_modules(module))
        yielded: set[int] = set()
        for tensor_kind, registry in kinds:
            for path, submodule in inside:
                for key, tensor in getattr(submodule, registry).items():
                    # `aliases`: yield a tensor that a module has under several names once for each
                    if tensor is not None and (aliases or id(tensor) not in yielded):
                        yielded.add(id(tensor))
                        yield tensor_kind, prefix + (f"{path}.{key}" if path else key), tensor, submodule, key


def parameters_of(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter of modules that are named by prefixes: its name, its value."""
    return ((name, value) for tensor_kind, name, value, _, _ in named_tensors(modules) if tensor_kind == "params")


def _wholes_of(modules: Mapping[str, nn.Module]) -> Wholes:
    dense = [(name, tensor) for _, name, tensor, _, _ in named_tensors(modules) if not hasattr(tensor, "full_tensor")]
    return Wholes({name: copied(tensor) for name, tensor in dense if not tensor.is_meta})


def moved_apart(modules: Mapping[str, nn.Module]) -> None:
    """Make the elements of floating-point parameters and saved buffers distinct, in place, always in the same way."""
    # Equal values, such as the zeros of a bias, do not show which slice a rank holds.
    generator = torch.Generator().manual_seed(0)
    submodules = [submodule for module in modules.values() for _, submodule in named_modules(module)]
    caches = {id(submodule._buffers[key]) for submodule in submodules for key in submodule._non_persistent_buffers_set}
    for _, _, tensor, _, _ in named_tensors(modules):
        if id(tensor) not in caches and tensor.is_floating_point() and tensor.numel():
            slicing.make_distinct(tensor, float(tensor.detach().float().square().mean().sqrt()), generator)


_CLOSE = 1e-3  # of the magnitude: replicas of a slice of an optimizer's state differ by rounding only

_Piece = tuple[int, Slice, torch.Tensor]  # the rank that holds a slice, the slice, and the local tensor that has it


@dataclass(frozen=True)
class _Whole:
    """A result assembled from slices, once per rank: its own slices, and slices of others in the gaps."""

    views: list[torch.Tensor]
    own: list[torch.Tensor]
    placement: str
    gap: Slice | None  # the elements that no rank holds


def users_of(runs: Sequence[ObservedRun]) -> tuple[dict[str, set[int]], set[int]]:
    """Return the ranks that use each tensor that some rank does not use, and the ranks that use no parameter at all."""
    users = {
        name: {rank for rank, run in enumerate(runs) if name not in run.unused}
        for name in set().union(*(run.unused for run in runs))
    }
    parameters = {name for run in runs for name in run.initial} or set(users)
    idle = {rank for rank, run in enumerate(runs) if not run.trained and not run.pieces and parameters <= run.unused}
    return users, idle


def with_groups_of(single: ObservedRun, run: ObservedRun) -> ObservedRun:
    """Return a rank's run with the numbers of optimizers and groups that one device gives to the same parameters.

    A rank may have only some of the groups or optimizers. A group keeps its number if its parameters are in several
    groups on one device, or in none.
    """
    if run.group_of == single.group_of:
        return run
    labels: dict[str, set[str]] = defaultdict(set)
    for name, label in run.group_of.items():
        if name in single.group_of:
            labels[label].add(single.group_of[name])
    names: dict[Result, Result] = {}
    taken = {result for result in run.values if result.kind == "optimizer"}
    for label, counterparts in labels.items():
        old, new = (Result("optimizer", f"learning rate of {text}") for text in (label, min(counterparts)))
        if len(counterparts) == 1 and old in run.values:
            names[old] = new
    for result in [*taken, *(piece.name for piece in run.pieces if piece.name.kind == "optimizer")]:
        labels_of = (groups.get(result.parameter, "") for groups in (run.group_of, single.group_of))
        own, other = (label.partition(" of ")[2] for label in labels_of)
        if own != other and result.parameter in single.group_of:
            bare = result.of.removesuffix(f" of {own}") if own else result.of
            names[result] = Result("optimizer", f"{bare} of {other}" if other else bare)
    if all(old == new for old, new in names.items()):
        return run

    def renamed(several: Mapping[Result, Any]) -> dict[Result, Any]:
        # Two groups of a rank may be one on one device: the one that keeps its name comes first.
        kept = {name: value for name, value in several.items() if names.get(name, name) == name}
        return {names.get(name, name): value for name, value in several.items()} | kept

    pieces = [replace(piece, name=names.get(piece.name, piece.name)) for piece in run.pieces]
    values, digests, outside = renamed(run.values), renamed(run.digests), renamed(run.outside)
    return replace(run, pieces=pieces, values=values, digests=digests, outside=outside)


def assembled(
    runs: Sequence[ObservedRun],
    holders: Mapping[str, set[int]] | None = None,
    returns: Callable[[int], bool] | None = None,
) -> list[ObservedRun]:
    """Return the observations of ranks, with every divided result assembled on every rank."""
    users_by_name = {name: ranks for name, ranks in (holders or {}).items() if 0 < len(ranks) < len(runs)}
    name_sets = [run.digests.keys() for run in runs if run.digests]
    divided = bool(users_by_name) or any(run.pieces or run.unplaced or run.idle != runs[0].idle for run in runs)
    divided |= any(name.kind != "returned" for name_set in name_sets for name in name_set ^ name_sets[0])
    if not divided and returns is None:
        return list(runs)
    assembled_runs = [
        replace(run, values=dict(run.values), digests=dict(run.digests), others=dict(run.others), snapshots=[])
        for run in runs
    ]
    values, idle = [run.values for run in runs], [run.idle for run in runs]
    if returns is not None:
        _take_returned(assembled_runs, values, returns)
    for name, result in _wholes(values, [run.pieces for run in runs], users_by_name, idle):
        for rank, run in enumerate(assembled_runs):
            run.values[name], run.own[name] = result.views[rank], result.own[rank]
            run.digests[name] = digest_of(result.views[rank])
            run.placements[name] = result.placement
            if result.gap is not None:
                run.gaps[name] = str(result.gap)
    for step in range(max((len(run.snapshots) for run in runs), default=0)):
        snapshots = [run.snapshots[step] if step < len(run.snapshots) else {} for run in runs]
        slices = [run.pieces_of_steps[step] if step < len(run.pieces_of_steps) else [] for run in runs]
        stages = [dict(stage) for stage in snapshots]
        for name, result in _wholes(snapshots, slices, users_by_name, idle):
            for stage, view in zip(stages, result.views, strict=True):
                stage[name] = view
        for run, stage in zip(assembled_runs, stages, strict=True):
            run.snapshots.append(stage)
    return _alike(assembled_runs)


def _take_returned(
    runs: Sequence[ObservedRun], values: Sequence[Mapping[Result, torch.Tensor]], returns: Callable[[int], bool]
) -> None:
    """Replace the returned values of ranks that do not count by the values of the first rank that counts."""
    telling = [rank for rank in range(len(runs)) if returns(rank)] or list(range(len(runs)))
    source = runs[telling[0]]
    for run in (run for rank, run in enumerate(runs) if rank not in telling):
        for name in [name for name in run.digests.keys() | run.values.keys() if name.kind == "returned"]:
            run.values.pop(name, None)
            run.digests.pop(name, None)
        run.others = {name: text for name, text in run.others.items() if name.kind != "returned"}
        for name, value in values[telling[0]].items():
            if name.kind == "returned":
                run.values[name] = value
                if name in source.digests:  # absent in a varied run
                    run.digests[name] = source.digests[name]
                run.own[name] = torch.zeros(value.shape, dtype=torch.bool)
        run.others |= {name: text for name, text in source.others.items() if name.kind == "returned"}


def _wholes(
    values: Sequence[Mapping[Result, torch.Tensor]],
    pieces: Sequence[Sequence[HeldPiece]],
    users_by_name: Mapping[str, set[int]],
    idle: Sequence[set[str]],
) -> Iterator[tuple[Result, _Whole]]:
    """Yield each result that is divided among ranks, assembled; `users_by_name`: who uses what others do not."""
    pieces_by_result: dict[Result, list[_Piece]] = defaultdict(list)
    for rank, pieces_of_rank in enumerate(pieces):
        for piece in pieces_of_rank:
            pieces_by_result[piece.name].append((rank, piece.slice, piece.value))
    shapes: dict[str, tuple[int, ...]] = {
        name.of: held_slice.shape
        for name, several in pieces_by_result.items()
        for _, held_slice, _ in several
        if name.kind == "params"
    }
    for name in dict.fromkeys(itertools.chain(pieces_by_result, *values)):
        if name.kind in ("returned", "rng"):
            continue
        owner = name.parameter
        users = users_by_name.get(owner, set(range(len(values))))
        if name.kind == "grads":  # those that no optimizer of the rank steps count only if no other rank's do
            users = {rank for rank in users if owner not in idle[rank]} or users
        mine = [entry for entry in pieces_by_result.get(name, ()) if entry[0] in users]
        with_pieces = {rank for rank, _, _ in mine}
        parameter = Result("params", owner)
        shape = shapes.get(owner) or next((tuple(own[parameter].shape) for own in values if parameter in own), None)
        full_values = [
            (rank, value)
            for rank, values_of_rank in enumerate(values)
            if (value := values_of_rank.get(name)) is not None and rank in users and rank not in with_pieces
        ]
        if name.kind == "optimizer" and not mine and shape is not None and _is_state_in_chunks(full_values, shape):
            mine, full_values = _in_order(name, full_values, shape, len(values)), []
        if not mine and (len(full_values) in (0, len(values)) or any(not values_of_rank for values_of_rank in values)):
            continue
        if mine and _all_hold_the_same(mine, len(values)):
            continue
        mine += [(rank, Slice(name.of, tuple(value.shape)), value) for rank, value in full_values]
        yield name, _put_together([entry for entry in mine if entry[1].shape == mine[0][1].shape], len(values))


def _all_hold_the_same(mine: Sequence[_Piece], size: int) -> bool:
    """Return whether every rank holds the same part of a tensor: then the step has cut the tensor, not divided it."""
    head = mine[0][1]
    if head.at is None or bool(head.mask.all()) or not len(mine) == size > 1:
        return False
    return all(held_slice.at is not None and torch.equal(held_slice.at, head.at) for _, held_slice, _ in mine)


def _put_together(mine: Sequence[_Piece], size: int) -> _Whole:
    base = slicing.assembled([(held_slice, local) for _, held_slice, local in mine])
    views, own = [], []
    for rank in range(size):
        own_slices = [(held_slice, local) for holder, held_slice, local in mine if holder == rank]
        mask = torch.zeros(base.value.shape, dtype=torch.bool)
        view = base.value.clone() if own_slices else base.value
        for held_slice, local in own_slices:
            held_slice.put(local, view)
            mask |= held_slice.mask
        views.append(view)
        own.append(mask)
    ranks_by_slice: dict[str, list[int]] = defaultdict(list)
    for rank, mask in enumerate(own):
        at = mask.view(-1).nonzero().flatten()
        ranks_by_slice[str(Slice("", tuple(mask.shape), None if bool(mask.all()) else at))].append(rank)
    placement = "; ".join(f"{description} on {named(ranks)}" for description, ranks in ranks_by_slice.items())
    missing = base.missing
    gap = None if missing is None else Slice("", tuple(missing.shape), missing.view(-1).nonzero().flatten())
    return _Whole(views, own, placement, gap)


def _is_state_in_chunks(ranked_chunks: Sequence[tuple[int, torch.Tensor]], shape: tuple[int, ...]) -> bool:
    """Return whether ranks hold chunks of a state along one dimension, as optimizers with sharded states do."""
    return bool(ranked_chunks) and all(
        value.dim() == len(shape)
        and len(cut := [d for d in range(len(shape)) if value.shape[d] != shape[d]]) == 1
        and value.shape[cut[0]] < shape[cut[0]]
        for _, value in ranked_chunks
    )


def _in_order(
    name: Result, ranked_chunks: Sequence[tuple[int, torch.Tensor]], shape: tuple[int, ...], size: int
) -> list[_Piece]:
    """Return the chunks of a state by rank; with replicas, in the order that makes replicas agree."""
    head = ranked_chunks[0][1]
    dim = next(d for d in range(len(shape)) if head.shape[d] != shape[d])
    count = -(-shape[dim] // max(1, head.shape[dim]))
    orders = [[rank % count for rank, _ in ranked_chunks], [rank // max(1, size // count) for rank, _ in ranked_chunks]]
    chunks = torch.arange(shape[dim]).chunk(count)
    best: list[_Piece] = []
    for order in orders:
        placed = [(index, rank, value) for index, (rank, value) in zip(order, ranked_chunks, strict=True)]
        if any(index >= len(chunks) or len(chunks[index]) != value.shape[dim] for index, _, value in placed):
            continue
        ordered = [
            (rank, Slice(name.of, shape, slicing.indexed(shape, (*[slice(None)] * dim, chunks[index]))), value)
            for index, rank, value in placed
        ]
        by_chunk = {index: value for index, _, value in placed}
        pairs = ((value, by_chunk[index]) for index, _, value in placed if value.numel())
        if all(bool(((value - head).abs() <= _CLOSE * head.abs().max()).all()) for value, head in pairs):
            return ordered
        best = best or ordered
    return best


def _alike(runs: list[ObservedRun]) -> list[ObservedRun]:
    """Give each rank the touched and trained names of all ranks, since parts of one model are trained together."""
    touched, trained = set().union(*(run.touched for run in runs)), set().union(*(run.trained for run in runs))
    unplaced = {label: reason for run in runs for label, reason in run.unplaced.items()}
    optimizers = max(run.optimizers for run in runs)
    settings = {name: setting for run in reversed(runs) for name, setting in run.settings.items()}
    for run in runs:
        run.settings = settings | run.settings
        run.touched, run.trained, run.unplaced, run.optimizers = touched, trained, unplaced, optimizers
    return runs
