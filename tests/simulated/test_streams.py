"""Streams and events of simulated devices: the order that they promise, and the time that they take."""

from __future__ import annotations

import math

import pytest
import torch

pytestmark = pytest.mark.usefixtures("node")


def test_what_was_saved_on_the_host_comes_back_in_the_order_of_the_stream():
    a, b = (torch.rand(4, device="cuda:1", requires_grad=True) for _ in range(2))
    with torch.cuda.device(1):
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            out = (a * b).exp()
        out.sum().backward()
    assert torch.allclose(a.grad, (a * b).exp() * b)


def test_a_copy_back_on_the_same_stream_reads_what_the_copy_to_the_host_brought():
    there, pinned = torch.arange(3.0, device="cuda"), torch.zeros(5).pin_memory()
    pinned[:3].copy_(there, non_blocking=True)
    assert pinned[:3].isnan().all()
    assert pinned[:3].to("cuda", non_blocking=True).tolist() == [0, 1, 2]
    late = there.to("cpu", non_blocking=True)
    into = torch.zeros(3, device="cuda").copy_(late, non_blocking=True)
    assert into.tolist() == [0, 1, 2]


def test_a_copy_back_on_another_stream_reads_what_is_there_until_it_has_waited():
    there, side = torch.ones(2, device="cuda"), torch.cuda.Stream()
    late = there.to("cpu", non_blocking=True)
    with torch.cuda.stream(side):
        assert math.isnan(late.to("cuda").sum())
    late = there.to("cpu", non_blocking=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert late.to("cuda").sum() == 2
    late = there.to("cpu", non_blocking=True)
    assert math.isnan(late.to("cuda:1").sum())  # the stream of another device


def test_a_stream_that_sleeps_is_busy_and_events_are_reached_in_turn():
    start, end, side = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True), torch.cuda.Stream()
    start.record()
    torch.cuda._sleep(1_000_000_000)
    end.record()
    assert not end.query() and not torch.cuda.current_stream().query()
    assert side.query()
    side.wait_event(end)
    assert not side.query()
    with pytest.raises(RuntimeError, match="Both events must be completed before calculating elapsed time"):
        start.elapsed_time(end)
    with pytest.raises(ValueError, match="enable_timing=True"):
        torch.cuda.Event().elapsed_time(end)
    side.synchronize()
    assert end.query() and start.elapsed_time(end) >= 1000
    torch.cuda._sleep(10_000_000)
    stream = torch.cuda.current_stream()
    torch.cuda.synchronize()
    assert stream.query()


def test_backward_runs_on_the_stream_and_the_device_of_the_forward():
    seen = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append((torch.cuda.current_stream(), torch.cuda.current_device()))
            return grad * 2

    side, x = torch.cuda.Stream(1), torch.ones(2, device="cuda:1", requires_grad=True)
    with torch.cuda.stream(side):
        y = Twice.apply(x)
        y.register_hook(lambda grad: seen.append((torch.cuda.current_stream(), torch.cuda.current_device())))
    with torch.cuda.stream(torch.cuda.Stream(0)):
        ambient = torch.cuda.current_stream()
        y.sum().backward()
        assert torch.cuda.current_stream() is ambient
    assert seen == [(side, 1), (side, 1)]
    seen.clear()
    out = Twice.apply(x)
    with torch.cuda.stream(side):
        out.sum().backward()
    assert seen == [(torch.cuda.default_stream(1), 1)]


@pytest.mark.parametrize("copy", [lambda t, late: t.to("cuda", non_blocking=late),
                                  lambda t, late: torch.zeros(3, device="cuda").copy_(t, non_blocking=late)])  # fmt: skip
@pytest.mark.parametrize("late", [True, False])
def test_the_host_waits_for_a_copy_to_a_device_unless_it_is_told_not_to(copy, late):
    stream = torch.cuda.current_stream()
    torch.cuda._sleep(50_000_000)
    assert copy(torch.ones(3).pin_memory(), late).sum().cpu() == 3
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        torch.cuda._sleep(50_000_000)
        copy(torch.ones(3).pin_memory(), late)
        assert torch.cuda.current_stream().query() is not late
    stream.synchronize()


def test_streams_that_wait_for_each_other_in_turn_hold_each_copy_once():
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        there = torch.ones(3, device="cuda").to("cpu", non_blocking=True)
    for _ in range(200):
        other.wait_stream(one)
        one.wait_stream(other)
    one.synchronize()
    assert there.tolist() == [1.0, 1.0, 1.0]
