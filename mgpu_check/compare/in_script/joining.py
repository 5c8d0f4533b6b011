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

_IGNORED = -100  # the label that losses of torch ignore by default


class NotJoinedError(ValueError):
    """Values of ranks have no joint value."""


def join(parts: Sequence[Any], guesses: list[str]) -> Any:
    """Return the joint value of the ranks, for one device.

    Tensors are concatenated in dimension 0, in the order of ranks. Lists of other values than tensors have an entry for
    each sample, and are concatenated too. Equal other values stay the same.

    Args:
        guesses: receives a clause for each decision that the values do not determine.

    Raises:
        NotJoinedError: the values differ, and are not samples.
    """
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise NotJoinedError(f"ranks have values of the types {', '.join(sorted({type(p).__name__ for p in parts}))}")
    if isinstance(first, torch.Tensor):
        return join_tensors(parts, guesses)
    if type(first).__module__ == "numpy" and hasattr(first, "dtype") and first.ndim and first.dtype.kind in "biufc":
        return join_tensors([torch.from_numpy(part) for part in parts], guesses).numpy()
    if isinstance(first, MutableMapping):
        return _join_mappings(parts, guesses)
    if isinstance(first, (list, tuple)):
        return _join_sequences(parts, guesses)
    if dataclasses.is_dataclass(first) or (hasattr(first, "__dict__") and not callable(first)):
        made = copy.copy(first)
        for name, value in _join_mappings([vars(part) for part in parts], guesses).items():
            object.__setattr__(made, name, value)
        return made
    with contextlib.suppress(ValueError):  # an array has no truth value
        if all(part == first for part in parts):
            return first
    raise NotJoinedError(f"ranks have different values of the type {type(first).__name__}")


def _join_mappings(parts: Sequence[Any], guesses: list[str]) -> Any:
    first = parts[0]
    if any(part.keys() != first.keys() for part in parts):
        raise NotJoinedError("ranks have dicts with different keys")
    made = copy.copy(first)
    for key in list(first):
        made[key] = join([part[key] for part in parts], guesses)
    return made


def _join_sequences(parts: Sequence[Any], guesses: list[str]) -> Any:
    first = parts[0]
    if _are_samples(first):
        return type(first)(entry for part in parts for entry in part)
    if any(len(part) != len(first) for part in parts):
        raise NotJoinedError(f"ranks have a {type(first).__name__} of different lengths")
    # All entries may be lists of one length, and one of them have an entry for each sample.
    lists = all(isinstance(entry, (list, tuple)) and not hasattr(entry, "_fields") for entry in first)
    if lists and len({len(entry) for entry in first}) == 1 and any(map(_are_samples, first)):
        made = [type(entry)(one for part in parts for one in part[i]) for i, entry in enumerate(first)]
    else:
        made = [join(entries, guesses) for entries in zip(*parts, strict=True)]
    return type(first)(*made) if hasattr(first, "_fields") else type(first)(made)


def _are_samples(value: Any) -> bool:
    """Return whether a list or tuple has an entry for each sample: a dict, a text or a number."""
    return len(value) > 0 and all(isinstance(entry, (dict, str, bytes, int, float)) for entry in value)


def join_tensors(parts: Sequence[torch.Tensor], guesses: list[str]) -> torch.Tensor:
    """Return the tensors concatenated in dimension 0; equal numbers without dimensions stay one number."""
    first = parts[0]
    if any(part.dtype != first.dtype or part.dim() != first.dim() for part in parts):
        raise NotJoinedError("ranks have tensors of different dtypes or dimensions")
    if not first.dim():
        if all(torch.equal(part, first) for part in parts):
            return first
        raise NotJoinedError("ranks have different numbers")
    widest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    if all(list(part.shape[1:]) == widest for part in parts):
        return torch.cat(list(parts))
    labels = not first.is_floating_point() and any(bool((part == _IGNORED).any()) for part in parts)
    value = _IGNORED if labels else 0
    guesses.append(f"batches of different lengths were padded with {value:g}")
    padded = [part.new_full((part.shape[0], *widest), value) for part in parts]
    for made, part in zip(padded, parts, strict=True):
        made[tuple(slice(size) for size in part.shape)] = part
    return torch.cat(padded)


def sample_dimension(parts: Sequence[torch.Tensor], own: torch.Tensor) -> int | None:
    """Return the only dimension along which the parts add up to the shape of `own`."""
    if any(part.dim() != own.dim() for part in parts):
        return None
    sizes = [sum(lengths) for lengths in zip(*(part.shape for part in parts), strict=True)]
    fits = [d for d in range(own.dim()) if sizes[d] == own.shape[d]]
    fits = [d for d in fits if all(_without(part, d) == _without(own, d) for part in parts)]
    return fits[0] if len(fits) == 1 else None


def _without(tensor: torch.Tensor, dimension: int) -> list[int]:
    return [size for d, size in enumerate(tensor.shape) if d != dimension]


class SampleRows:
    """The order of rows if a tensor has several rows for each sample, such as those of two views.

    The rows of a view follow each other if the batch has views, as after `torch.cat`. Otherwise the rows of a sample
    follow each other, as after ``x.view(-1, features)``.

    Args:
        turned: assume the other order.

    Attributes:
        sizes: number of samples in the last batch of each rank; empty if unknown.
        ambiguous: a tensor had several rows for each sample.
    """

    def __init__(self, turned: bool) -> None:
        self._turned = turned
        self.sizes: list[int] = []
        self._views = 1
        self.ambiguous = False

    def saw(self, parts: Sequence[Any]) -> None:
        """Learn the numbers of samples and of views from the batches of the ranks."""
        tensors = [[leaf for leaf in leaves(part) if isinstance(leaf, torch.Tensor) and leaf.dim()] for part in parts]
        if all(tensors):
            self.sizes = [own[0].shape[0] for own in tensors]
            like = [t for t in tensors[0] if t.is_floating_point() and t.dim() > 1 and t.shape[0] == self.sizes[0]]
            self._views = max(self._views, len([t for t in like if t.dim() == like[0].dim()]))

    def join(self, parts: Sequence[torch.Tensor], guesses: list[str]) -> torch.Tensor:
        """Return the tensors joined along the samples."""
        joined = join_tensors(parts, guesses)
        if len(self.sizes) != len(parts) or not all(self.sizes) or not parts[0].dim():
            return joined
        rows = {len(part) / size for part, size in zip(parts, self.sizes, strict=True)}  # of a sample
        per = int(min(rows)) if len(rows) == 1 and min(rows).is_integer() else 1
        if per < 2:
            return joined
        self.ambiguous = True
        if (per <= self._views) == self._turned:
            return joined
        ends = list(itertools.accumulate(len(part) for part in parts))
        blocks = [range(end - len(part), end) for part, end in zip(parts, ends, strict=True)]
        chunks = [[b[i * n : (i + 1) * n] for i in range(per)] for b, n in zip(blocks, self.sizes, strict=True)]
        order = [row for view in zip(*chunks, strict=True) for chunk in view for row in chunk]
        return joined[torch.tensor(order, device="cpu")]
