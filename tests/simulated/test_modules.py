"""Modules, optimizers and data parallelism on simulated devices, against the same on the CPU."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.cuda.comm
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import rnn

pytestmark = pytest.mark.usefixtures("node")

MODULES = {
    "linear": (lambda: nn.Linear(8, 4), (3, 8)),
    "conv": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 2, 5, 5)),
    "transposed conv": (lambda: nn.ConvTranspose2d(2, 3, 3), (2, 2, 4, 4)),
    "batch norm": (lambda: nn.BatchNorm2d(2), (3, 2, 4, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (3, 4, 5)),
    "layer norm": (lambda: nn.LayerNorm(8), (3, 8)),
    "lstm": (lambda: nn.LSTM(8, 4, num_layers=2, batch_first=True), (2, 5, 8)),
    "gru": (lambda: nn.GRU(8, 4, bidirectional=True), (5, 2, 8)),
    "rnn": (lambda: nn.RNN(8, 4), (5, 2, 8)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 5, 8)),
    "prelu": (lambda: nn.PReLU(), (3, 4)),
    "pool": (lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)), (2, 3, 6, 6)),
}


def first(out):
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", MODULES)
def test_a_module_computes_as_on_the_cpu(name, mode):
    make, shape = MODULES[name]
    reference = make().train(mode == "train")
    net = copy.deepcopy(reference).to("cuda:1")
    x = torch.randn(shape)
    want, got = first(reference(x)), first(net(x.cuda(1)))
    assert got.device == torch.device("cuda:1")
    torch.testing.assert_close(got.cpu(), want)
    want.square().sum().backward()
    got.square().sum().backward()
    for mine, other in zip(net.parameters(), reference.parameters(), strict=True):
        assert mine.grad.device == torch.device("cuda:1")
        torch.testing.assert_close(mine.grad.cpu(), other.grad)
    for mode_off in (torch.no_grad, torch.inference_mode):
        with mode_off():
            torch.testing.assert_close(first(net(x.cuda(1))).cpu(), first(reference(x)))


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_packed_sequences_are_padded_on_their_device(kind, ordered):
    x, lengths = torch.randn(3, 4, 2), torch.tensor([4, 3, 1] if ordered else [1, 4, 3])
    found = []
    for device in ("cpu", "cuda:1"):
        torch.manual_seed(0)
        layer, leaf = kind(2, 3, batch_first=True).to(device), x.detach().to(device).requires_grad_()
        packed = rnn.pack_padded_sequence(leaf, lengths, batch_first=True, enforce_sorted=ordered)
        padded, counted = rnn.pad_packed_sequence(layer(packed)[0], batch_first=True)
        assert (str(padded.device), counted.tolist()) == (device, lengths.tolist())
        padded.square().sum().backward()
        found.append([value.cpu() for value in (padded, leaf.grad, *(p.grad for p in layer.parameters()))])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "sgd foreach": lambda p: torch.optim.SGD(p, 0.1, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, 0.1, fused=True),
    "adam": lambda p: torch.optim.Adam(p),
    "adam for loop": lambda p: torch.optim.Adam(p, foreach=False),
    "adam foreach": lambda p: torch.optim.Adam(p, foreach=True, amsgrad=True),
    "adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_over_two_devices(name):
    reference = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    net = copy.deepcopy(reference)
    net[0].to("cuda:1"), net[1].to("cuda:2")
    x = torch.randn(3, 4)
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (reference, net)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        reference(x).square().sum().backward()
        net[1](net[0](x.cuda(1)).to("cuda:2")).square().sum().backward()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (reference, net)]
        torch.testing.assert_close(norms[1].cpu(), norms[0])
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), other)
    state = copy.deepcopy(optimizers[0].state_dict())
    optimizers[1].load_state_dict(state)  # from the CPU to where the parameters are
    optimizers[1].step()


LOWER, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_by_cudas_lists(dtype):
    net, x = nn.Linear(4, 4).cuda(1), torch.randn(3, 4, device="cuda:1")
    with torch.autocast("cuda", dtype=dtype):
        y = net(x)
        kinds = [y, y + 1, y.softmax(-1), y.sum(), y.exp(), torch.cat([y, x]), (x @ x.T), F.mse_loss(y, y)]
        assert [t.dtype for t in kinds] == [dtype, dtype, FULL, FULL, FULL, FULL, dtype, FULL]
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is FULL  # a host tensor is none of its business
        assert torch.is_autocast_enabled("cuda") and not torch.is_autocast_enabled("cpu")
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(x.sigmoid(), x.sigmoid())
        with torch.autocast("cuda", enabled=False):
            assert net(x).dtype is FULL
        y.sum().backward()
    assert net.weight.grad.dtype is FULL
    assert net(x).dtype is FULL


def test_autocast_of_the_cpu_leaves_devices_alone():
    x = torch.randn(3, 4, device="cuda:1")
    with torch.autocast("cpu", dtype=LOWER):
        assert (x @ x.T).dtype is FULL
        assert (x.cpu() @ x.cpu().T).dtype is LOWER
        assert torch.is_autocast_enabled("cpu")


def test_lazy_modules_say_where_they_are_and_data_parallel_refuses_them_until_they_have_a_shape():
    lazy = nn.LazyLinear(3).to("cuda:1")
    assert lazy.weight.device == torch.device("cuda:1") and lazy.weight.is_cuda
    assert nn.LazyLinear(3, device="cuda:2").weight.get_device() == 2
    net = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyBatchNorm1d()).to("cuda:0")
    batch = torch.randn(6, 5, device="cuda:0")
    with pytest.raises(RuntimeError, match="Modules with uninitialized parameters can't be used with `DataParallel`"):
        nn.DataParallel(net)(batch)
    net(batch)
    out = nn.DataParallel(net)(batch)
    out.sum().backward()
    assert out.shape == (6, 4) and all(p.grad.device == torch.device("cuda:0") for p in net.parameters())


def test_what_is_on_a_parameter_stays_where_a_module_is_moved():
    net: Any = nn.Linear(2, 2)
    calls: list[Any] = []
    weight = net.weight
    weight.decays = False
    seen = weight.register_hook(lambda grad: calls.append(grad.device))
    weight.register_post_accumulate_grad_hook(lambda param: calls.append(param.decays))
    for move in (lambda: net.cuda(1), net.double, net.cpu, lambda: net.to("cuda:2")):
        move()
        assert net.weight is weight and weight.decays is False
    net(torch.ones(1, 2, dtype=torch.float64, device="cuda:2")).sum().backward()
    assert calls == [torch.device("cuda:2"), False]
    seen.remove()
    net.zero_grad()
    net(torch.ones(1, 2, dtype=torch.float64, device="cuda:2")).sum().backward()
    assert calls[2:] == [False]
    held = net.weight.expand_as(net.weight)  # a graph holds it
    assert net.cpu().weight is weight and weight.decays is False and held.device == torch.device("cuda:2")


def test_an_optimizer_still_has_the_parameters_of_a_module_that_was_moved_while_a_graph_holds_them():
    net: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).cuda(1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loss = net(torch.ones(1, 2, device="cuda:1")).sum()
    loss.backward(retain_graph=True)
    gradient = net[0].weight.grad
    for move in (net.cpu, net.cuda):
        move()
        assert net[0].weight.grad is gradient and gradient.device == net[0].weight.device
        before = net[0].weight.detach().clone()
        optimizer.step()
        assert not torch.equal(net[0].weight, before)
    net.cpu()
    with pytest.raises(RuntimeError, match="moved from cuda:1 to cpu after the forward pass"):
        loss.backward()


def test_parameters_that_are_made_without_values_on_another_device_are_untied():
    def tied():
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        net[1].weight = net[0].weight
        return net

    for move in (lambda net: net.to("meta"), lambda net: net.to("meta").to_empty(device="cuda:0")):
        net = move(tied())
        assert net[1].weight is not net[0].weight
    for move in (lambda net: net.cuda(1), lambda net: net.to_empty(device="cuda:1"), lambda net: net.cuda().cpu()):
        net = move(tied())
        assert net[1].weight is net[0].weight
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        net[0].weight.data = torch.ones(2, 2, device="cuda:0").to("meta")
        tied().cuda()[0].weight.data = torch.ones(2, 2, device="meta")


def test_data_that_is_assigned_leaves_the_gradient_where_it_is():
    weight = nn.Parameter(torch.ones(2))
    weight.grad = gradient = torch.ones(2)
    weight.data = torch.zeros(2, dtype=torch.float64, device="cuda:1")
    assert weight.device == torch.device("cuda:1") and weight.grad is gradient and gradient.device.type == "cpu"
    result = (weight * 2).cpu()
    with pytest.raises(RuntimeError, match="is the result of an operation"):
        result.data = torch.zeros(2, dtype=torch.float64, device="cuda:1")


def test_a_parameter_keeps_its_class_and_its_attributes():
    class Named(nn.Parameter):
        pass

    net: Any = nn.Linear(2, 2)
    net.weight = Named(net.weight.detach())
    net.cuda(1).weight.decays = False
    assert isinstance(net.weight, nn.Parameter) and pickle.loads(pickle.dumps(net)).weight.decays is False
    assert type(copy.deepcopy(net).cpu().weight) is Named and type(net.cpu().weight) is Named


def test_products_in_another_dtype_accumulate_in_it():
    """torch has them for CUDA only."""
    a, b = torch.ones(2, 300), torch.ones(300, 3)
    device, wide = torch.device("cuda:1"), torch.float32
    narrow = a.to(device, torch.bfloat16), b.to(device, torch.bfloat16)
    batches = narrow[0][None], narrow[1][None]
    found = [
        torch.mm(*narrow, out_dtype=wide),
        torch.mm(*narrow, out_dtype=wide, out=torch.empty(2, 3, device=device)),
        torch.bmm(*batches, out_dtype=wide)[0],
        torch.addmm(torch.zeros(2, 3, device=device), *narrow, out_dtype=wide),
        torch.baddbmm(torch.zeros(1, 2, 3, device=device), *batches, out_dtype=wide)[0],
    ]
    assert all(one.device == device and one.dtype == wide for one in found)
    assert all(torch.equal(one.cpu(), torch.full((2, 3), 300.0)) for one in found)
