"""A simulated node that a real device computes for: its kernels run late, and fail late, as on real devices."""

from __future__ import annotations

import json
from pathlib import Path

from tests import masking
from tests.standin.cases import ERRORS_OF_KERNELS, HEAD, assert_as_named
from tests.standin.conftest import Machine

CASES = (
    HEAD
    + ERRORS_OF_KERNELS
    + """

@pytest.mark.ranks(2)
def test_green_collectives(rank):
    x = on(rank, float(rank.index))
    got = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(got, x)
    assert [y.item() for y in got] == [0, 1]


@pytest.mark.ranks(2)
def test_green_tensors_from_meta_are_on_the_device_of_the_rank(rank):
    like = torch.empty(3, device="meta")
    module = torch.nn.Linear(3, 2, device="meta").to_empty(device=rank.device)
    made = [torch.zeros_like(like, device=rank.device), like.new_empty(4, device=rank.device), module.weight]
    assert {one.device for one in made} == {rank.device}
    before = torch.cuda.memory_allocated(rank.device)
    large = torch.empty_like(torch.empty(1 << 20, device="meta"), device=rank.device)
    assert torch.cuda.memory_allocated(rank.device) - before == large.nbytes


@pytest.mark.ranks(2)
def test_green_gradients_are_clipped_on_the_device_of_the_rank(rank):
    weights = torch.nn.Parameter(torch.ones(3, device=rank.device))
    weights.grad = torch.ones_like(weights)
    torch.nn.utils.clip_grad_norm_([weights], 1.0)
    torch.optim.AdamW([weights], lr=0.1).step()


@pytest.mark.ranks(2, timeout=3)
def test_red_kernel_that_never_ends(rank):
    if rank.index == 1:
        torch.cuda._sleep(10**15)


@pytest.mark.ranks(2)
def test_green_after_a_kernel_that_never_ends(rank):
    assert on(rank, 1.0).item() == 1
"""
)

TOLD = {
    "test_red_assert_in_a_kernel_from_500_on": r"device-side assert triggered(.|\n)*error appeared when the devices(.|\n)*n=500,",
    "test_red_assert_in_a_kernel_of_the_node_process": r"device-side assert triggered(.|\n)*error appeared when the devices",
}
"""Pattern of the report of each red case."""


def test_an_error_of_a_kernel_belongs_to_the_call_that_it_is_of(machine: Machine) -> None:
    result = machine.has(1).run("--gpus=2", "--simulate=cuda:0", "-rA", "--rank-timeout=20", code=CASES)
    assert_as_named(result, CASES, TOLD)


def test_a_mask_counts_as_on_the_simulated_node(machine: Machine) -> None:
    """Torch passes the same cases that the simulated node must pass."""
    result = machine.has(4).python(masking.__file__)
    assert json.loads(result.stdout.str()) == masking.CASES


def test_no_name_reaches_the_driver(machine: Machine) -> None:
    """The tests that call all of them, where a driver would note it, and answer."""
    names = Path(__file__).parent.parent / "simulated" / "test_names.py"
    result = machine.has(2).command("pytest", "-p", "no:cacheprovider", "-q", str(names))
    assert result.ret == 0, result.stdout.str()
    assert machine.log == []
