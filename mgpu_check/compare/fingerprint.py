"""Hash what a dataset holds, to find out whether ranks index the same data or shards of their own."""

from __future__ import annotations

import hashlib
import itertools
import os
import pickle
import random
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import torch
from torch.utils.data import Dataset

_LIMIT = 2**26  # bytes of one attribute, to bound the time
_ENDS = 64  # elements at each end of an array
_SPREAD = 4096  # elements of a whole array
_ELEMENTS = 2**18  # of all arrays; of further ones, fewer
_PARTS = 256  # of a list or dict that is too large, or cannot be pickled
_DEPTH = 4  # of datasets within datasets
_SMALL = (int, float, bool, str, type(None))
_DATA = (torch.Tensor, list, tuple, dict, set, frozenset, bytes, PurePath, Dataset)
_OF_A_RANK = (torch.device, torch.Generator, random.Random)


class _TooLargeError(Exception):
    pass


class _Hashing:
    """A file that hashes what is written to it."""

    def __init__(self) -> None:
        self.hash, self._size = hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        if (room := _LIMIT - self._size) < len(data):
            self.hash.update(data[:room] + bytes(data[:: max(1, len(data) // _SPREAD)]))
            raise _TooLargeError
        self._size += len(data)
        self.hash.update(data)
        return len(data)


class _PicklerOfData(pickle.Pickler):
    """Pickles the data of datasets: shape, ends and spread elements of arrays, and no state of a process."""

    _left = _ELEMENTS

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, _OF_A_RANK) or kind.__module__.startswith("numpy.random"):
            return str, (kind.__name__,)
        if isinstance(value, torch.Tensor):
            return str, (repr((tuple(value.shape), self._elements(value.detach().reshape(-1)))),)
        if _is_array(value):
            return str, (repr((value.shape, self._elements(value.ravel()))),)
        # Compiled expressions of the package regex have other bytes in each process.
        if kind.__name__ == "Pattern" and kind.__module__.partition(".")[0] in ("re", "regex", "_regex"):
            return str, (str(getattr(value, "pattern", "")),)
        if isinstance(value, Dataset):
            return str, (kind.__qualname__,), _data_of(value.__dict__)
        return NotImplemented

    def _elements(self, flat: Any) -> list[Any]:
        ends, spread = (_ENDS, _SPREAD) if self._left > 0 else (4, 8)  # there may be an array for each sample
        parts = [part.tolist() for part in (flat[:ends], flat[-ends:], flat[:: max(1, len(flat) // spread)])]
        self._left -= sum(map(len, parts))
        return parts


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "ravel")


def _data_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a dataset that are data: no rank, device or counter beside arrays and lists."""
    ordered = {
        name: sorted(map(repr, part)) if isinstance(part, (set, frozenset)) else part
        for name, part in sorted(parts.items())
    }
    if not any(isinstance(part, _DATA) or _is_array(part) for part in parts.values()):
        return {name: _drawn_from(part) for name, part in ordered.items()}
    return {name: part for name, part in ordered.items() if not _is_small(name, part)}


def _drawn_from(part: Any) -> Any:
    """Return the state of a generator, because a dataset without data may draw its samples; else `part`."""
    if isinstance(part, torch.Generator):
        return part.get_state().tolist()
    if isinstance(part, random.Random):
        return part.getstate()
    return repr(part.bit_generator.state) if hasattr(part, "bit_generator") else part


def _is_small(name: str, part: Any) -> bool:
    """Return whether an attribute is a number or a word beside the data, and neither a seed nor a path."""
    return isinstance(part, _SMALL) and "seed" not in name.lower() and not (isinstance(part, str) and os.sep in part)


def fingerprint(dataset: Any, depth: int = _DEPTH) -> str:
    """Return a hash of a dataset: equal for equal data.

    What is too large or cannot be pickled is hashed by its attributes or elements, or left out.
    """
    parts = getattr(dataset, "__dict__", None)
    whole = dataset if not parts or isinstance(dataset, (type, *_DATA)) else (type(dataset).__name__, _data_of(parts))
    made = _Hashing()
    try:
        _PicklerOfData(made, protocol=4).dump(whole)
        return made.hash.hexdigest()
    except _TooLargeError:
        found = made.hash.hexdigest()
    except Exception:  # such as a function within a transformation, or code of the user
        found = type(dataset).__name__
    if depth:
        found += "".join(f" {name} {fingerprint(part, depth - 1)}" for name, part in _parts_of(dataset))
    return hashlib.sha256(found.encode()).hexdigest()


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, part in itertools.islice(items, 0, None, max(1, len(value) // _PARTS)):
            yield repr(name)[:99] if isinstance(name, (int, str)) else "", part
    elif isinstance(parts := getattr(value, "__dict__", None), dict) and not isinstance(value, type):
        yield from _data_of(parts).items()
