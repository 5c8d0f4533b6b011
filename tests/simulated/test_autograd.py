"""Gradients across simulated devices: where they land, and that they are right."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.usefixtures("node")


def test_gradients_return_to_the_source():
    a = torch.randn(3, device="cuda:0", requires_grad=True)
    host = torch.randn(3, requires_grad=True)
    (a.to("cuda:3") * host.cuda(3)).sum().cpu().backward()
    assert a.grad.device == torch.device("cuda:0") and torch.equal(a.grad.cpu(), host.detach())
    assert type(host.grad) is torch.Tensor and torch.equal(host.grad, a.detach().cpu())


def test_double_backward_and_gradcheck():
    x = torch.randn(3, dtype=torch.float64, device="cuda:0", requires_grad=True)
    (first,) = torch.autograd.grad((x.to("cuda:1") ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.device == x.device and torch.allclose(second, 6 * x.detach())
    assert torch.autograd.gradcheck(lambda t: (t.to("cuda:2") ** 2).sum(), (x,))


def test_custom_functions_get_and_give_device_tensors():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            assert x.device == torch.device("cuda:1")
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            assert grad.device == torch.device("cuda:1")
            return grad * 2

    x = torch.ones(2, device="cuda:1", requires_grad=True)
    Double.apply(x).sum().backward()
    assert x.grad.tolist() == [2, 2]


def test_zeros_for_a_function_of_the_user_are_on_the_device_of_the_output():
    seen: list[int] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2, x.to("cuda:1")

        @staticmethod
        def backward(ctx, first, second):
            seen.extend((first.device.index, second.device.index))
            return first * 2 + second.to(first.device)

    x = torch.ones(2, device="cuda:3", requires_grad=True)
    Twice.apply(x)[0].sum().backward()
    assert seen == [3, 1] and x.grad.tolist() == [2, 2]
