"""Join the batches of ranks along the samples: tensors, and dicts, lists, tuples and objects of them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch

from mgpu_check.torch_hooks.nested import leaves

_IGNORED = -100  # the label that losses ignore by default: torch/nn/functional.py, cross_entropy, torch 2.13


class NotJoinedError(ValueError):
    """Values of ranks have no joint value."""


def join(shards: Sequence[Any], guesses: list[str]) -> Any:
    """Return the joint value of the ranks, for one device.

    Tensors are concatenated in dimension 0, in the order of ranks. Lists of other values than tensors have an entry for
    each sample, and are concatenated too. Equal other values stay the same.

    Args:
        guesses: receives a clause for each decision that the values do not determine.

    Raises:
        NotJoinedError: the values differ, and are not samples.
    """
    head = shards[0]
    if any(type(shard) is not type(head) for shard in shards):
        raise NotJoinedError(f"ranks have values of the types {', '.join(sorted({type(p).__name__ for p in shards}))}")
    if isinstance(head, torch.Tensor):
        return join_tensors(shards, guesses)
    if type(head).__module__ == "numpy" and hasattr(head, "dtype") and head.ndim and head.dtype.kind in "biufc":
        return join_tensors([torch.from_numpy(shard) for shard in shards], guesses).numpy()
    if isinstance(head, MutableMapping):
        return _join_mappings(shards, guesses)
    if isinstance(head, (list, tuple)):
        return _join_sequences(shards, guesses)
    if dataclasses.is_dataclass(head) or (hasattr(head, "__dict__") and not callable(head)):
        joint = copy.copy(head)
        for name, value in _join_mappings([vars(shard) for shard in shards], guesses).items():
            object.__setattr__(joint, name, value)
        return joint
    with contextlib.suppress(ValueError):  # an array has no truth value
        if all(shard == head for shard in shards):
            return head
    raise NotJoinedError(f"ranks have different values of the type {type(head).__name__}")


def _join_mappings(shards: Sequence[Any], guesses: list[str]) -> Any:
    head = shards[0]
    if any(shard.keys() != head.keys() for shard in shards):
        raise NotJoinedError("ranks have dicts with different keys")
    joint = copy.copy(head)
    for key in list(head):
        joint[key] = join([shard[key] for shard in shards], guesses)
    return joint


def _join_sequences(shards: Sequence[Any], guesses: list[str]) -> Any:
    head = shards[0]
    if _are_samples(head):
        return type(head)(entry for shard in shards for entry in shard)
    if any(len(shard) != len(head) for shard in shards):
        raise NotJoinedError(f"ranks have a {type(head).__name__} of different lengths")
    # All entries may be lists of one length, and one of them have an entry for each sample.
    lists = all(isinstance(entry, (list, tuple)) and not hasattr(entry, "_fields") for entry in head)
    if lists and len({len(entry) for entry in head}) == 1 and any(map(_are_samples, head)):
        joint = [type(entry)(one for shard in shards for one in shard[i]) for i, entry in enumerate(head)]
    else:
        joint = [join(entries, guesses) for entries in zip(*shards, strict=True)]
    return type(head)(*joint) if hasattr(head, "_fields") else type(head)(joint)


def _are_samples(value: Any) -> bool:
    """Return whether a list or tuple has an entry for each sample: a dict, a text or a number."""
    return len(value) > 0 and all(isinstance(entry, (dict, str, bytes, int, float)) for entry in value)


def join_tensors(shards: Sequence[torch.Tensor], guesses: list[str]) -> torch.Tensor:
    """Return the tensors concatenated in dimension 0; equal numbers without dimensions stay one number."""
    head = shards[0]
    if any(shard.dtype != head.dtype or shard.dim() != head.dim() for shard in shards):
        raise NotJoinedError("ranks have tensors of different dtypes or dimensions")
    if not head.dim():
        if all(torch.equal(shard, head) for shard in shards):
            return head
        raise NotJoinedError("ranks have different numbers")
    widest = [max(sizes) for sizes in zip(*(shard.shape[1:] for shard in shards), strict=True)]
    if all(list(shard.shape[1:]) == widest for shard in shards):
        return torch.cat(list(shards))
    labels = not head.is_floating_point() and any(bool((shard == _IGNORED).any()) for shard in shards)
    value = _IGNORED if labels else 0
    guesses.append(f"batches of different lengths were padded with {value:g}")
    padded = [shard.new_full((shard.shape[0], *widest), value) for shard in shards]
    for joint, shard in zip(padded, shards, strict=True):
        joint[tuple(slice(size) for size in shard.shape)] = shard
    return torch.cat(padded)


def sample_dimension(shards: Sequence[torch.Tensor], own: torch.Tensor) -> int | None:
    """Return the only dimension along which the shards add up to the shape of `own`."""
    if any(shard.dim() != own.dim() for shard in shards):
        return None
    sizes = [sum(lengths) for lengths in zip(*(shard.shape for shard in shards), strict=True)]
    fits = [d for d in range(own.dim()) if sizes[d] == own.shape[d]]
    fits = [d for d in fits if all(_without(shard, d) == _without(own, d) for shard in shards)]
    return fits[0] if len(fits) == 1 else None


def _without(tensor: torch.Tensor, dimension: int) -> list[int]:
    return [size for d, size in enumerate(tensor.shape) if d != dimension]


class SampleRows:
    """The order of rows if a tensor has several rows for each sample, such as those of two views.

    `RankReplaying` makes it, and lets it see each batch; replayed tensors are joined by it until the last step.

    The rows of a view follow each other if the batch has views, as after `torch.cat`. Otherwise the rows of a sample
    follow each other, as after ``x.view(-1, features)``. With `turned`, the other order is assumed.
    """

    def __init__(self, turned: bool) -> None:
        self._turned = turned
        self.sizes: list[int] = []  # number of samples in the last batch of each rank; empty if unknown
        self._views = 1
        self.ambiguous = False  # a tensor had several rows for each sample

    def saw(self, shards: Sequence[Any]) -> None:
        """Learn the numbers of samples and of views from the batches of the ranks."""
        tensors = [[own for own in leaves(shard) if isinstance(own, torch.Tensor) and own.dim()] for shard in shards]
        if all(tensors):
            self.sizes = [own[0].shape[0] for own in tensors]
            like = [t for t in tensors[0] if t.is_floating_point() and t.dim() > 1 and t.shape[0] == self.sizes[0]]
            self._views = max(self._views, len([t for t in like if t.dim() == like[0].dim()]))

    def join(self, shards: Sequence[torch.Tensor], guesses: list[str]) -> torch.Tensor:
        """Return the tensors joined along the samples."""
        joined = join_tensors(shards, guesses)
        if len(self.sizes) != len(shards) or not all(self.sizes) or not shards[0].dim():
            return joined
        rows = {len(shard) / size for shard, size in zip(shards, self.sizes, strict=True)}  # of a sample
        per = int(min(rows)) if len(rows) == 1 and min(rows).is_integer() else 1
        if per < 2:
            return joined
        self.ambiguous = True
        if (per <= self._views) == self._turned:
            return joined
        ends = list(itertools.accumulate(len(shard) for shard in shards))
        blocks = [range(end - len(shard), end) for shard, end in zip(shards, ends, strict=True)]
        chunks = [[b[i * n : (i + 1) * n] for i in range(per)] for b, n in zip(blocks, self.sizes, strict=True)]
        order = [row for view in zip(*chunks, strict=True) for chunk in view for row in chunk]
        return joined[torch.tensor(order, device="cpu")]
