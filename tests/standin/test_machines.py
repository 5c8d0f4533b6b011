"""Machines as they are found: sick drivers, masks, broken devices, compute modes, too few GPUs."""

from __future__ import annotations

import pytest

from tests.standin.conftest import Machine

GREEN = """
import pytest
import torch
import torch.distributed as dist


@pytest.mark.ranks
def test_sum(rank):
    x = torch.ones(1).to(rank.device)
    dist.all_reduce(x)
    assert x.item() == rank.size


def test_node(gpus):
    assert [torch.ones(1).to(gpu).item() for gpu in gpus] == [1.0] * len(gpus)
"""


@pytest.mark.parametrize(
    ("code", "remedy"), [(802, "*systemctl status nvidia-fabricmanager*"), (3, "*nvidia-uvm*"), (999, "*dmesg*")]
)
def test_a_sick_driver_is_exit_4_with_what_to_do(machine: Machine, code: int, remedy: str) -> None:
    result = machine.has(4, init_error=code).run("--gpus=4", code=GREEN)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: mgpu-check: --gpus=4*sees 0 GPUs*", f"*cannot be used*(code {code})", remedy])
    result.stderr.no_fnmatch_line("*INTERNALERROR*")


@pytest.mark.parametrize("count", [1, 2, 8])
def test_machines_of_other_sizes(machine: Machine, count: int) -> None:
    machine.has(count).run(f"--gpus={count}", code=GREEN).assert_outcomes(passed=2)
    contexts = [line for line in machine.said("^context on gpu") if "beside 0" in line]
    assert len(contexts) == count


def test_more_gpus_than_there_are(machine: Machine) -> None:
    result = machine.has(2).run("--gpus=4", code=GREEN)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*sees 2 GPUs: cuda:0 NVIDIA Stand-In, cuda:1*", "*--gpus=2*"])


MASKED = """
import torch


def test_only_those(gpus):
    seen = [str(torch.cuda.get_device_properties(gpu).uuid)[:8] for gpu in gpus]
    assert seen == ["5a5a0004", "5a5a0002"] and torch.cuda.device_count() == 2
"""


@pytest.mark.parametrize("mask", ["3,1", "GPU-5a5a0004,GPU-5a5a0002"])
def test_masks_by_index_and_by_uuid(machine: Machine, monkeypatch: pytest.MonkeyPatch, mask: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    machine.run("--gpus=all", code=MASKED).assert_outcomes(passed=1)
    assert machine.said("context on gpu [02]") == []
