"""``torch.cuda`` of a simulated node: current devices, memory, streams, random numbers, pinned memory."""

from __future__ import annotations

import math
import os
import threading
from typing import Any

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


def test_the_current_device_is_the_threads_own():
    torch.cuda.set_device(2)
    seen = []
    thread = threading.Thread(target=lambda: seen.append((torch.cuda.current_device(), torch.ones(1).cuda().device)))
    thread.start()
    thread.join()
    assert seen == [(0, torch.device("cuda:0"))]
    with torch.cuda.device(1), torch.cuda.device(None):
        assert torch.cuda.current_device() == torch.accelerator.current_device_index() == 1
    with torch.accelerator.device_index(3):
        assert torch.cuda.current_device() == 3
    assert torch.cuda.current_device() == 2


def test_memory_is_what_live_storages_take():
    before = [torch.cuda.memory_allocated(i) for i in range(4)]
    x = torch.empty(1024, device="cuda:3")
    view = x[10:]
    assert torch.cuda.memory_allocated(3) - before[3] == 4096
    tiny = torch.empty(1, device="cuda:1")
    assert torch.cuda.memory_allocated(1) - before[1] == 512  # the allocator's block
    del x
    assert torch.cuda.memory_allocated(3) - before[3] == 4096
    del view, tiny
    assert [torch.cuda.memory_allocated(i) for i in range(4)] == before
    assert torch.cuda.max_memory_allocated(3) >= before[3] + 4096
    torch.cuda.reset_peak_memory_stats(3)
    assert torch.cuda.max_memory_allocated(3) == before[3]
    assert torch.cuda.memory_reserved(3) > 0
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(3) == 0


def test_memory_can_run_out():
    torch.cuda.set_per_process_memory_fraction(0.0001, 1)
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate"):
        torch.empty(1 << 20, device="cuda:1")
    torch.empty(1 << 20, device="cuda:2")


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


def test_a_side_stream_is_waited_for_through_the_current_one():
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() is side
        late = torch.ones(1, device="cuda").to("cpu", non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert math.isnan(late[0])
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.current_stream().synchronize()
    assert late[0] == 1


def test_pinned_memory():
    x = torch.ones(3)
    assert not x.is_pinned() and x.pin_memory().is_pinned() and x.pin_memory()[1:].is_pinned()
    assert torch.zeros(2, pin_memory=True).is_pinned()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(4.0)), 2, pin_memory=True)
    assert all(batch.is_pinned() for (batch,) in loader)


def test_seeds_rule_the_devices_and_leave_the_host_alone():
    torch.manual_seed(5)
    host = torch.get_rng_state()
    first = torch.rand(3, device="cuda:2"), torch.nn.functional.dropout(torch.ones(50, device="cuda:2"))
    assert torch.equal(torch.get_rng_state(), host)
    torch.cuda.manual_seed_all(5)
    again = torch.rand(3, device="cuda:2"), torch.nn.functional.dropout(torch.ones(50, device="cuda:2"))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    state = torch.cuda.get_rng_state(1)
    draw = torch.empty(3, device="cuda:1").normal_()
    torch.cuda.set_rng_state(state, 1)
    assert torch.equal(draw, torch.randn(3, device="cuda:1"))
    with torch.random.fork_rng(devices=[1]):
        torch.randn(3, device="cuda:1")


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


def test_cudart_names_errors_and_pins_memory_by_its_address():
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(0)
    with pytest.raises(torch.cuda.CudaError, match=r"out of memory \(2\)"):
        torch.cuda.check_error(2)
    assert runtime.cudaGetErrorString(runtime.cudaError(101)) == "invalid device ordinal"
    host = torch.ones(20)
    size = host.numel() * host.element_size()
    assert runtime.cudaHostRegister(host.data_ptr(), size, 0) == 0 and host.is_pinned()
    assert runtime.cudaHostRegister(host.data_ptr(), size, 0) == 712
    assert runtime.cudaHostUnregister(host.data_ptr()) == 0 and not host.is_pinned()
    assert runtime.cudaHostUnregister(host.data_ptr()) == 713


def test_figures_of_pinned_memory():
    def figures():
        stats = torch.cuda.host_memory_stats()
        names = ("active_requests.current", "active_bytes.current", "allocations.current", "num_host_alloc")
        return [stats[name] for name in names] + [stats["active_bytes.peak"]]

    torch.cuda.init()
    assert figures() == [0, 0, 0, 0, 0]
    host = torch.ones(10 * 1024, pin_memory=True)
    assert figures() == [1, 65536, 1, 1, 65536]
    del host
    assert figures() == [0, 0, 1, 1, 65536]
    again = torch.ones(9 * 1024).pin_memory()  # in the memory that is free
    assert again.is_pinned() and figures() == [1, 65536, 1, 1, 65536]
    del again
    torch._C._host_emptyCache()
    torch.cuda.reset_peak_host_memory_stats()
    assert figures() == [0, 0, 0, 1, 0]
    torch.cuda.reset_accumulated_host_memory_stats()
    assert torch.cuda.host_memory_stats()["num_host_free"] == 0


def test_a_device_is_named_by_none_or_by_the_context_that_makes_it_current():
    with torch.cuda.device(1):
        assert torch.cuda.FloatTensor(1, device=None).get_device() == 1  # type: ignore[attr-defined]
    context: Any = torch.cuda.device(2)
    assert torch.cuda.memory_allocated(context) == 0
    assert torch.cuda.current_stream(context).device_index == 2
    with pytest.raises(ValueError, match="Expected a cuda device, but got: cpu"):
        torch.cuda.Stream("cpu")


def test_cudnn_convolutions_of_their_own():
    x, weight = torch.randn(1, 2, 5, 5, device="cuda"), torch.randn(2, 2, 3, 3, device="cuda")
    plain: Any = [[1, 1], [1, 1], [1, 1], 1, False, True, False]
    assert torch.equal(torch.cudnn_convolution(x, weight, *plain), torch.conv2d(x, weight, padding=1))
    out = torch.cudnn_convolution_transpose(x, weight, [1, 1], [0, 0], [1, 1], [1, 1], 1, False, True, False)
    assert torch.equal(out, torch.conv_transpose2d(x, weight, padding=1))
