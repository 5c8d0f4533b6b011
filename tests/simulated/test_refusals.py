"""CUDA's errors, in type and wording, where operands meet that may not; and no error where they may."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.simulated.conftest import Passing

pytestmark = pytest.mark.usefixtures("node")


def t(device, *shape, dtype=torch.float32):
    return torch.ones(*shape or (3,), dtype=dtype, device=device)


def found(a, b):
    return f"Expected all tensors to be on the same device, but found at least two devices, {a} and {b}!"


def got(argument, device, common, method):
    return (
        f"Expected all tensors to be on the same device, but got {argument} is on {device}, different from other "
        f"tensors on {common} (when checking argument in method wrapper_CUDA_{method})"
    )


LONG = torch.int64
REFUSED = {
    "add": (lambda: t("cuda:0") + t("cuda:1"), found("cuda:0", "cuda:1")),
    "add reversed": (lambda: t("cuda:1") + t("cuda:0"), found("cuda:1", "cuda:0")),
    "add host": (lambda: t("cpu") + t("cuda:1"), found("cuda:1", "cpu")),
    "add temporary": (lambda: t("cuda:1").add(torch.ones(3)), found("cuda:1", "cpu")),
    "device scalar and host": (lambda: torch.tensor(2.0, device="cuda:0") * t("cpu"), found("cuda:0", "cpu")),
    "two device scalars": (lambda: torch.tensor(1.0, device="cuda:0") * torch.tensor(1.0, device="cuda:1"),
                           found("cuda:0", "cuda:1")),
    "in place": (lambda: t("cuda:0").add_(t("cpu")), found("cuda:0", "cpu")),
    "in place on host": (lambda: t("cpu").add_(t("cuda:0")), found("cuda:0", "cpu")),
    "out": (lambda: torch.add(t("cuda:0"), t("cuda:0"), out=t("cpu")), found("cuda:0", "cpu")),
    "out of matmul": (lambda: torch.mm(t("cuda:0", 2, 2), t("cuda:0", 2, 2), out=t("cuda:1", 2, 2)),
                      got("self", "cuda:0", "cuda:1", "mm_out_out")),
    "matmul": (lambda: t("cuda:0", 2, 2) @ t("cpu", 2, 2), got("mat2", "cpu", "cuda:0", "mm")),
    "bmm": (lambda: torch.bmm(t("cuda:0", 1, 2, 2), t("cuda:1", 1, 2, 2)), got("mat2", "cuda:1", "cuda:0", "bmm")),
    "linear": (lambda: nn.Linear(3, 2).cuda()(t("cpu", 1, 3)), got("mat1", "cpu", "cuda:0", "addmm")),
    "cat": (lambda: torch.cat([t("cuda:0"), t("cuda:2")]), got("tensors", "cuda:2", "cuda:0", "cat")),
    "stack": (lambda: torch.stack([t("cuda:0"), t("cpu")]), got("tensors", "cpu", "cuda:0", "cat")),
    "embedding": (lambda: nn.Embedding(3, 2).cuda()(t("cpu", 2, dtype=LONG)),
                  got("index", "cpu", "cuda:0", "_index_select")),
    "cross entropy": (lambda: F.cross_entropy(t("cuda:0", 2, 3), t("cpu", 2, dtype=LONG)),
                      got("target", "cpu", "cuda:0", "nll_loss_forward")),
    "mse": (lambda: F.mse_loss(t("cuda:0"), t("cuda:1")), found("cuda:0", "cuda:1")),
    "gather": (lambda: t("cuda:0").gather(0, t("cpu", 1, dtype=LONG)), got("index", "cpu", "cuda:0", "gather")),
    "layer norm": (lambda: nn.LayerNorm(3).cuda()(t("cuda:1", 2, 3)),
                   got("weight", "cuda:0", "cuda:1", "_native_layer_norm")),
    "conv host input": (
        lambda: nn.Conv2d(1, 1, 2).cuda()(t("cpu", 1, 1, 3, 3)),
        "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same or input should "
        "be a MKLDNN tensor and weight is a dense tensor",
    ),
    "conv host weight": (lambda: nn.Conv2d(1, 1, 2)(t("cuda:0", 1, 1, 3, 3)),
                         "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same"),
    "index by device": (lambda: t("cpu")[t("cuda:0", 1, dtype=LONG)],
                        "indices should be either on cpu or on the same device as the indexed tensor (cpu)"),
    "index by other device": (lambda: t("cuda:0")[t("cuda:1", 1, dtype=LONG)],
                              "indices should be either on cpu or on the same device as the indexed tensor (cuda:0)"),
    "masked fill": (lambda: t("cuda:0").masked_fill(t("cpu") > 0, 1.0),
                    "expected self and mask to be on the same device, but got mask on cpu and self on cuda:0"),
    "attention": (
        lambda: F.scaled_dot_product_attention(*(t(d, 1, 2, 4) for d in ("cuda:0", "cpu", "cpu"))),
        "Expected query, key, and value to have the same device type, but got query.device: cuda:0 key.device: cpu and "
        "value.device: cpu instead.",
    ),
    "gradient": (
        lambda: setattr(t("cuda:0").requires_grad_(), "grad", t("cpu")),
        "attempting to assign a gradient with device type 'cpu' to a tensor with device type 'cuda'. Please ensure "
        "that the gradient and the tensor are on the same device",
    ),
    "data parallel": (
        lambda: nn.DataParallel(nn.Linear(3, 2).to("cuda:1"), device_ids=[0, 1])(t("cpu", 2, 3)),
        "module must have its parameters and buffers on device cuda:0 (device_ids[0]) but found one of them on device: "
        "cuda:1",
    ),
    "generator": (lambda: torch.randn(2, device="cuda", generator=torch.Generator()),
                  "Expected a 'cuda' device type for generator but found 'cpu'"),
    "pin": (lambda: t("cuda:0").pin_memory(),
            "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"),
    "lengths": (lambda: nn.utils.rnn.pack_padded_sequence(t("cuda:0", 2, 1, 1), t("cuda:0", 1, dtype=LONG) * 2),
                "'lengths' argument should be a 1D CPU int64 tensor, but got 1D cuda:0 Long tensor"),
}  # fmt: skip


# Operands that reach the operator that checks only as views and copies that torch makes on the way.
INDIRECT = {
    "linear of 3 dims": lambda: nn.Linear(3, 2).cuda()(t("cpu", 2, 2, 3)),
    "linear of 1 dim": lambda: nn.Linear(3, 2).cuda()(t("cpu", 3)),
    "matmul of 3 dims": lambda: t("cpu", 2, 2, 3) @ t("cuda:0", 3, 2),
    "batched matmul": lambda: t("cpu", 1, 2, 3) @ t("cuda:0", 4, 3, 2),
    "convolution without a batch": lambda: nn.Conv2d(1, 1, 1).cuda()(t("cpu", 1, 2, 2)),
    "einsum": lambda: torch.einsum("ij,jk->ik", t("cuda:0", 2, 2), t("cpu", 2, 2)),
    "multi-head attention": lambda: nn.MultiheadAttention(4, 2).cuda()(*[t("cpu", 2, 1, 4)] * 3),
    "cross entropy of 3 dims": lambda: F.cross_entropy(t("cuda:0", 2, 3, 2), t("cpu", 2, 2, dtype=LONG)),
    "tensordot": lambda: torch.tensordot(t("cuda:0", 2, 2), t("cpu", 2, 2)),
    "cosine similarity": lambda: F.cosine_similarity(t("cuda:0", 2, 2), t("cpu", 2, 2)),
    "hinge": lambda: F.hinge_embedding_loss(t("cuda:0", 2), t("cpu", 2)),
    "bilinear": lambda: nn.Bilinear(2, 2, 2).cuda()(t("cpu", 1, 2), t("cpu", 1, 2)),
    "lstm": lambda: nn.LSTM(3, 3).cuda()(t("cpu", 2, 1, 3)),
    "gru state": lambda: nn.GRU(3, 3).cuda()(t("cuda:0", 2, 1, 3), t("cpu", 1, 1, 3)),
}


@pytest.mark.parametrize("name", INDIRECT)
def test_refused_on_the_way(name):
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), pytest.raises(RuntimeError, match=r"(on|at) the same device|should be the same"):
            INDIRECT[name]()


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_and_without_autograd(name):
    call, words = REFUSED[name]
    modes = torch.enable_grad, torch.no_grad, torch.inference_mode
    for mode in modes[:1] if name in ("gradient", "data parallel", "attention") else modes:
        with mode(), pytest.raises(RuntimeError) as refusal:
            call()
        assert str(refusal.value) == words, mode


ALLOWED = {
    "host scalar": lambda: t("cuda:1") * torch.tensor(2.0),
    "host scalar first": lambda: torch.tensor(2.0) * t("cuda:1"),
    "python number": lambda: 1 - t("cuda:1"),
    "host index": lambda: t("cuda:1")[torch.tensor([0, 1])],
    "host mask": lambda: t("cuda:1")[torch.tensor([True, False, True])],
    "copy from host": lambda: t("cuda:1").copy_(t("cpu")),
    "copy between devices": lambda: t("cuda:1").copy_(t("cuda:0")),
    "assign from host": lambda: t("cuda:1").index_fill_(0, t("cuda:1", 1, dtype=LONG), torch.tensor(3.0)),
    "where with scalar": lambda: torch.where(t("cuda:1") > 0, t("cuda:1"), 0.0),
    "one hot": lambda: F.one_hot(t("cuda:1", 2, dtype=LONG)),
    "quantile": lambda: torch.quantile(t("cuda:1"), 0.5),
    "combinations": lambda: torch.combinations(t("cuda:1")),
    "lerp": lambda: t("cuda:1").lerp(t("cuda:1"), 0.5),
    "clamp": lambda: t("cuda:1").clamp(min=torch.tensor(0.0)),
}


def test_allowed():
    assert {name: str(call().device) for name, call in ALLOWED.items()} == dict.fromkeys(ALLOWED, "cuda:1")


def test_copies_to_the_host_are_allowed():
    host = t("cpu") * 0
    host.copy_(t("cuda:2"))
    assert host.tolist() == [1, 1, 1] and not host.is_cuda


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.ones(1, device="cuda:4"),
        lambda: torch.ones(1).to("cuda:7"),
        lambda: torch.ones(1).cuda(4),
        lambda: torch.cuda.set_device(4),
        lambda: torch.cuda.device(4).__enter__(),
        lambda: torch.cuda.synchronize(4),
        lambda: nn.Linear(1, 1).to(9),
    ],
)
def test_a_device_that_does_not_exist(call):
    with pytest.raises(
        torch.AcceleratorError, match=r"^CUDA error: invalid device ordinal\nGPU device may be out of range"
    ):
        call()
    with pytest.raises(AssertionError, match="Invalid device id"):
        torch.cuda.get_device_properties(4)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, Passing])
def test_a_mismatch_in_a_hook_is_refused_under_a_mode_too(mode):
    x = torch.ones(2, device="cuda:0", requires_grad=True)
    x.register_hook(lambda g: g + torch.ones(2))
    with mode(), pytest.raises(RuntimeError, match=re.escape(found("cuda:0", "cpu"))):
        (x * 2).sum().backward()
