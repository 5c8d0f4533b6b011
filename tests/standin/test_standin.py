"""The stand-in does what CUDA does, as far as the tests of the real path rely on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.standin.conftest import Machine

# One process per table: each imports torch.
DEVICES = """
import ctypes
import os
import time
import torch

assert torch.cuda.device_count() == 2
assert [str(torch.cuda.get_device_properties(i).uuid)[:8] for i in range(2)] == ["5a5a0004", "5a5a0002"]
free, total = torch.cuda.mem_get_info(1)
x = torch.arange(1 << 20, dtype=torch.float32).to("cuda:1")
assert torch.equal(x.to("cuda:0").cpu(), torch.arange(1 << 20, dtype=torch.float32))
assert free - torch.cuda.mem_get_info(1)[0] >= 4 << 20

child = os.fork()
if child == 0:
    os._exit(0 if ctypes.CDLL(None).cudaDeviceSynchronize() == 3 else 1)  # torch would refuse before it asks
assert os.waitpid(child, 0)[1] == 0

begun = time.monotonic()
torch.cuda._sleep(300_000_000)
event = torch.cuda.Event()
event.record()
assert not event.query()
event.synchronize()
assert time.monotonic() - begun >= 0.2

torch._assert_async(torch.tensor(True).to("cuda:0"))
torch.cuda.synchronize()
torch._assert_async(torch.tensor(0.0).to("cuda:0"))  # returns: the device finds out later
for _ in range(2):
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        assert "device-side assert triggered" in str(error)
    else:
        raise SystemExit("an error that sticks has gone")
"""

COLLECTIVES = """
import multiprocessing.connection
import os
import sys
import torch
import torch.distributed as dist

def join(rank, n, name, backend="nccl"):
    dist.init_process_group(backend, init_method=f"file://{os.getcwd()}/{name}", rank=rank, world_size=n)

def numbers(rank, n):
    torch.cuda.set_device(rank)
    join(rank, n, "numbers")
    on = f"cuda:{rank}"
    def give(*values, dtype=torch.float32):
        return torch.tensor(values, dtype=dtype).to(on)

    x = give(rank + 1.0, 2.0)
    dist.all_reduce(x)
    assert x.tolist() == [6.0, 6.0]
    x = give(rank, 2, dtype=torch.bfloat16)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert x.tolist() == [1.0, 2.0]
    x = give(rank, dtype=torch.int64)
    dist.reduce(x, 2, dist.ReduceOp.MAX)
    assert x.item() == (2 if rank == 2 else rank)
    parts = [give(0.0) for _ in range(n)]
    dist.all_gather(parts, give(rank))
    assert [part.item() for part in parts] == [0, 1, 2]
    x = give(rank)
    dist.broadcast(x, 1)
    assert x.item() == 1
    mine = give(0, dtype=torch.int64)
    dist.reduce_scatter(mine, [give(rank + 10 * r, dtype=torch.int64) for r in range(n)])
    assert mine.item() == 3 + 30 * rank
    got = give(*range(n))
    dist.all_to_all_single(got, give(*(10 * rank + r for r in range(n))))
    assert got.tolist() == [10 * r + rank for r in range(n)]
    got = give(0)
    both = [dist.P2POp(dist.isend, give(rank), (rank + 1) % n), dist.P2POp(dist.irecv, got, (rank - 1) % n)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    assert got.item() == (rank - 1) % n

def asynchrony(rank, n):
    torch.cuda.set_device(rank)
    join(rank, n, "asynchrony", "cpu:gloo,cuda:nccl")
    x = torch.ones(1).to(f"cuda:{rank}")
    dist.all_reduce(x)
    assert x.item() == n
    if rank:
        dist.all_reduce(x)  # the host goes on at once, and waits when it looks
        assert not torch.cuda.current_stream().query(), "a collective that not all have entered is done"
    dist.all_reduce(torch.ones(1))  # gloo's
    if rank == 0:
        dist.all_reduce(x)
    assert x.item() == n * n
    first, second = torch.ones(1).to(f"cuda:{rank}"), torch.zeros(1).to(f"cuda:{rank}")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        dist.all_reduce(first)
    with torch.cuda.stream(torch.cuda.Stream()):
        dist.all_reduce(second)  # of the same communicator: after the first, though its stream is free
    torch.cuda.synchronize()
    assert (first.item(), second.item()) == (n, 0)

def one_device(rank, n):
    torch.cuda.set_device(0)
    join(rank, n, "one_device")
    try:
        dist.all_reduce(torch.ones(1).to("cuda:0"))
    except RuntimeError as error:
        assert "Duplicate GPU detected" in str(error)
    else:
        raise AssertionError("two ranks on one device")

def body(function, rank, n):
    function(rank, n)
    os._exit(0)  # what is pending in a broken communicator is not waited for

for function in (numbers, asynchrony, one_device):
    ranks = [multiprocessing.get_context("fork").Process(target=body, args=(function, rank, 3)) for rank in range(3)]
    for process in ranks:
        process.start()
    multiprocessing.connection.wait([process.sentinel for process in ranks])
    for process in ranks:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in ranks] == [0, 0, 0], function
"""


SICK = """
import os
import torch

told = {"802": "system not yet initialized", "3": "driver initialization failed", "999": "unknown error"}
for code, words in told.items():
    os.environ["STANDIN_INIT_ERROR"] = code
    assert torch.cuda.device_count() == 4, "what NVML counts"
    try:
        torch.cuda.get_device_properties(0)
    except RuntimeError as error:
        assert words in str(error), error
    else:
        raise AssertionError(code)
"""


@pytest.fixture
def script(machine: Machine, pytester: pytest.Pytester) -> Callable[[str], str]:
    """Run Python code on the machine; what it printed."""

    def run(code: str) -> str:
        pytester.makepyfile(the_script=code)
        result = machine.command("the_script")
        assert result.ret == 0, result.stderr.str()
        return result.stdout.str()

    return run


def test_devices_masks_memory_forks_streams_and_errors_that_stick(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, script: Callable[[str], str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5a5a0004,GPU-5a5a0002")
    script(DEVICES)
    assert machine.said("USED AFTER FORK")
    machine.path.unlink()  # which the fixture would take for a mistake of the tool


def test_collectives_have_right_numbers_wait_for_all_ranks_and_refuse_two_on_a_device(
    script: Callable[[str], str],
) -> None:
    script(COLLECTIVES)


def test_a_sick_driver_fails_while_nvml_counts_devices(script: Callable[[str], str]) -> None:
    script(SICK)
