"""Tensors are compared by their bits, in every memory layout."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from mgpu_check.diagnosis.observations import Parcel
from mgpu_check.torch_hooks.tensors import all_finite, bytes_of, copied, digest_of


@pytest.mark.parametrize(
    ("tensor", "same"),
    [
        (torch.arange(6).view(2, 3).t(), torch.tensor([[0, 3], [1, 4], [2, 5]])),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j])),
        (torch.tensor([1 + 2j]).conj().imag, torch.tensor([-2.0])),
        (torch.ones(3, requires_grad=True), torch.ones(3)),
        (torch.ones(0, 2), torch.zeros(0, 2)),
    ],
    ids=["strided", "conjugated", "negated", "differentiable", "empty"],
)
def test_the_same(tensor, same):
    assert bytes_of(tensor) == bytes_of(same) and len(bytes_of(tensor)) == same.numel() * same.element_size()
    assert digest_of(tensor) == digest_of(same)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(1), -torch.zeros(1)),
        (torch.zeros(2, 1), torch.zeros(2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(0), torch.zeros(0, 2)),
    ],
    ids=["sign", "shape", "dtype", "empty"],
)
def test_not_the_same(one, other):
    assert digest_of(one) != digest_of(other)


def test_a_copy_has_memory_of_its_own():
    for tensor in (torch.ones(2, 3), torch.ones(2, 3).t(), torch.eye(2).to_sparse(), torch.ones(2) + 1j):
        copy = copied(tensor.requires_grad_())
        assert copy.is_contiguous() and copy.layout == torch.strided and not copy.requires_grad
        expected = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        assert torch.equal(copy, expected)
        assert copy.data_ptr() != expected.data_ptr()


def test_finite():
    large = torch.finfo(torch.float32).max
    assert all(map(all_finite, (torch.ones(3), torch.full((9,), large), torch.arange(3), torch.ones(0))))
    assert not any(map(all_finite, (torch.tensor([1.0, torch.nan]), torch.tensor([torch.inf, -torch.inf]))))


def test_a_parcel_arrives_as_the_dict_that_it_was():
    content: dict[str, Any] = {
        "large": torch.arange(20_000.0).view(100, 200),
        "gaps": torch.arange(40_000, dtype=torch.bfloat16).view(200, 200).t(),
        "small": torch.ones(2),
        "scalar": torch.tensor(2),
        "empty": torch.ones(0, 3),
        "differentiable": torch.ones(10_000, requires_grad=True),
        "conjugated": torch.ones(10_000, dtype=torch.complex64).conj(),
        "sparse": torch.eye(200).to_sparse(),
        "no tensor": "text",
    }
    got = pickle.loads(pickle.dumps(Parcel(content), protocol=pickle.HIGHEST_PROTOCOL))
    assert type(got) is dict and got.keys() == content.keys()
    assert got.pop("no tensor") == content.pop("no tensor")
    for name, value in content.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name].to_dense(), value.to_dense()), name
    got["large"].add_(1)  # it can be written to
    assert copy.deepcopy(Parcel({"one": torch.ones(3)}))["one"].tolist() == [1, 1, 1]  # type: ignore[index]  # a dict
