"""Values of tensors in all classes that torch and its users have, and what modules hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

from mgpu_check.torch_hooks.nested import named_buffers, named_modules, named_parameters
from mgpu_check.torch_hooks.tensors import readable

DATA = torch.arange(6.0).reshape(2, 3)


class Raising(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError(f"{function} was called")

    def __getattr__(self, name):
        raise RuntimeError(f"{name} was read")


class Logging(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[override]
        raise RuntimeError(f"{function} was called")


def raising(kind: type[torch.Tensor], data: torch.Tensor = DATA) -> torch.Tensor:
    return torch.Tensor._make_subclass(kind, data)


KINDS = {
    "leaf": lambda: DATA.clone().requires_grad_(),
    "result": lambda: DATA.clone().requires_grad_() * 1,
    "parameter": lambda: nn.Parameter(DATA),
    "sparse": lambda: DATA.to_sparse(),
    "csr": lambda: DATA.to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(DATA, 1.0, 0, torch.qint8),
    "conj": lambda: DATA.conj(),
    "overridden": lambda: raising(Raising),
    "overridden and sparse": lambda: raising(Raising, DATA.to_sparse()),
    "dispatched": lambda: raising(Logging),
}


@pytest.mark.filterwarnings("ignore")  # torch has kinds of tensors that it warns of
@pytest.mark.parametrize("made", KINDS.values(), ids=KINDS)
def test_values_are_read_without_their_class(made):
    found = readable(made())
    assert type(found) in (torch.Tensor, nn.Parameter) and not found.requires_grad
    assert found.layout is torch.strided and torch.equal(found, DATA)


def test_a_tensor_without_elements_has_values():
    assert readable(DATA[:0]) is not None


def fake() -> torch.Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(DATA)


def freed() -> torch.Tensor:
    tensor = DATA.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "made",
    [
        lambda: DATA.to("meta"),
        fake,
        freed,
        lambda: TwoTensor(DATA, DATA),
        lambda: masked_tensor(DATA, DATA > 0),
        lambda: torch.nested.nested_tensor([DATA, DATA[:1]]),
        lambda: torch.nested.nested_tensor([DATA, DATA[:1]], layout=torch.jagged),
        lambda: nn.parameter.UninitializedParameter(),
    ],
    ids=["meta", "fake", "freed", "wrapper", "masked", "nested", "jagged", "lazy"],
)
def test_tensors_without_values_of_their_own(made):
    assert readable(made()) is None


def test_tensors_of_transformations_have_no_values():
    found: list[Any] = []

    def total(tensor: torch.Tensor) -> torch.Tensor:
        found.append(readable(tensor))
        return tensor.sum()

    torch.func.grad(total)(DATA)
    torch.vmap(total)(DATA)
    assert found == [None, None]


class Shadowing(nn.Linear):
    modules = children = named_children = buffers = parameters = named_parameters = named_buffers = None

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("named_modules was called")


def test_modules_are_listed_as_torch_lists_them():
    shared = nn.BatchNorm1d(2)
    net = nn.Sequential(nn.Sequential(shared, nn.Linear(2, 2)), shared)
    net.register_module("none", None)
    assert list(named_modules(net)) == list(net.named_modules())
    for mine, of_torch in ((named_parameters, net.named_parameters()), (named_buffers, net.named_buffers())):
        assert [(name, id(tensor)) for name, tensor in mine(net)] == [(name, id(tensor)) for name, tensor in of_torch]


def test_modules_whose_methods_are_replaced():
    net = nn.Sequential(Shadowing(2, 3))
    assert [name for name, _ in named_modules(net)] == ["", "0"]
    assert [name for name, _ in named_parameters(net)] == ["0.weight", "0.bias"]
