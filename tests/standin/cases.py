"""Rank tests for machines that the stand-in imitates.

Their names say how they end: ``test_green_…`` or ``test_red_…``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

HEAD = """
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st


def on(rank, *values):
    return torch.tensor(values, dtype=torch.float32).to(rank.device)
"""
"""Begins a file of cases."""

ERRORS_OF_KERNELS = """

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
"""
"""An error of a kernel comes up late; the report names its own example, and no other test fails."""


def assert_as_named(result: pytest.RunResult, cases: str, told: Mapping[str, str]) -> None:
    """Hold that each case has run, with the result in its name; the report of each red case in `told` matches its
    pattern."""
    text = result.stdout.str()
    found = re.findall(r"^(PASSED|FAILED|ERROR) test_it\.py::(\w+)", text, re.M)
    assert {name for _, name in found} == set(re.findall(r"def (test_\w+)", cases)), text
    assert [each for each in found if (each[0] == "PASSED") != each[1].startswith("test_green")] == [], text
    reports = dict(re.findall(r"^_+ (test_red_\w+) _+$((?:.|\n)*?)(?=^_+ test_|^=+ )", text, re.M))
    assert [name for name, pattern in told.items() if not re.search(pattern, reports[name])] == [], text
