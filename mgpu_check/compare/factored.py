"""Find, in the script's process, the parts of an optimizer's state that has another shape than its parameter.

Optimizers of one flat vector, such as LBFGS, keep states of all parameters in one tensor. Factored optimizers, such as
Adafactor, keep statistics over some dimensions of a parameter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mgpu_check.compare.summaries import Cut
from mgpu_check.numerics.placement import Slice, indexed
from mgpu_check.torch_hooks.tensors import is_distributed


def entries(state: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each value of an optimizer's state with its name.

    A value in a list or a dict has a name like "old_dirs[0]".
    """
    for key, value in state.items():
        yield from _within(str(key), value)


def _within(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _within(f"{name}[{index}]", part)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _within(f"{name}[{key}]", part)
    else:
        yield name, value


def flat_parts(value: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return the part of each parameter in a state that is flat over all of them; None for any other state.

    Args:
        parameters: all parameters of the optimizer.
    """
    if value.dim() != 1 or is_distributed(value) or any(map(is_distributed, parameters)):
        return None
    counts = [parameter.numel() for parameter in parameters]
    if sum(counts) != value.numel():
        return None
    return [part.view(p.shape) for part, p in zip(value.split(counts), parameters, strict=True)]


def statistic(value: torch.Tensor, local: torch.Size, part: Slice, shape: Sequence[int]) -> Cut | None:
    """Return the elements of a whole statistic that a rank has; None if it is unclear which dimensions were reduced.

    The statistic may cover only a part of the reduced dimensions: that of the rank's slice.

    Args:
        local: shape of the parameter on this rank, which is the slice `part` of the whole parameter.
        shape: shape of the statistic on one device.
    """
    found = set(_reductions(local, value.shape)) & set(_reductions(part.shape, shape))
    indices = _indices(local, part)
    if len(found) != 1 or indices is None:
        return None
    ((reduced, _),) = found
    kept = [size for dim, size in enumerate(part.shape) if dim not in reduced]
    chosen = [own for dim, own in enumerate(indices) if dim not in reduced]
    at = indexed(kept, torch.meshgrid(*chosen, indexing="ij")) if kept else torch.zeros(1, dtype=torch.int64)
    cut = Cut(Slice(part.whole, tuple(shape), at))
    divided = {dim: Slice("", part.shape[dim : dim + 1], indices[dim]) for dim in sorted(reduced)}
    divided = {dim: some for dim, some in divided.items() if not bool(some.mask.all())}
    covers = ", ".join(str(some).replace("dim 0", f"dim {dim}") for dim, some in divided.items())
    share = math.prod(len(indices[dim]) / part.shape[dim] for dim in divided)
    cut.held = replace(cut.held, covers=covers, share=share)
    return cut


def _reductions(whole: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[frozenset[int], bool]]:
    """Yield the dimensions whose reduction gives a shape, and whether they stay as dimensions of size 1."""
    for count in range(1, len(whole) + 1):
        for some in itertools.combinations(range(len(whole)), count):
            if [1 if dim in some else size for dim, size in enumerate(whole)] == list(shape):
                yield frozenset(some), True
            if [size for dim, size in enumerate(whole) if dim not in some] == list(shape):
                yield frozenset(some), False


def _indices(local: torch.Size, part: Slice) -> list[torch.Tensor] | None:
    """Return the indices of a slice along each dimension of the whole; None if it is not a block of them."""
    at = part.at
    if at is None or part.within is not None or len(local) != len(part.shape) or at.numel() != local.numel():
        return None
    rest, found = at.view(local), []
    for dim, size in enumerate(part.shape):
        stride = math.prod(part.shape[dim + 1 :])
        index = (rest // stride) % size
        own = index.movedim(dim, 0).reshape(local[dim], -1)
        if not own.numel() or not torch.equal(own, own[:, :1].expand_as(own)):
            return None
        found.append(own[:, 0])
    return found
