"""The gate and `compare` where devices are real: other operators, threads and generators than on the CPU."""

from __future__ import annotations

from pathlib import Path

RANDOM = Path(__file__).parents[1] / "simulated" / "test_random.py"

WATCHED = """
import sys
import threading

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mgpu_check.diagnosis.observations import RankTrace
from mgpu_check.gates.run.draws import DrawsOfFloat32, Notes
from mgpu_check.torch_hooks.patches import entered
from mgpu_check.gates.run.call_events import traced
from mgpu_check.gates.run.call_events import Rows
from mgpu_check.numerics.perturbation import Perturbed

import pytest


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (x * self.weight).sum()


@pytest.mark.ranks(2)
def test_what_hooks_of_backward_call_is_seen(rank):
    net = Net().to(rank.device)
    threads = set()

    def hook(gradient):
        threads.add(threading.get_ident())
        work = dist.all_reduce(gradient, async_op=True)
        torch.nn.utils.clip_grad_value_(net.parameters(), 1.0)
        work.wait()
        return gradient

    net.weight.register_hook(hook)
    net.weight.grad = torch.ones_like(net.weight)
    for _ in range(2):  # the second finds a thread with the profile function of the first
        trace = RankTrace()
        with traced(net, trace, Rows([])):
            net(torch.ones(4, device=rank.device)).backward()
        assert [event.kind for event in trace.events] == ["model", "backward", "collective", "clip"]
        collective = trace.events[2]
        assert collective.site.startswith("test_it.py:") and collective.details["waited"], collective
        assert collective.tensors[0]["shape"] == (4,)
    assert threads and threading.main_thread().ident not in threads
    seen = []
    net.weight.register_hook(lambda gradient: seen.append(sys.getprofile()))
    net(torch.ones(4, device=rank.device)).backward()
    assert len(seen) == 1 and type(seen[0]).__name__ in ("NoneType", "_Watch")
    net(torch.ones(4, device=rank.device)).backward()
    assert seen[1] is None, "it ends itself with the first call that it is told of"


@pytest.mark.ranks(1)
def test_modes_hold_in_the_threads_of_backward(rank):
    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.threads = {}

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.threads.setdefault(threading.get_ident(), []).append(str(func))
            return func(*args, **(kwargs or {}))

    net = Net().to(rank.device)
    notes, seen = Notes(), Seen()
    with seen, Perturbed(4.0, torch.Generator(), 2.0**-24), entered(DrawsOfFloat32(), notes):
        torch.nn.functional.dropout(net(torch.ones(4, device=rank.device)), 0.5).backward()
    assert notes.drew == ["aten::native_dropout"]
    others = [ops for thread, ops in seen.threads.items() if thread != threading.main_thread().ident]
    assert others and "aten.native_dropout_backward.default" in others[0], seen.threads
    assert others[0].count("aten.mul_.Tensor") >= 2, "backward's results are perturbed, too"


@pytest.mark.ranks(1)
def test_operators_by_which_gpus_run_common_layers(rank):
    from mgpu_check.numerics.perturbation import _COMPOSED

    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.all = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.all.add(func)
            return func(*args, **(kwargs or {}))

    nn = torch.nn
    x = torch.ones(4, 8, device=rank.device)
    with Seen() as seen:
        for layer in (
            nn.Dropout(0.5), nn.LayerNorm(8), nn.RMSNorm(8), nn.GroupNorm(2, 8), nn.BatchNorm1d(8), nn.Softmax(-1), nn.LogSoftmax(-1),
            nn.TransformerEncoderLayer(8, 2, 16),
        ):
            out = layer.to(rank.device)(x.clone().requires_grad_())
            out.sum().backward()
            for how in ({"fused": True}, {"foreach": True}):
                parameters = list(layer.parameters())
                if parameters:
                    torch.optim.AdamW(parameters, **how).step()
    backward = {func for func in seen.all if "backward" in str(func) and ("norm" in str(func) or "softmax" in str(func))}
    assert len(backward) >= 5 and backward <= set(_COMPOSED), backward - set(_COMPOSED)
    names = {func._schema.name for func in seen.all}
    assert {"aten::native_dropout", "aten::_fused_adamw_"} <= names, sorted(names)
    writes = [func for func in seen.all if not func._schema.returns and func._schema.name.startswith("aten::_f")]
    assert writes and all(any(a.alias_info is not None and a.alias_info.is_write for a in f._schema.arguments) for f in writes)
"""


def test_what_the_gate_watches(machine):
    machine.has(2)
    machine.run("--gpus=2", code=WATCHED).assert_outcomes(passed=3)


def test_generators_of_devices_that_a_gpu_simulates(machine, monkeypatch):
    machine.has(1)
    monkeypatch.setenv("TEST_SIMULATED_BACKING", "cuda:0")
    # The devices of the stand-in compute nothing, so all random numbers are equal.
    result = machine.run("-k", "not depend_on_the_offset", code=RANDOM.read_text())
    result.assert_outcomes(passed=22, deselected=1)


def test_compare_counts_first(machine, pytester):
    script = pytester.makepyfile(train="raise SystemExit('this runs')")
    machine.has(2)
    result = machine.command("mgpu_check", "compare", "--gpus=4", "--", str(script))
    assert result.ret == 4, result.stderr.str()
    result.stderr.fnmatch_lines(["*--gpus=4, but torch sees 2 GPUs here; give a smaller number, or --simulate.*"])
    assert "this runs" not in result.stderr.str() + result.stdout.str()
    assert machine.said("context on gpu") == []


# On a device a collective that never ends is waited for elsewhere: of two ranks that wait, one has entered fewer.
SKIPS = """
import os, threading
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank)
net = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, device="cuda"))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    if step == 2 and rank == world - 1 and world > 1:
        threading.Event().wait()  # its batches have run out, so it evaluates
    optimizer.zero_grad()
    net(torch.ones(4, 2, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_compare_blames_who_has_entered_fewest(machine, pytester):
    script = pytester.makepyfile(train=SKIPS)
    machine.has(2)
    result = machine.command("mgpu_check", "compare", "--gpus=2", "--timeout=30", "--", str(script))
    assert result.ret == 1, result.stdout.str()
    result.stdout.fnmatch_lines(["*the script hung: rank 1 made no progress after step 2, in wait (train.py:12)*"])
