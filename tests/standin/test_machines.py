"""Machines as users have them: sick drivers, masks, broken devices, compute modes, too few GPUs."""

from __future__ import annotations

import re

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
    result.stderr.fnmatch_lines([f"ERROR: mgpu-check: --gpus=4*sees 0 GPUs*cannot be used*(code {code}){remedy}"])
    result.stderr.no_fnmatch_line("*INTERNALERROR*")


@pytest.mark.parametrize("count", [1, 2, 8])
def test_machines_of_other_sizes(machine: Machine, count: int) -> None:
    machine.has(count).run(f"--gpus={count}", code=GREEN).assert_outcomes(passed=2)
    contexts = [line for line in machine.said("^context on gpu") if "beside 0" in line]
    assert len(contexts) == count


def test_more_gpus_than_there_are(machine: Machine) -> None:
    result = machine.has(2).run("--gpus=4", code=GREEN)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*sees 2 GPUs: cuda:0 NVIDIA Stand-In, cuda:1*--gpus=2*"])


MASKED = """
import subprocess
import sys

import torch


def test_only_those(gpus):
    seen = [str(torch.cuda.get_device_properties(gpu).uuid)[:8] for gpu in gpus]
    assert seen == ["5a5a0004", "5a5a0002"] and torch.cuda.device_count() == 2


def test_a_script_that_is_compared_sees_the_first_of_them(ranks):
    code = "import torch; print(torch.cuda.device_count(), str(torch.cuda.get_device_properties(0).uuid)[:8])"
    command, environment = [sys.executable, "-c", code], ranks._script_environment(1)
    seen = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert seen.stdout.split() == ["1", "5a5a0004"]
"""


@pytest.mark.parametrize("mask", ["3,1", "GPU-5a5a0004,GPU-5a5a0002"])
def test_masks_by_index_and_by_uuid(machine: Machine, monkeypatch: pytest.MonkeyPatch, mask: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    machine.run("--gpus=all", code=MASKED).assert_outcomes(passed=2)
    assert machine.said("context on gpu [02]") == []


SIZES = """
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st


def total(rank):
    x = torch.ones(1).to(rank.device)
    dist.all_reduce(x)
    return x.item()


def test_each_size_and_back(ranks):
    for size in (1, 2, 1, 2):
        assert ranks.run(total, size=size) == [size] * size


def test_node(gpus):
    assert torch.ones(1).to(gpus[0]).item() == 1


@pytest.mark.ranks(2, backend="nccl")
def test_nccl_alone(rank):
    assert total(rank) == 2
"""


def test_compute_mode_exclusive_process_gets_one_world_after_the_other(machine: Machine) -> None:
    machine.has(2, exclusive=1).run("--gpus=2", code=SIZES).assert_outcomes(passed=3)
    assert len(machine.said("refused: another process has one")) <= 2  # found out once, and then known


def test_idle_worlds_leave_room_on_small_devices(machine: Machine) -> None:
    machine.has(2, memory=3 << 29).run("--gpus=2", code=SIZES).assert_outcomes(passed=3)
    assert machine.said("beside 1 others")
    assert machine.said("beside [2-9] others") == machine.said("no memory") == []


def test_a_broken_gpu_is_named(machine: Machine) -> None:
    result = machine.has(2, broken=1).run("--gpus=2", code=GREEN)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*rank 1 of 2 could not start: *5a5a0002-0000-4000-8000-*02*uncorrectable ECC*"])


ALONE = """
import os
import pytest
import time
import torch


@pytest.mark.gpus(1)
@pytest.mark.parametrize("number", range(4))
def test_has_it_for_itself(gpus, number):
    (gpu,) = gpus
    path = os.path.join(os.environ["STANDIN_DIR"], "used-" + str(torch.cuda.get_device_properties(gpu).uuid))
    os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    torch.ones(1).to(gpu)
    torch.cuda._sleep(400_000_000)
    torch.cuda.synchronize()
    os.unlink(path)
"""


def test_leases_in_parallel(machine: Machine) -> None:
    machine.has(2).run("--gpus=2", "-n2", code=ALONE).assert_outcomes(passed=4)
    assert len({line.partition(" ")[0] for line in machine.log if " context on gpu" in line}) == 2


ADDS = """
import pytest
import torch
import torch.distributed as dist


@pytest.mark.ranks(2)
def test_sum(rank):
    x = torch.ones(1, device=rank.device)
    dist.all_reduce(x)
    assert x.is_cuda
"""


def test_imports_that_stay_warm_use_no_device(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.directory.parent.joinpath("run").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(machine.directory.parent / "run"))
    machine.has(2).run("--gpus=2", "--gpu-keep-warm", code=ADDS).assert_outcomes(passed=1)
    last = machine.run("--gpus=2", "--gpu-keep-warm=0")
    last.assert_outcomes(passed=1)
    keeper = re.search(r"imports kept warm by process (\d+)", last.stdout.str())
    assert keeper is not None
    assert len({line.partition(" ")[0] for line in machine.log if " context on gpu" in line}) >= 4  # ranks of two runs
    assert [line for line in machine.log if line.startswith(f"{keeper[1]} ") and "context" in line] == []


def test_a_mask_that_the_driver_does_not_honour_is_found_out(machine: Machine) -> None:
    result = machine.has(2, mask="ANOTHER_VARIABLE").run("--gpus=2", "-n2", code=ALONE)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*was given the GPUs 5a5a0002-*, and sees 5a5a0001-*does not honour*"])


@pytest.mark.slow
def test_the_doctor_adds_up_over_all_devices(machine: Machine) -> None:
    result = machine.has(2).command("mgpu_check", "doctor")
    assert result.ret == 0, result.stdout.str()
    result.stdout.fnmatch_lines(
        ["ok    GPUs * 2 x NVIDIA Stand-In; *", "ok    NCCL *", "ok    ranks * 2 ranks on GPUs *"]
    )
    assert machine.has(2).command("mgpu_check", "doctor", "--gpus=3").ret == 1


def test_the_doctor_names_a_driver_that_does_not_start(machine: Machine) -> None:
    result = machine.has(2, init_error=802).command("mgpu_check", "doctor")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["bad   GPUs *", "* fabric manager *"])
