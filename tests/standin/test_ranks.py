"""Rank tests on real devices: each case is right, or wrong in the way that its name says. One run holds them all."""

from __future__ import annotations

from tests.standin.cases import ERRORS_OF_KERNELS, HEAD, assert_as_named
from tests.standin.conftest import Machine

CASES = (
    HEAD
    + """
import os
import threading

from torch.nn.parallel import DistributedDataParallel


@pytest.mark.ranks(2, 4)
def test_green_device_and_cpu_tensors_have_backends(rank):
    x, y = on(rank, rank.index), torch.tensor([float(rank.index)])
    dist.all_reduce(x)
    dist.all_reduce(y)
    assert x.item() == y.item() == sum(range(rank.size))
    got = [None] * rank.size
    dist.all_gather_object(got, rank.index)
    assert got == list(range(rank.size))


def test_green_ranks_on_chosen_devices(ranks):
    def body(rank):
        x = on(rank, rank.index + 1.0)
        dist.all_reduce(x)
        return str(rank.device), torch.cuda.current_device(), x.item(), os.environ.get("NCCL_P2P_DISABLE")

    arm = {"NCCL_P2P_DISABLE": "1"}
    assert ranks.run(body, devices=[2, 0], environment=arm) == [("cuda:2", 2, 3.0, "1"), ("cuda:0", 0, 3.0, "1")]
    assert ranks.run(body, devices=[1]) == [("cuda:1", 1, 1.0, None)]


@pytest.mark.ranks(2)
def test_red_backward_on_rank_0_only(rank):
    model = DistributedDataParallel(torch.nn.Linear(2, 2).to(rank.device), device_ids=[rank.device.index])
    loss = model(on(rank, 1.0, 2.0)).sum()
    if rank.index == 0:
        loss.backward()


@pytest.mark.ranks(2)
def test_green_after_backward_on_rank_0_only(rank):
    x = on(rank, 1.0)
    dist.all_reduce(x)
    assert x.item() == 2


"""
    + ERRORS_OF_KERNELS
    + """

@pytest.mark.ranks(2)
def test_green_long_kernel(rank):
    torch.cuda._sleep(600_000_000)


@pytest.mark.ranks(2, timeout=5)
def test_red_collective_that_rank_1_never_enters(rank):
    x = on(rank, 1.0)
    dist.all_reduce(x)
    if rank.index == 0:
        dist.all_reduce(x)
        assert x.item() == 4


@pytest.mark.ranks(3, timeout=5)
def test_red_hang_of_who_entered_fewest(rank):
    x = on(rank, 1.0)
    dist.all_reduce(x)
    if rank.index != 1:
        dist.all_reduce(x)
    torch.cuda.synchronize()
    if rank.index == 1:
        threading.Event().wait()
    assert x.item() == 9


@pytest.mark.ranks(2, timeout=5)
def test_red_send_that_nobody_receives(rank):
    if rank.index == 0:
        dist.send(on(rank, 1.0), 1)


@pytest.mark.ranks(2)
def test_green_starting_with_point_to_point(rank):
    if rank.index == 0:
        dist.send(on(rank, 7.0), 1)
    else:
        got = on(rank, 0.0)
        dist.recv(got, 0)
        assert got.item() == 7


@pytest.mark.ranks(2)
def test_green_leaving_settings_behind(rank):
    torch.backends.fp32_precision = "tf32"
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    torch.cuda.set_stream(torch.cuda.Stream())
    torch.backends.cuda.enable_flash_sdp(False)


@pytest.mark.ranks(2)
def test_green_settings_are_those_of_a_fresh_rank(rank):
    assert torch.backends.fp32_precision == "none"
    assert torch.backends.cudnn.allow_tf32
    assert not torch.backends.cudnn.benchmark
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.ranks(2, backend="gloo")
def test_green_gloo_only(rank):
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2


@pytest.mark.ranks(2, backend="nccl")
def test_green_nccl_only(rank):
    x = on(rank, 1.0)
    dist.all_reduce(x)
    assert x.item() == 2
"""
)


TOLD = {
    "test_red_backward_on_rank_0_only": r"entered different numbers of operations .*\(rank 0: 4, rank 1: 3\)",
    "test_red_assert_in_a_kernel_from_500_on": r"device-side assert triggered(.|\n)*error appeared when the devices(.|\n)*n=500,",
    "test_red_assert_in_a_kernel_of_the_node_process": r"device-side assert triggered",
    "test_red_collective_that_rank_1_never_enters": r"rank 0 is in .*after all_reduce #2(.|\n)*rank 1 finished",
    "test_red_hang_of_who_entered_fewest": r"\nrank 1 of 3 did not finish",
    "test_red_send_that_nobody_receives": r"rank 0 is in send .*dst=1",
}
"""Pattern of the report of each red case."""


def test_each_case_on_real_devices_is_green_or_red_as_its_name_says(machine: Machine) -> None:
    result = machine.run("--gpus=4", "-rA", "--rank-timeout=20", code=CASES)
    assert_as_named(result, CASES, TOLD)
