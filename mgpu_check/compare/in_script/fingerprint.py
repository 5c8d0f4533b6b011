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

    _budget = _ELEMENTS

    def reducer_override(self, value: Any) -> Any:
        value_type = type(value)
        if isinstance(value, _OF_A_RANK) or value_type.__module__.startswith("numpy.random"):
            return str, (value_type.__name__,)
        if isinstance(value, torch.Tensor):
            return str, (repr((tuple(value.shape), self._elements(value.detach().reshape(-1)))),)
        if _is_array(value):
            return str, (repr((value.shape, self._elements(value.ravel()))),)
        # Compiled expressions of the package regex have other bytes in each process.
        if value_type.__name__ == "Pattern" and value_type.__module__.partition(".")[0] in ("re", "regex", "_regex"):
            return str, (str(getattr(value, "pattern", "")),)
        if isinstance(value, Dataset):
            return str, (value_type.__qualname__,), _data_of(value.__dict__)
        return NotImplemented

    def _elements(self, flat: Any) -> list[Any]:
        ends, spread = (_ENDS, _SPREAD) if self._budget > 0 else (4, 8)  # there may be an array for each sample
        samples = [elements.tolist() for elements in (flat[:ends], flat[-ends:], flat[:: max(1, len(flat) // spread)])]
        self._budget -= sum(map(len, samples))
        return samples


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "ravel")


def _data_of(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a dataset that are data: no rank, device or counter beside arrays and lists."""
    ordered = {
        name: sorted(map(repr, attribute)) if isinstance(attribute, (set, frozenset)) else attribute
        for name, attribute in sorted(attributes.items())
    }
    if not any(isinstance(attribute, _DATA) or _is_array(attribute) for attribute in attributes.values()):
        return {name: _drawn_from(attribute) for name, attribute in ordered.items()}

    def is_data(name: str, attribute: Any) -> bool:
        """Return whether it is no number or word beside the data; seeds and paths may be."""
        is_path = isinstance(attribute, str) and os.sep in attribute
        return not isinstance(attribute, _SMALL) or "seed" in name.lower() or is_path

    return {name: attribute for name, attribute in ordered.items() if is_data(name, attribute)}


def _drawn_from(attribute: Any) -> Any:
    """Return the state of a generator, because a dataset without data may draw its samples; else `attribute`."""
    if isinstance(attribute, torch.Generator):
        return attribute.get_state().tolist()
    if isinstance(attribute, random.Random):
        return attribute.getstate()
    return repr(attribute.bit_generator.state) if hasattr(attribute, "bit_generator") else attribute


def fingerprint(dataset: Any, depth: int = _DEPTH) -> str:
    """Return a hash of a dataset: equal for equal data.

    What is too large or cannot be pickled is hashed by its attributes or elements, or left out.
    """
    attributes, content = getattr(dataset, "__dict__", None), dataset
    if attributes and not isinstance(dataset, (type, *_DATA)):
        content = type(dataset).__name__, _data_of(attributes)
    hashing = _Hashing()
    try:
        _PicklerOfData(hashing, protocol=4).dump(content)
        return hashing.hash.hexdigest()
    except _TooLargeError:
        digest = hashing.hash.hexdigest()
    except Exception:  # such as a function within a transformation, or code of the user
        digest = type(dataset).__name__
    if depth:
        digest += "".join(f" {name} {fingerprint(piece, depth - 1)}" for name, piece in _parts_of(dataset))
    return hashlib.sha256(digest.encode()).hexdigest()


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, piece in itertools.islice(items, 0, None, max(1, len(value) // _PARTS)):
            yield repr(name)[:99] if isinstance(name, (int, str)) else "", piece
    elif isinstance(attributes := getattr(value, "__dict__", None), dict) and not isinstance(value, type):
        yield from _data_of(attributes).items()
