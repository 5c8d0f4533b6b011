"""Nested values are taken apart and put together again, for every kind of container."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from mgpu_check.torch_hooks.nested import entries, leaves, tensors_of, with_tensors

Pair = namedtuple("Pair", "first second")  # as people write it


@dataclass
class Batch:
    inputs: Any
    rest: Any = None
    length: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.length = len(tensors_of(self.inputs))


class Rows(list[Any]):
    """A list of one's own, which torch's pytree takes for one thing."""


A, B, C = (torch.full((2,), float(i)) for i in range(3))


@pytest.mark.parametrize(
    ("value", "keys"),
    [
        ([A, B, C], [0, 1, 2]),
        ((A, [B, C]), [0, 1]),
        (Rows([A, B, C]), [0, 1, 2]),
        (Pair(A, (B, C)), ["first", "second"]),
        ({"z": A, "a": {"k": B, 1: C}}, ["z", "a"]),
        (OrderedDict(z=A, a=[B, "text", C]), ["z", "a"]),
        (defaultdict(list, z=A, a=[B, None, C]), ["z", "a"]),
        (UserDict(z=A, a=UserDict(b=B, c=C)), ["z", "a"]),
        (Batch(A, Batch({"b": B}, C)), ["inputs", "rest", "length"]),
        (deque([A, (B, C)]), [0, 1]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_structures_are_walked_in_order_and_rebuilt(value, keys):
    assert [id(tensor) for tensor in tensors_of(value)] == [id(A), id(B), id(C)]
    assert [id(leaf) for leaf in leaves(value) if isinstance(leaf, torch.Tensor)] == [id(A), id(B), id(C)]
    assert [key for key, _ in entries(value)] == keys
    doubled = with_tensors(value, [2 * A, 2 * B, 2 * C])
    assert type(doubled) is type(value)
    assert [tensor.tolist() for tensor in tensors_of(doubled)] == [(2 * one).tolist() for one in (A, B, C)]
    assert [id(tensor) for tensor in tensors_of(value)] == [id(A), id(B), id(C)]
    assert [key for key, _ in entries(doubled)] == keys


@pytest.mark.parametrize(
    "value", [A, None, 1, "text", b"bytes", {1, 2}, object(), Batch], ids=lambda value: type(value).__name__
)
def test_other_things_are_one_thing(value):
    assert entries(value) is None
    assert list(leaves(value)) == [value] or value is A
    assert with_tensors(value, [A]) is value


def test_a_leaf_is_what_the_caller_says():
    ids = [1, 2]
    assert list(leaves({"ids": ids, "x": [A, 3]}, lambda one: one is ids)) == [ids, A, 3]
