"""`mgpu-check doctor`: each fact that keeps ranks from running is named, with the remedy."""

from __future__ import annotations

import dataclasses
import json
import socket

import pytest

from mgpu_check.cli.doctor import PACKAGES, PROBES, GpuFacts, HostFacts, examine, of_host
from mgpu_check.devices.inventory import Device, Inventory

GIB = 2**30

HEALTHY = HostFacts(
    versions=dict.fromkeys(PACKAGES, "2.13.0+cu130"),
    python="3.12.1",
    plugin=True,
    cores=16,
    memory=64 * GIB,
    shared_memory=8 * GIB,
    temporary=("/tmp", 50 * GIB),
    open_files=1024,
    processes=None,
    host="node",
    address="10.0.0.1",
    interfaces=("lo", "eth0"),
    port=None,
    environment={},
)
GPUS = GpuFacts(
    Inventory(tuple(Device(index, "H100", 80 * GIB, (9, 0), "") for index in range(4))), nccl="2.28.9", cuda="13.0"
)
NO_GPU = GpuFacts(Inventory(()))


def remarks(devices=GPUS, **changes):
    """Return (state, subject, fact and advice) of all remarks that are not ok."""
    found = examine(dataclasses.replace(HEALTHY, **changes), devices, 4)
    return [(one.state, one.subject, f"{one.fact}; {one.advice}") for one in found if one.state != "ok"]


@pytest.mark.parametrize("devices", [GPUS, NO_GPU], ids=["gpus", "none"])
def test_a_healthy_machine_has_no_remarks(devices):
    assert remarks(devices) == []
    assert len(examine(HEALTHY, devices, 4)) >= len(PROBES) - 3, "peers, network and variables have no line"


@pytest.mark.parametrize(
    ("changes", "state", "subject", "words"),
    [
        ({"versions": {**HEALTHY.versions, "torch": ""}}, "bad", "versions", "pip install torch"),
        ({"versions": {**HEALTHY.versions, "torch": "2.9.1"}}, "bad", "versions", "needs torch 2.11 or newer"),
        ({"plugin": False}, "bad", "pytest", "install mgpu-check again"),
        ({"environment": {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}}, "warn", "pytest", "pytest -p mgpu_check"),
        (
            {"port": 29500},
            "warn",
            "ports",
            "another process listens at port 29500: a static rendezvous at this port fails",
        ),
        ({"memory": GIB}, "warn", "memory", "1.0 GiB available; 4 ranks need about 1.2 GiB"),
        ({"shared_memory": 2**26}, "warn", "/dev/shm", "64 MiB free; 4 ranks with loaders need about 256 MiB"),
        ({"shared_memory": None}, "bad", "/dev/shm", "--ipc=host"),
        ({"temporary": ("/ro", None)}, "bad", "temporary files", "/ro cannot be written; set TMPDIR"),
        ({"temporary": ("/full", 0)}, "warn", "temporary files", "/full has 0 MiB free"),
        ({"open_files": 256}, "warn", "open files", "at most 256 per process; ulimit -n 1024"),
        ({"processes": 100}, "warn", "processes", "at most 100 processes and threads; 4 ranks may need 256"),
        ({"cores": 1}, "warn", "processors", "one processor"),
        ({"address": ""}, "warn", "network", "'node' has no address"),
        ({"environment": {"GLOO_SOCKET_IFNAME": "ib0"}}, "bad", "network", "ib0, but the interfaces are lo, eth0"),
        ({"environment": {"NCCL_SOCKET_IFNAME": "=ib0:1,eth"}}, "bad", "network", "unset NCCL_SOCKET_IFNAME"),
        ({"environment": {"CUDA_LAUNCH_BLOCKING": "1"}}, "warn", "environment", "races stay hidden"),
        ({"devices": dataclasses.replace(GPUS, nccl="")}, "bad", "NCCL", "no NCCL"),
        (
            {"devices": dataclasses.replace(GPUS, separate_pairs=((0, 2), (2, 0)))},
            "warn",
            "peer access",
            "0 to 2, 2 to 0",
        ),
        ({"devices": GpuFacts(Inventory((), "cannot be used: 802\n  start it"))}, "bad", "GPUs", "802; start it"),
    ],
)
def test_a_fact_that_keeps_ranks_from_running_is_named(changes, state, subject, words):
    (found,) = remarks(**changes)
    assert found[:2] == (state, subject) and words in found[2], found


@pytest.mark.parametrize(
    ("devices", "environment"),
    [
        (GPUS, {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth,lo"}),
        (GPUS, {"NCCL_SOCKET_IFNAME": "^docker,ib"}),  # excluded ones need not exist
        (NO_GPU, {"NCCL_SOCKET_IFNAME": "ib0"}),
        (GPUS, {"CUDA_LAUNCH_BLOCKING": "0", "NCCL_P2P_DISABLE": ""}),
    ],
)
def test_right_variables_have_no_remark(devices, environment):
    assert remarks(devices, environment=environment) == []


def test_a_port_that_another_process_has_is_found(monkeypatch):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        assert of_host().port == other.getsockname()[1]


def test_ranks_can_run_here(command, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    text = command("doctor")
    assert "2 simulated ranks started, and added up a tensor, in " in text
    assert text.splitlines()[-1] == "ranks can run here"


@pytest.mark.slow
def test_ranks_that_cannot_start_are_bad(command, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-net")
    found = json.loads(command("doctor", "--json", code=1))
    bad = [remark["subject"] for remark in found["judgements"] if remark["state"] == "bad"]
    assert bad == ["network", "ranks"] and found["works"] is False


def test_a_wrong_number_of_gpus_is_refused(command):
    assert "argument --gpus: '0' is no number of GPUs; give 1 or more" in command("doctor", "--gpus=0", code=4)
