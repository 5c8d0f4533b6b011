"""Memory of simulated devices: what was never written holds, what does not fit is refused, and what the figures say."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("node")


def like():
    return torch.ones(4, device="cuda:1")


NEVER_WRITTEN = {
    "empty": lambda: torch.empty(4, device="cuda"),
    "empty, default device": lambda: on_default(lambda: torch.empty(2, 2)),
    "empty_strided": lambda: torch.empty_strided((2,), (2,), device="cuda:2"),
    "empty_permuted": lambda: torch.empty_permuted((2, 3), (1, 0), device="cuda"),
    "empty_like": lambda: torch.empty_like(like()),
    "empty_like of the host": lambda: torch.empty_like(torch.ones(3), device="cuda"),
    "new_empty": lambda: like().new_empty(3),
    "new_empty elsewhere": lambda: torch.ones(2).new_empty(3, device="cuda:1"),
    "to_empty": lambda: nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight.detach(),
    "to_empty of a module that is there": lambda: nn.Linear(2, 2).to_empty(device="cuda:1").weight.detach(),
    "new": lambda: like().new(2, 3),
    "typed": lambda: torch.cuda.DoubleTensor(2, 3),  # type: ignore[attr-defined]  # made at import
    "resize_": lambda: torch.ones(1, device="cuda").resize_(4)[1:],
    "storage": lambda: torch.empty(0, device="cuda").set_(torch.UntypedStorage(16, device="cuda"), 0, (4,), (1,)),
    "resized storage": lambda: regrown(),
    "complex": lambda: torch.empty(2, dtype=torch.complex64, device="cuda"),
    "half": lambda: torch.empty(2, dtype=torch.bfloat16, device="cuda"),
}


def on_default(make):
    with torch.device("cuda:3"):
        return make()


def regrown():
    t = like()
    t.untyped_storage().resize_(0)
    t.untyped_storage().resize_(16)
    return t


def test_what_was_never_written_is_nan():
    for name, make in NEVER_WRITTEN.items():
        t = make()
        assert t.is_cuda and t.numel() and t.isnan().all(), name


def test_integers_that_were_never_written_are_the_least_and_booleans_true():
    made = [torch.empty(2, dtype=d, device="cuda").tolist() for d in (torch.int64, torch.int8, torch.uint8, torch.bool)]
    assert made == [[-(2**63)] * 2, [-128] * 2, [255] * 2, [True] * 2]


def test_the_host_and_what_is_written_are_as_ever():
    torch.manual_seed(3)
    expected = nn.LSTM(3, 4), nn.MultiheadAttention(4, 2), nn.BatchNorm1d(3), nn.Embedding(3, 2)
    assert not any(p.isnan().any() for m in expected for p in m.parameters())
    for make in (torch.zeros, torch.ones, torch.rand):
        assert not make(64, device="cuda").isnan().any()
    for module in (
        nn.LSTM(3, 4, device="cuda"),
        nn.MultiheadAttention(4, 2, device="cuda"),
        nn.BatchNorm1d(3, device="cuda"),
    ):
        assert not any(t.isnan().any() for t in (*module.parameters(), *module.buffers()))
    into = torch.empty(2, 2, device="cuda")
    torch.addmm(torch.empty(2, 2, device="cuda"), torch.ones(2, 3).cuda(), torch.ones(3, 2).cuda(), beta=0, out=into)
    assert into.tolist() == [[3, 3], [3, 3]]
    assert nn.functional.dropout(torch.ones(9, device="cuda"), 0.5).nan_to_num(nan=-1).min() >= 0


OVERSIZED = {
    "empty": lambda: torch.empty(1 << 50, device="cuda:1"),
    "zeros": lambda: torch.zeros(1 << 36, device="cuda:1"),
    "randn": lambda: torch.randn((1 << 20, 1 << 20), device="cuda:1"),
    "arange": lambda: torch.arange(1 << 40, device="cuda:1"),
    "full_like": lambda: torch.zeros(1, device="cuda:1").expand(1 << 40).clone(),
    "new_zeros": lambda: like().new_zeros(1 << 40),
    "repeat": lambda: like().repeat(1 << 40),
    "outer": lambda: torch.outer(*2 * [torch.ones(1 << 21, device="cuda:1")]),
    "resize_": lambda: torch.ones(2, device="cuda:1").resize_(1 << 40),
    "storage": lambda: torch.UntypedStorage(1 << 40, device="cuda:1"),
    "copy": lambda: torch.zeros(1).expand(1 << 40).to("cuda:1"),
}


@pytest.mark.parametrize("name", OVERSIZED)
def test_what_does_not_fit_is_refused_before_it_is_there(name):
    before = torch.cuda.memory_allocated(1)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate \d+\.\d+ GiB\. GPU 1 has"
    ):
        OVERSIZED[name]()
    assert torch.cuda.memory_allocated(1) < before + (32 << 20)  # the operands
    assert torch.cuda.memory_stats(1)["num_ooms"] == 1


def test_an_exabyte_is_refused_before_the_driver_is_asked():
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 800000000\.00 GiB"):
        torch.empty(800_000_000 << 30, dtype=torch.int8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate more than 1EB memory"):
        torch.empty(8_000_000_000 << 30, dtype=torch.int8, device="cuda")


def test_large_memory_is_unwritten_at_both_ends():
    large = torch.empty((1 << 26) + 1, dtype=torch.float32, device="cuda")
    assert large[0].isnan() and large[-1].isnan() and large[:3].view(3, 1).isnan().all()
