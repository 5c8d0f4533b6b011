"""The hardware below a simulated node: memory, virtual time, and the calls of a defect."""

from __future__ import annotations

import pytest
import torch

from mgpu_check.simulated.hardware import Copy, Defect, Hardware, Operation, planted

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _node(request):
    """A node in this process, but for what has one on each rank."""
    if "on_ranks" not in request.fixturenames:
        request.getfixturevalue("node")


class Told(Defect):
    """A defect that notes its calls."""

    def __init__(self):
        self.operations: list[Operation] = []
        self.copies: list[Copy] = []

    def operated(self, operation):
        self.operations.append(operation)

    def copied(self, copy):
        self.copies.append(copy)

    def take(self):
        found, self.copies = self.copies, []
        return [(one.source, one.target, one.path, one.data.numel()) for one in found]


def milliseconds(device, body):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.device(device):
        start.record()
        body()
        end.record()
        end.synchronize()
    return start.elapsed_time(end)


def test_devices_have_the_memory_of_their_hardware_while_it_is_planted():
    before = torch.cuda.mem_get_info(1)
    with planted(Hardware([], 16 * MIB)):
        free, total = torch.cuda.mem_get_info(1)
        assert (free, total) == (16 * MIB, 16 * MIB)
        assert torch.cuda.get_device_properties(1).total_memory == 16 * MIB
        held = torch.empty(15 * MIB, dtype=torch.uint8, device="cuda:1")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * MIB, dtype=torch.uint8, device="cuda:1")
        del held
        torch.empty(15 * MIB, dtype=torch.uint8, device="cuda:1")
    assert torch.cuda.mem_get_info(1)[1] == before[1]


def test_time_is_work_over_rates_and_repeats_to_the_last_digit():
    with planted(Hardware([], 16 * MIB)):
        a = torch.randn(256, 256, device="cuda:1")
        wide = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda:1")
        product = milliseconds(1, lambda: a @ a)
        assert product == pytest.approx(1000 * (4e-6 + 2 * 256**3 / 6e13))
        assert milliseconds(1, lambda: a @ a) == pytest.approx(product, rel=1e-9)
        assert milliseconds(1, lambda: wide.to("cuda:3")) == pytest.approx(1000 * (6e-6 + 4 * MIB / 2e11))
        pinned = torch.zeros(4 * MIB, dtype=torch.uint8).pin_memory()
        fast = milliseconds(1, lambda: pinned.to("cuda:1", non_blocking=True))
        assert milliseconds(1, lambda: torch.zeros(4 * MIB, dtype=torch.uint8).to("cuda:1")) > 2 * fast
        first, second = torch.cuda.Stream(1), torch.cuda.Stream(1)

        def on_two_streams():
            for stream in (first, second):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    wide.to("cuda:3")
                torch.cuda.current_stream().wait_stream(stream)

        one = milliseconds(1, lambda: wide.to("cuda:2"))
        assert milliseconds(1, on_two_streams) < 3 * one


def test_waiting_takes_no_time_of_the_wall():
    with planted(Hardware([], MIB)):
        assert milliseconds(0, lambda: torch.cuda._sleep(3_600_000_000_000)) == pytest.approx(3.6e6)
        torch.cuda.synchronize()
        event = torch.cuda.Event()
        torch.cuda._sleep(3_600_000_000_000)
        event.record()
        assert not event.query()
        assert event.query()


def test_who_asks_about_one_event_does_not_wait_for_another():
    with planted(Hardware([], MIB)):
        stream, behind = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(3_600_000_000_000)
        behind.wait_stream(stream)
        first, second = stream.record_event(), behind.record_event()
        assert not first.query()
        assert not second.query()
        assert first.query()


def test_a_defect_is_told_of_each_copy_with_its_path():
    told = Told()
    with planted(Hardware([told], 16 * MIB)):
        here = torch.ones(6, 4, device="cuda:0")
        there = torch.zeros(6, 4, device="cuda:2")
        told.take()
        here.to("cuda:2")
        assert told.take() == [(0, 2, "engine", 96)]
        there.copy_(here)
        assert told.take() == [(0, 2, "engine", 96)]
        here.t().to("cuda:1")  # the strides stay
        assert told.take() == [(0, 1, "engine", 96)]
        here[:, ::2].to("cuda:1")
        here.to("cuda:1", torch.float64)
        there.copy_(here.t().contiguous().t())
        assert [path for *_, path, _ in told.take()] == ["kernel"] * 3
        here.cpu()
        torch.zeros(2, pin_memory=True).copy_(here[0, :2], non_blocking=True)
        torch.zeros(3).to("cuda:3")
        torch.tensor([1.0, 2.0], device="cuda:3")
        assert [one[:2] for one in told.take()] == [(0, None), (0, None), (None, 3), (None, 3)]
        with torch.no_grad():
            parts = torch.nn.parallel.scatter(here, [0, 1, 2])
            torch.nn.parallel.gather(parts, 3)
            torch.nn.parallel.comm.broadcast(here, [0, 1])
        ends = [one[:2] for one in told.take()]
        assert ends == [(0, 1), (0, 2), (0, 3), (1, 3), (2, 3), (0, 1)]


def test_gradients_cross_links_too():
    told = Told()
    with planted(Hardware([told], MIB)):
        leaf = torch.ones(3, device="cuda:1", requires_grad=True)
        told.take()
        leaf.to("cuda:0").sum().backward()
        assert [one[:2] for one in told.take()] == [(1, 0), (0, 1)]


def test_a_defect_is_told_of_each_operator_that_computes():
    told = Told()
    with planted(Hardware([told], MIB)):
        x = torch.randn(4, 4, device="cuda:3", requires_grad=True)
        (x.view(16)[:4].exp() + 1).sum().backward()
        y = x.detach()
        y.add_(1)
        torch.add(y, y, out=torch.empty_like(y))
    assert {one.device for one in told.operations} == {3}
    names = [one.name for one in told.operations]
    assert names[:4] == ["randn", "exp", "add", "sum"]
    assert names[-2:] == ["add_", "add"]
    assert not {"view", "slice", "detach", "empty_like", "expand"} & set(names)
    assert all(len(one.outputs) == 1 for one in told.operations)


def test_without_a_simulated_node_there_is_nothing_to_plant_in(monkeypatch):
    monkeypatch.setattr("mgpu_check.simulated.hardware.active_node", lambda: None)
    with pytest.raises(ValueError, match="give --simulate"), planted(Hardware([], MIB)):
        pass
