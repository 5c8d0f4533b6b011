"""Bits of tensors are told apart as they are, and however the tensor lies in memory."""

from __future__ import annotations

import pytest
import torch

from mgpu_check.torch_hooks.tensors import bytes_of, copied, digest_of


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
