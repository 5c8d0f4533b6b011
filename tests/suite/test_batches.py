"""Specs of batches build the nesting that they describe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_check.oracles.strategies import batches
from mgpu_check.strategies import BatchSpec, Leaf, Nested, Sample, TensorSpec, batch_sizes

X, Y = TensorSpec((4, 2)), TensorSpec((4,), "int64", seed=1)


@pytest.mark.parametrize(
    ("kind", "expected"), [("tuple", tuple), ("list", list), ("dict", dict), ("namedtuple", Sample)]
)
def test_containers(kind: str, expected: Any) -> None:
    built: Any = Nested(kind, (X, Y)).build()
    assert type(built) is expected
    first, second = built.values() if isinstance(built, dict) else built
    assert torch.equal(first, X.build())
    assert torch.equal(second, Y.build())


def tensors_in(spec: BatchSpec) -> list[TensorSpec]:
    if isinstance(spec, Nested):
        return [tensor for part in spec.parts for tensor in tensors_in(part)]
    return [spec] if isinstance(spec, TensorSpec) else []


@pytest.mark.slow
@settings(max_examples=200, deadline=None, database=None)
@given(data=st.data(), dim=st.sampled_from((0, 1, 2, -1, -2)), size=st.integers(0, 9))
def test_every_tensor_has_the_size_along_dim(data: st.DataObject, dim: int, size: int) -> None:
    batch = data.draw(batches(size, dim, leaves=True))
    assert all(tensor.shape[dim] == size for tensor in tensors_in(batch))
    assert eval(repr(batch), {kind.__name__: kind for kind in (Nested, Leaf, TensorSpec)}) == batch


@settings(max_examples=50, deadline=None, database=None)
@given(data=st.data())
def test_without_containers_a_batch_is_a_tensor(data: st.DataObject) -> None:
    assert isinstance(data.draw(batches(3, kinds=())), TensorSpec)


@settings(max_examples=100, deadline=None, database=None)
@given(data=st.data(), devices=st.integers(1, 8))
def test_sizes_without_the_empty_batch(data: st.DataObject, devices: int) -> None:
    assert data.draw(batch_sizes(devices, empty=False)) >= 1
