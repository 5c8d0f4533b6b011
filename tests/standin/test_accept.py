"""The acceptance on real devices, whose kernels compute nothing: that is what it finds, GPU by GPU, without an error of
its own."""

from __future__ import annotations

from tests.standin.conftest import Machine

MEMORY = 2 << 30
QUICK = ("accept", "--gpus=2", "--gpu-level=quick", "--memory=0.05")


def test_gpus_that_compute_nothing_are_rejected(machine: Machine) -> None:
    ran = machine.has(2, memory=MEMORY).command("mgpu_check", *QUICK, "-k", "inventory or address")
    text = ran.stdout.str()
    assert ran.ret == 1, text
    assert "REJECTED" in text
    assert "the device did not find" in text
    assert "NVIDIA Stand-In" in text
    assert "Error" not in ran.stderr.str()


def test_a_gpu_that_refuses_every_context_is_named(machine: Machine) -> None:
    ran = machine.has(2, memory=MEMORY, broken=1).command("mgpu_check", *QUICK, "-k", "under_load")
    text = ran.stdout.str()
    assert ran.ret == 1, text
    assert "uncorrectable ECC error encountered" in text
    assert "inventory: GPU 1: rank 1 of 2 could not start: DeviceRefused" in text


def test_a_gpu_that_others_use_alone_leaves_the_node_undecided(machine: Machine) -> None:
    """A context costs more memory than there is."""
    ran = machine.has(2, memory=256 << 20).command("mgpu_check", *QUICK, "-k", "memory and address")
    assert ran.ret == 2, ran.stdout.str()
    assert "DeviceBusy" in ran.stdout.str()
