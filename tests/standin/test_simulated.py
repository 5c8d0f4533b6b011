"""A simulated node that a real device computes for: its kernels run late, and fail late, as on real devices."""

from __future__ import annotations

import re

from tests.standin.conftest import Machine

CASES = """
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st


def on(rank, *values):
    return torch.tensor(values, dtype=torch.float32).to(rank.device)


@pytest.mark.ranks(2)
@settings(max_examples=20)
@given(n=st.integers(1, 1000))
def test_red_assert_in_a_kernel_from_500_on(rank, n):
    torch._assert_async(torch.tensor(n < 500).to(rank.device))


@pytest.mark.ranks(2)
def test_green_after_an_error_that_sticks(rank):
    assert on(rank, 1.0).item() == 1


def test_red_assert_in_a_kernel_of_the_node_process(gpus):
    torch._assert_async(torch.tensor(0.0).to(gpus[1]))


def test_green_in_the_node_process_after_it(gpus):
    assert torch.ones(2).to(gpus[1]).cpu().tolist() == [1, 1]




@pytest.mark.ranks(2)
def test_green_collectives(rank):
    x = on(rank, float(rank.index))
    got = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(got, x)
    assert [y.item() for y in got] == [0, 1]
"""

TOLD = {
    "test_red_assert_in_a_kernel_from_500_on": r"device-side assert triggered(.|\n)*came up when the devices(.|\n)*n=500,",
    "test_red_assert_in_a_kernel_of_the_node_process": r"device-side assert triggered(.|\n)*came up when the devices",
}
"""What the report of each red case says."""


def test_an_error_of_a_kernel_belongs_to_the_call_that_it_is_of(machine: Machine) -> None:
    result = machine.has(1).run("--gpus=2", "--simulate=cuda:0", "-rA", "--rank-timeout=20", code=CASES)
    text = result.stdout.str()
    found = re.findall(r"^(PASSED|FAILED|ERROR) test_it\.py::(\w+)", text, re.M)
    assert {name for _, name in found} == set(re.findall(r"def (test_\w+)", CASES)), text
    assert [each for each in found if (each[0] == "PASSED") != each[1].startswith("test_green")] == [], text
    reports = dict(re.findall(r"^_+ (test_red_\w+) _+$((?:.|\n)*?)(?=^_+ test_|^=+ )", text, re.M))
    assert [name for name, pattern in TOLD.items() if not re.search(pattern, reports[name])] == [], text
