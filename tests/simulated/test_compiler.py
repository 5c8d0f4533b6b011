"""Compiled functions run eagerly on simulated devices, with one message."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mgpu_check.simulated import activation, simulated_node


@pytest.mark.filterwarnings("error")
def test_what_is_compiled_runs_eagerly(monkeypatch, capfd):
    monkeypatch.setattr(activation, "_warned", set())
    monkeypatch.delenv("RANK", raising=False)
    before = torch.compile
    with simulated_node(2):
        net = nn.Linear(3, 2).to("cuda:1")
        compiled = torch.compile(net, mode="max-autotune")
        compiled(torch.ones(1, 3, device="cuda:1")).sum().backward()
        assert net.weight.grad.device == torch.device("cuda:1")
        net.compile()
        assert net(torch.ones(1, 3, device="cuda:1")).shape == (1, 2)

        @torch.compile(fullgraph=True)
        def double(x):
            return 2 * x

        assert double(torch.ones(1, device="cuda:0")).item() == 2
    assert torch.compile is before
    assert capfd.readouterr().err.count("torch.compile has no effect on simulated GPUs") == 1
    monkeypatch.setattr(activation, "_warned", set())
    monkeypatch.setenv("RANK", "1")
    with simulated_node(2):
        torch.compile(net)
    assert capfd.readouterr().err == ""
