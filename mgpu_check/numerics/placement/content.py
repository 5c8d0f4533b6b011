"""Find the slice of a whole tensor that has the values of a local tensor.

Ranks build a model from one seed. So before training, what a rank holds has the very values of a part of the model that
one device holds. A match counts only if there is one place for it: values that come twice decide nothing.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch

from mgpu_check.numerics.placement.slices import Slice, Unplaced, indexed
from mgpu_check.torch_hooks.tensors import bytes_of, digest_of

_MANY = 256
"""Places of one value above which it is a constant, such as the zeros of a bias."""


class Wholes:
    """The tensors of a freshly built model, to look slices up.

    Args:
        named: dense tensors on the CPU by name.
    """

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        self._named = dict(named)
        self._by_digest: dict[str, list[str]] = defaultdict(list)
        for name, whole in self._named.items():
            self._by_digest[digest_of(whole)].append(name)
        self._flats: dict[torch.dtype, tuple[torch.Tensor, list[tuple[int, str]]]] = {}

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a whole tensor; None if the model has no tensor with this name."""
        return tuple(self._named[name].shape) if name in self._named else None

    def whole(self, name: str) -> torch.Tensor | None:
        """Return a whole tensor; None if the model has no tensor with this name."""
        return self._named.get(name)

    def find(self, local: torch.Tensor, hint: str = "", *, trusted: bool = False) -> list[Slice] | Unplaced:
        """Return the slices that a local tensor consists of, or why they are not known.

        Args:
            local: dense, on the CPU, with the values from before the first step.
            hint: the likely name. Of several places, the only one in the tensor of this name counts.
            trusted: a tensor that equals the one of this name is that one, even if others are equal, too.
        """
        local = local.contiguous()
        if not local.numel():
            return []
        same = self._by_digest.get(digest_of(local), [])
        if same:
            if trusted and hint in same:
                return [Slice(hint, tuple(local.shape))]
            alone = len(same) == 1 and not self._is_constant_elsewhere(local, same[0])
            return [Slice(same[0], tuple(local.shape))] if alone else Unplaced.AMBIGUOUS
        several = False
        hinted = [hint] if hint in self._named else []
        for names in (hinted, [name for name in self._named if name != hint]):
            found = [place for name in names for place in self._places(name, local)]
            if len(found) == 1 and found[0] is not None:
                return [found[0]]
            several |= bool(found)
            if several:
                return Unplaced.AMBIGUOUS
        return self._pieces(local)

    def _is_constant_elsewhere(self, local: torch.Tensor, but: str) -> bool:
        """Return whether a constant tensor may be a slice of another whole, which has as many such elements."""
        value = local.reshape(-1)[0]
        if not bool((local == value).all()):
            return False
        return any(
            name != but and whole.dtype == local.dtype and int((whole == value).sum()) >= local.numel()
            for name, whole in self._named.items()
        )

    def _places(self, name: str, local: torch.Tensor) -> Iterator[Slice | None]:
        """Yield each place of a local tensor in one whole; None for a place that is not the only one."""
        whole = self._named[name]
        if whole.dtype != local.dtype or whole.numel() < local.numel() or not whole.dim():
            return
        for at in _boxes(whole, local):
            yield None if at is None else Slice(name, tuple(whole.shape), at)

    def _pieces(self, local: torch.Tensor) -> list[Slice] | Unplaced:
        """Return the ranges of flattened tensors in a flat buffer, or in a fused weight.

        Zeros at the end are padding.
        """
        everything, starts = self._flat(local.dtype)
        flat = local.reshape(-1)
        found: list[Slice] = []
        first = 0
        while first < len(flat):
            where = (everything == flat[first]).nonzero().flatten().tolist()
            if len(where) > _MANY:
                return Unplaced.AMBIGUOUS
            runs = [(_common(everything, place, flat, first, starts), place) for place in where]
            longest = max(runs, default=(0, 0))
            if not longest[0]:
                return found if found and not bool(flat[first:].any()) else Unplaced.NOWHERE
            if sum(length == longest[0] for length, _ in runs) > 1:
                return Unplaced.AMBIGUOUS
            length, place = longest
            start, name = max(entry for entry in starts if entry[0] <= place)
            at = torch.arange(place - start, place - start + length)
            found.append(Slice(name, tuple(self._named[name].shape), at, (first, first + length)))
            first += length
        return found

    def _flat(self, dtype: torch.dtype) -> tuple[torch.Tensor, list[tuple[int, str]]]:
        """Return all wholes of a dtype, one after the other, and where each starts."""
        if dtype not in self._flats:
            wholes = {name: whole for name, whole in self._named.items() if whole.dtype == dtype and whole.numel()}
            starts = itertools.accumulate([whole.numel() for whole in wholes.values()], initial=0)
            flat = torch.cat([torch.empty(0, dtype=dtype), *(whole.reshape(-1) for whole in wholes.values())])
            self._flats[dtype] = flat, list(zip(starts, wholes, strict=False))
        return self._flats[dtype]


def _common(
    everything: torch.Tensor, place: int, flat: torch.Tensor, first: int, starts: Sequence[tuple[int, str]]
) -> int:
    """Return how many elements are the same from both places on, up to the end of one whole."""
    end = min((start for start, _ in starts if start > place), default=len(everything))
    count = min(end - place, len(flat) - first)
    same = everything[place : place + count] == flat[first : first + count]
    return count if bool(same.all()) else int(same.to(torch.uint8).argmin())


def _boxes(whole: torch.Tensor, local: torch.Tensor) -> Iterator[torch.Tensor | None]:
    """Yield the positions of a tensor that is a box or rows of a whole, or its transpose; None if ambiguous."""
    shape = tuple(whole.shape)
    if whole.dim() == local.dim():
        cut = [dim for dim in range(whole.dim()) if whole.shape[dim] != local.shape[dim]]
        if all(whole.shape[dim] >= local.shape[dim] for dim in cut):
            if len(cut) == 1:
                rows = _rows(whole, local, cut[0])
                if rows is not None:
                    index = tuple(rows if dim == cut[0] else slice(None) for dim in range(whole.dim()))
                    yield indexed(shape, index) if len(rows) else None
                    return
            elif len(cut) > 1 and (corner := _corner(whole, local)) is not None:
                ends = [low + size for low, size in zip(corner, local.shape, strict=True)]
                yield indexed(shape, tuple(itertools.starmap(slice, zip(corner, ends, strict=True))))
                return
    if whole.dim() == local.dim() == 2 and (whole.shape[0] == local.shape[1] or whole.shape[1] == local.shape[0]):
        turned = torch.arange(whole.numel()).view(shape).T.contiguous().view(-1)
        if whole.T.shape == local.shape:
            if torch.equal(whole.T, local):
                yield turned
            return
        cut = [dim for dim in range(2) if whole.T.shape[dim] != local.shape[dim]]
        if len(cut) == 1 and (rows := _rows(whole.T, local, cut[0])) is not None:
            index = (rows, slice(None)) if cut[0] == 0 else (slice(None), rows)
            yield turned[indexed(tuple(whole.T.shape), index)] if len(rows) else None


def _rows(whole: torch.Tensor, local: torch.Tensor, dim: int) -> torch.Tensor | None:
    """Return the indices of the rows of a local tensor along one dimension of a whole: a chunk, or interleaved rows.

    Empty if some row is in several places, and the rows together are, too. None if some row is nowhere.
    """
    places: dict[bytes, list[int]] = defaultdict(list)
    for index, row in enumerate(whole.movedim(dim, 0)):
        places[bytes_of(row)].append(index)
    found = [places.get(bytes_of(row), []) for row in local.movedim(dim, 0)]
    if not all(found):
        return None
    if all(len(where) == 1 for where in found):
        return torch.tensor([where[0] for where in found])
    # The neighbours of a row that comes twice, such as one of zeros, decide.
    starts = [first for first in found[0] if all(first + offset in where for offset, where in enumerate(found))]
    return torch.arange(starts[0], starts[0] + len(found)) if len(starts) == 1 else torch.empty(0, dtype=torch.int64)


def _corner(whole: torch.Tensor, local: torch.Tensor) -> list[int] | None:
    """Return where a box of several shorter dimensions begins; None if it is nowhere, or in several places."""
    found = []
    for corner in (whole == local.reshape(-1)[0]).nonzero().tolist():
        ends = [low + size for low, size in zip(corner, local.shape, strict=True)]
        box = tuple(slice(low, high) for low, high in zip(corner, ends, strict=True))
        if whole[box].shape == local.shape and torch.equal(whole[box], local):
            found.append(corner)
    return found[0] if len(found) == 1 else None
