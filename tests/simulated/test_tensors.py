"""Tensors on simulated devices: where they are, how they move, and that they stay tensors."""

from __future__ import annotations

import contextlib
import copy
import importlib
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mgpu_check.simulated import is_simulated, to_real
from tests.simulated.conftest import Passing

pytestmark = pytest.mark.usefixtures("node")


@pytest.mark.parametrize("device", ["cuda:2", torch.device("cuda", 2), 2])
def test_a_tensor_says_where_it_is(device):
    t = torch.ones(3, device=device)
    assert (t.device, t.is_cuda, t.is_cpu, t.get_device()) == (torch.device("cuda:2"), True, False, 2)
    assert t.type() == "torch.cuda.FloatTensor"
    assert t.untyped_storage().device == torch.device("cuda:2")
    assert str(t) == "tensor([1., 1., 1.], device='cuda:2')"
    assert is_simulated(t) and isinstance(t, torch.Tensor)


FACTORIES = {
    "arange": lambda d: torch.arange(4, device=d),
    "as_tensor": lambda d: torch.as_tensor([1.0], device=d),
    "asarray": lambda d: torch.asarray([1.0], device=d),
    "empty": lambda d: torch.empty(2, 3, device=d),
    "empty_strided": lambda d: torch.empty_strided((2, 3), (3, 1), device=d),
    "eye": lambda d: torch.eye(3, device=d),
    "full": lambda d: torch.full((2,), 3.0, device=d),
    "full_like": lambda d: torch.full_like(torch.zeros(2), 3.0, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 5, device=d),
    "new_full": lambda d: torch.zeros(1).new_full((2,), 1.0, device=d),
    "new_tensor": lambda d: torch.zeros(1).new_tensor([1.0], device=d),
    "normal": lambda d: torch.normal(0.0, 1.0, (3,), device=d),
    "ones": lambda d: torch.ones(2, device=d),
    "rand": lambda d: torch.rand(2, device=d),
    "rand_like": lambda d: torch.rand_like(torch.zeros(2), device=d),
    "randint": lambda d: torch.randint(0, 5, (3,), device=d),
    "randn": lambda d: torch.randn(2, device=d, dtype=torch.bfloat16),
    "randperm": lambda d: torch.randperm(5, device=d),
    "sparse": lambda d: torch.sparse_coo_tensor(
        torch.tensor([[0], [1]]), [2.0], (2, 2), device=d, check_invariants=False
    ),
    "tensor": lambda d: torch.tensor([[1, 2]], device=d),
    "tensor of tensors": lambda d: torch.tensor([torch.ones((), device=d), 2.0], device=d),
    "tril_indices": lambda d: torch.tril_indices(3, 3, device=d),
    "zeros": lambda d: torch.zeros(2, device=d, requires_grad=True),
    "zeros_like": lambda d: torch.zeros_like(torch.zeros(2), device=d),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.11
def test_factories():
    for name, make in FACTORIES.items():
        made = make("cuda:1")
        assert made.device == torch.device("cuda:1") and made.is_leaf, name


def test_default_device():
    torch.set_default_device("cuda:1")
    try:
        assert torch.zeros(1).device == nn.Linear(2, 2).weight.device == torch.device("cuda:1")
        assert torch.zeros(1, device="cpu").device.type == "cpu"
    finally:
        torch.set_default_device(None)
    with torch.device("cuda:2"):
        assert torch.rand(1).device == torch.device("cuda:2")
    assert torch.zeros(1).device.type == "cpu"


def test_views_share_memory():
    x = torch.zeros(3, 3, device="cuda:1")
    row = x[1]
    row += 2
    x[:, 0] = torch.ones(3)  # a copy from the host, as on CUDA
    x[x > 1] = 7
    assert x.cpu().tolist() == [[1, 0, 0], [1, 7, 7], [1, 0, 0]]
    assert x.detach().data_ptr() == x.data_ptr()


def test_deepcopy_and_pickle():
    net = nn.Linear(2, 2).to("cuda:2")
    net(torch.ones(1, 2, device="cuda:2")).sum().backward()
    net.tied = net.weight
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert twin.weight.device == torch.device("cuda:2")
        assert torch.equal(twin.weight, net.weight) and twin.weight is not net.weight
        assert twin.tied is twin.weight
    assert copy.deepcopy(net).weight.grad is None  # as of any Parameter; of other leaves it is copied
    leaf = torch.ones(2, device="cuda:1", requires_grad=True)
    (leaf * 3).sum().backward()
    assert copy.deepcopy(leaf).grad.tolist() == [3.0, 3.0]
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        copy.deepcopy(net.weight * 2)


def test_to_real_gives_a_plain_tensor():
    t = torch.arange(4.0, device="cuda:1")[1:].requires_grad_()
    plain = to_real(t)
    assert type(plain) is torch.Tensor and plain.device.type == "cpu" and plain.requires_grad
    assert plain.tolist() == [1, 2, 3]
    assert type(to_real(nn.Linear(1, 1).cuda().weight)) is nn.Parameter
    assert type(to_real(torch.ones(2))) is torch.Tensor


@pytest.mark.usefixtures("node")
def test_what_c_makes_for_an_operator_is_on_the_device():
    a = torch.eye(3, device="cuda:1")
    for rank in (torch.linalg.matrix_rank(a), torch.linalg.matrix_rank(a, atol=torch.tensor(0.5, device="cuda:1"))):
        assert rank.device == a.device and rank.item() == 3
    signal = torch.randn(64, device="cuda:1")
    window = torch.ones(16, device="cuda:1")
    spectrum = torch.stft(signal, 16, 4, window=window, return_complex=True)
    back = torch.istft(spectrum, 16, 4)
    assert back.device == a.device and torch.allclose(back, signal, atol=1e-5)
    empty = torch.empty(0, device="cuda:1")
    joined = torch._utils._flatten_dense_tensors([empty, a])
    parts = torch._utils._unflatten_dense_tensors(joined, [empty, a])
    assert [part.device for part in parts] == [a.device] * 2 and torch.equal(parts[1], a)


COMBINED_IN_C = {
    "one_hot": lambda x: F.one_hot(x.long(), 3),
    "combinations": lambda x: torch.combinations(x, with_replacement=True),
    "combinations of none": lambda x: torch.combinations(x, 0),
    "quantile": lambda x: torch.quantile(x, 0.3),
    "quantile of a tensor": lambda x: x.quantile(torch.tensor([0.1, 0.5], device=x.device)),
    "nanquantile": lambda x: x.nanquantile(0.3),
    "causal attention": lambda x: F.scaled_dot_product_attention(
        x[None, :, None], x[None, :, None], x[None, :, None], is_causal=True
    ),
    "causal attention with dropout": lambda x: F.scaled_dot_product_attention(
        *(x.expand(1, 1, 2, 3).mT,) * 3, None, 1e-9, True
    ),
}


@pytest.mark.parametrize("mode", [contextlib.nullcontext, Passing])
@pytest.mark.parametrize("name", COMBINED_IN_C)
def test_what_c_combines_with_a_tensor_is_on_its_device_under_a_mode_too(name, mode):
    x = torch.tensor([0.0, 1.0, 2.0])
    expected = COMBINED_IN_C[name](x)
    with mode():
        found = COMBINED_IN_C[name](x.to("cuda:1"))
    assert found.device == torch.device("cuda:1") and found.dtype == expected.dtype
    assert torch.allclose(found.cpu(), expected)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, Passing])
@pytest.mark.parametrize("name", ["combinations", "quantile", "nanquantile", "causal attention"])
def test_gradients_come_back_through_what_c_combines(name, mode):
    gradients = []
    for device in ("cpu", "cuda:1"):
        x = torch.tensor([0.0, 1.0, 2.0], device=device, requires_grad=True)
        with mode():
            (COMBINED_IN_C[name](x) * 3).sum().backward()
        gradients.append(x.grad.cpu())
    one, other = gradients
    assert torch.allclose(one, other)


def test_constructors_of_before_there_were_dtypes():
    x = torch.ones(2, dtype=torch.float64, device="cuda:1")
    assert x.new(3).device == x.device and x.new(3).dtype == x.dtype
    assert x.new([1, 2]).tolist() == [1, 2] and x.new(torch.Size([2, 3])).shape == (2, 3)
    assert x.new(x).data_ptr() == x.data_ptr()
    cuda: Any = torch.cuda
    assert isinstance(x, cuda.DoubleTensor) and not isinstance(x, cuda.FloatTensor)
    assert not isinstance(torch.ones(1), cuda.FloatTensor)
    made = cuda.FloatTensor([1, 2])
    assert made.type() == "torch.cuda.FloatTensor" and made.tolist() == [1, 2]
    assert x.type(cuda.FloatTensor).dtype is torch.float32
    with pytest.raises(RuntimeError, match="legacy constructor expects device type: cuda"):
        x.new(3, device="cpu")


@pytest.mark.filterwarnings("ignore")  # it is deprecated
def test_scripts_may_call_functions_that_are_replaced():
    def two(n: int):
        return torch.zeros(n) + torch.ones(n)

    assert torch.jit.script(two)(2).tolist() == [1, 1]
    assert importlib.import_module("torch.distributed.optim").ZeroRedundancyOptimizer


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11
def test_profilers_see_the_host_and_ask_no_driver(capfd):
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    x = torch.ones(3, device="cuda:1", requires_grad=True)
    with torch.profiler.profile(activities=activities) as seen:
        (x * 2).sum().backward()
    assert any(event.key == "aten::mul" for event in seen.key_averages())
    assert seen.key_averages().table(sort_by="cuda_time_total")
    with torch.autograd.profiler.emit_nvtx():
        (x * 2).sum().backward()
    assert "Failed to record CUDA event" not in capfd.readouterr().err


class Rows(torch.Tensor):
    """As torchrec has slices of its tables."""


def test_a_tensor_of_a_class_of_the_script_is_on_its_device(node):
    whole = torch.ones(4, 2, device="cuda:1", requires_grad=True)
    part = torch.zeros(3).type_as(whole)[:, None] + whole[1:].as_subclass(Rows)
    assert isinstance(whole[1:].as_subclass(Rows), Rows) and part.device == torch.device("cuda:1")
    part.as_subclass(torch.Tensor).sum().backward()
    assert whole.grad.tolist() == [[0, 0], [1, 1], [1, 1], [1, 1]] and whole.grad.is_cuda
    with pytest.raises(RuntimeError, match="on the same device"):
        whole[1:].as_subclass(Rows) + torch.ones(3, 2)
