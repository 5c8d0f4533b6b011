"""``torch.cuda`` of a simulated node: current devices, memory, streams, random numbers, pinned memory."""

from __future__ import annotations

import os

import pytest
import torch

pytestmark = pytest.mark.usefixtures("node")


def test_the_machine_has_four_devices():
    assert torch.cuda.is_available() and torch.cuda.device_count() == 4
    assert torch.accelerator.device_count() == 4
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.get_device_module("cuda") is torch.cuda
    assert "SIMULATED" in torch.cuda.get_device_name(3)
    assert torch.cuda.get_device_properties(0).total_memory == torch.cuda.mem_get_info(0)[1]


def test_a_non_blocking_copy_to_the_host_is_late():
    there = torch.ones(2, device="cuda:1")
    with torch.cuda.device(1):
        late = there.to("cpu", non_blocking=True)
        assert late.isnan().all()
        torch.cuda.current_stream().synchronize()
        assert late.tolist() == [1, 1]
        whole = torch.arange(2, device="cuda:1").to("cpu", non_blocking=True)
        assert whole.tolist() == [torch.iinfo(torch.int64).min] * 2
        torch.cuda.synchronize()
        assert whole.tolist() == [0, 1]
        late = there.to("cpu", non_blocking=True)
        assert there.sum().item() == 2  # waits for the stream
        assert late.tolist() == [1, 1]


def test_a_copy_into_pinned_memory_is_late_and_into_other_memory_is_not():
    there, pinned, other = torch.ones(2, device="cuda"), torch.zeros(2).pin_memory(), torch.zeros(2)
    other.copy_(there, non_blocking=True)
    pinned.copy_(there, non_blocking=True)
    assert other.tolist() == [1, 1] and pinned.isnan().all()
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    assert pinned.tolist() == [1, 1]


def test_pinned_memory():
    x = torch.ones(3)
    assert not x.is_pinned() and x.pin_memory().is_pinned() and x.pin_memory()[1:].is_pinned()
    assert torch.zeros(2, pin_memory=True).is_pinned()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(4.0)), 2, pin_memory=True)
    assert all(batch.is_pinned() for (batch,) in loader)


def test_a_forked_child_may_not_use_devices_that_the_parent_used():
    torch.ones(1, device="cuda")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.ones(1, device="cuda")
            os.write(writer, b"no error")
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1000).startswith(b"Cannot re-initialize CUDA in forked subprocess.")
