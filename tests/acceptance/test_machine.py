"""The host of the GPUs: cores, memory, the kernel's facts, the paths of collectives."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mgpu_check.acceptance.faults import all_hardware_faults, hardware_planted, hardware_text, planted_from
from mgpu_check.acceptance.findings import identify, judged
from mgpu_check.acceptance.machine import test_machine
from mgpu_check.acceptance.machine.checks import (
    _GROWTH_LIMITS,
    Component,
    SimulatedHost,
    _vote,
    environment,
    examine_kernel,
    examine_memory,
    examine_paths,
    log_of_nccl,
    paths_in,
    paths_of_rank,
    read_kernel,
    vote_of_cores,
    write_tree,
)
from mgpu_check.acceptance.node import Node
from mgpu_check.acceptance.run_report import Host, RunLog
from mgpu_check.devices.observations import Observation, Subject
from mgpu_check.simulated import simulated_node
from tests.acceptance import run_reports

PORT = "sys/class/infiniband/mlx5_1/ports/1"
GPU = "sys/devices/pci0000:00/0000:f0:02.0/0000:02:00.0"
SLOT = "sys/devices/pci0000:00/0000:f0:21.0"
NIC = f"{SLOT}/0000:41:00.0"


def wrong(observations: list[Observation]) -> list[str]:
    return [one.seen for one in observations if one.outcome == "failed"]


# --- cores ---


def test_a_core_is_named_if_the_others_agree():
    healthy = vote_of_cores(0.0, range(4))
    assert [(one.outcome, one.work.operations) for one in healthy] == [("passed", 80)]
    found = vote_of_cores(0.0, range(4), wrong_core=2)
    assert wrong(found) == [
        "core 2 computes other results than 3 others: integers, products in float64, products in float32, products in "
        "bfloat16, functions"
    ]
    assert found[0].evidence["core"] == 2 and identify(found[0]).id == "MGPU-HOST-CORE-DATA"


def test_two_cores_that_differ_name_none():
    found = vote_of_cores(0.0, range(2), wrong_core=1)
    assert wrong(found)[0] == "cores 0, 1 compute different results, without a majority: integers"
    assert not any("core" in one.evidence for one in found if one.outcome == "failed")
    assert "no core can be named: a vote needs 3 cores, and this process may use 2" in [one.seen for one in found]


def test_a_core_with_two_results_is_outvoted_and_halves_are_not():
    right, other = {(0, "functions"): {b"a"}}, {(0, "functions"): {b"b"}}
    both = {(0, "functions"): {b"a", b"b"}}
    assert wrong(list(_vote({0: right, 1: right, 2: both}))) == [
        "core 2 computes other results than 2 others: functions now and then"
    ]
    assert "without a majority" in wrong(list(_vote({0: right, 1: right, 2: other, 3: other})))[0]
    assert "without a majority" in wrong(list(_vote({0: both})))[0]


def test_the_cores_of_this_process_are_pinned_and_counted():
    before = os.sched_getaffinity(0)
    found = vote_of_cores(0.0, None)
    assert not wrong(found) and found[-1].evidence["cores"] == len(before) == len(os.sched_getaffinity(0))
    assert found[-1].work.operations == 20 * len(before)
    os.sched_setaffinity(0, {min(before)})
    try:
        one = vote_of_cores(0.0, None)
    finally:
        os.sched_setaffinity(0, before)
    assert any("cores were not tried: this process may not use them" in entry.seen for entry in one) or len(before) == 1


# --- memory ---


def test_memory_is_compared_while_gpus_copy():
    with simulated_node(2):
        devices = [torch.device("cuda", index) for index in range(2)]
        (right,) = examine_memory(devices, 10 << 20, 2, 2)
        assert (right.outcome, right.work.bytes) == ("passed", 20 << 20)
        found = examine_memory(devices, 10 << 20, 2, 2, wrong_word=(1 << 20) + 3)
    assert wrong(found) == [
        f"host memory: 1 words wrong in pass {turn}, the first at byte {8 * ((1 << 20) + 3)}, bits 0x20"
        for turn in range(2)
    ]
    assert identify(found[0]).id == "MGPU-HOST-MEMORY-DATA"


def test_copies_that_come_back_wrong_are_seen():
    with simulated_node(2), hardware_planted(hardware_text([planted_from("upload-pinned:device=1")])):
        found = examine_memory([torch.device("cuda", index) for index in range(2)], 1 << 20, 1, 2)
    (seen,) = [one for one in found if one.outcome == "failed"]
    assert re.fullmatch(r"\d+ of 131072 words came back wrong while host memory was under load", seen.seen)
    assert (seen.subject, identify(seen).id) == (Subject("download", (1,)), "MGPU-HOST-LINK-DATA")


# --- what the kernel says ---


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Component]:
    root = tmp_path_factory.mktemp("healthy")
    write_tree(root, {})
    return read_kernel(root, range(8))


def after(root: Path, changes: Mapping[str, str | None]) -> dict[str, Component]:
    write_tree(root, changes)
    return read_kernel(root, range(8))


def findings(*facts: dict[str, Component]) -> list[str]:
    """The findings in the facts of before and after a run."""
    return [one.finding for one in (judged(one, {}) for one in examine_kernel(*facts)) if one.finding]


def test_a_healthy_host(healthy):
    (passed,) = examine_kernel(healthy, healthy)
    assert passed.outcome == "passed" and passed.work.operations > 200
    components = {"infiniband": 4, "ethernet": 1, "memory": 2, "pci": 18, "host": 1}
    assert passed.evidence == {"components": components, "not known": {}}
    assert healthy["mlx5_1 port 1"].slots == ("0000:f0:21.0", "0000:41:00.0")
    assert healthy["0000:02:00.0"].values["gsp"] == "580.95.05" and healthy["0000:02:00.0"].values["near"] == 8


@pytest.mark.parametrize("limit", _GROWTH_LIMITS, ids=lambda limit: limit.field)
def test_a_counter_may_grow_to_its_limit(healthy, limit):
    one = next(one for one in healthy.values() if one.kind == limit.component_kind and one.model not in limit.but)
    assert isinstance(one.values[limit.field], int)

    def grown(first: int, last: int) -> list[Observation]:
        facts = [
            {**healthy, one.name: replace(one, values={**one.values, limit.field: value})} for value in (first, last)
        ]
        return [found for found in (judged(o, {}) for o in examine_kernel(*facts)) if found.finding]

    assert not grown(7, 7 + limit.most)
    (seen,) = grown(7, 8 + limit.most)
    assert f"{limit.most + 1} {limit.text} in the run (from 7 to {8 + limit.most}" in seen.seen
    assert seen.finding != "MGPU-OTHER" and seen.subject == Subject("host", (0,))
    (cleared,) = grown(9999, 999)
    assert f"999 {limit.text}" in cleared.seen


def half(name: str) -> dict[str, str]:
    return {f"sys/class/infiniband/mlx5_{number}/ports/1/{name}": "200 Gb/sec (2X NDR)" for number in range(2)}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({f"{PORT}/state": "1: DOWN"}, ["MGPU-NIC-IDLE"]),
        ({f"{PORT}/rate": "200 Gb/sec (2X NDR)"}, ["MGPU-NIC-SLOW"]),
        (half("rate"), []),  # two and two: no majority
        ({f"{NIC}/current_link_width": "8"}, ["MGPU-NIC-PCIE"]),
        ({f"{NIC}/current_link_speed": "16.0 GT/s PCIe"}, ["MGPU-NIC-PCIE"]),
        ({f"{NIC}/current_link_width": "8", f"{SLOT}/max_link_width": "8"}, []),  # the slot has no more
        ({f"{NIC}/max_link_speed": "Unknown", f"{SLOT}/max_link_speed": None}, []),
        ({f"{GPU}/numa_node": "-1"}, ["MGPU-GPU-AFFINITY"]),
        ({f"{GPU}/numa_node": "-1", "sys/devices/system/node/node1/cpulist": None}, ["MGPU-GPU-AFFINITY"]),
        ({f"{GPU}/local_cpulist": "8-15,24"}, ["MGPU-GPU-AFFINITY"]),
        ({f"{GPU}/iommu_group": "-> ../../../../kernel/iommu_groups/5", "sys/kernel/iommu_groups/5/type": "DMA-FQ"},
         ["MGPU-IOMMU"]),
        ({f"{GPU}/iommu_group": "-> ../../../../kernel/iommu_groups/5", "sys/kernel/iommu_groups/5/type": "identity"},
         []),
        ({"proc/driver/nvidia/gpus/0000:02:00.0/information": "GPU Firmware: \t N/A"}, ["MGPU-GSP"]),
        ({"proc/driver/nvidia/gpus/0000:02:00.0/information": None}, []),
        ({"sys/class/net/eth0/operstate": "down"}, []),  # many interfaces are not in use
    ],
    ids=range(15),
)  # fmt: skip
def test_states_are_judged_after_the_run(tmp_path, changes, found):
    facts = after(tmp_path, changes)
    assert findings(facts, facts) == found


@pytest.mark.parametrize(
    ("file", "content", "seen"),
    [
        (f"{PORT}/state", "1: DOWN", "mlx5_1 port 1: its link is down, and was up before the run"),
        ("sys/class/net/eth0/operstate", "down", "eth0: its link is down, and was up before the run"),
        ("sys/class/net/eth0/type", None, "eth0: it is gone"),
    ],
)
def test_a_link_that_goes_down_in_the_run(tmp_path, healthy, file, content, seen):
    entries = [judged(one, {}) for one in examine_kernel(healthy, after(tmp_path, {file: content}))]
    (found,) = [one for one in entries if one.finding == "MGPU-NIC-LINK"]
    assert found.seen == seen


def test_acs_is_read_from_the_capabilities_of_bridges(tmp_path):
    def config(*capabilities: bytes) -> bytes:
        return bytes(0x100) + b"".join(capabilities) + bytes(16)

    def capability(number: int, following: int, rest: bytes = bytes(8)) -> bytes:
        return (following << 20 | 1 << 16 | number).to_bytes(4, "little") + rest

    write_tree(tmp_path, {})
    bridge = tmp_path / "sys/devices/pci0000:00/0000:f0:02.0"
    acs = {
        redirects: config(capability(1, 0x10C), capability(0x0D, 0, bytes((0, 0, redirects, 0))))
        for redirects in (29, 1)
    }
    for content, found in (
        (acs[29], ["MGPU-ACS"]),
        (acs[1], []),  # only source validation
        (acs[29][:256], []),  # what a user without root can read
        (config(capability(1, 0x100)), []),  # a loop
    ):
        (bridge / "config").write_bytes(content)
        facts = read_kernel(tmp_path, range(8))
        assert findings(facts, facts) == found


def test_what_is_not_there_is_counted(tmp_path, healthy):
    passed, skipped = examine_kernel(None, healthy)
    assert skipped.outcome == "skipped" and "infiniband symbol_error (4)" in skipped.seen
    assert passed.evidence["not known"]["infiniband symbol_error"] == 4
    found = examine_kernel({}, read_kernel(tmp_path / "nothing", range(8)))
    assert [(one.outcome, one.seen) for one in found] == [
        ("passed", ""),
        ("skipped", "the kernel shows no InfiniBand port"),
        ("skipped", "the kernel shows no Ethernet interface"),
        ("skipped", "the kernel shows no memory controller (EDAC)"),
    ]
    assert not wrong(examine_kernel(read_kernel(), read_kernel()))  # this machine


@pytest.mark.parametrize("name", [name for name, fault in all_hardware_faults().items() if fault.of_host])
def test_each_planted_fault_of_a_host_rejects_it(name):
    fault = all_hardware_faults()[name]
    host = SimulatedHost(**fault.of_host)
    gpus = [replace(gpu, facts={f"p2p_{1 - gpu.number}": "read"}) for gpu in run_reports.gpus(2)]
    assert set(fault.of_host) <= {field.name for field in fields(SimulatedHost)}
    looks = {
        "core": lambda: test_machine.look_at_cores([], 1.0, host),
        "word": lambda: examine_memory([], 1 << 20, 1, 1, host.word),
        "transport": lambda: examine_paths([paths_in(log_of_nccl(2, host.transport))], gpus, {}),
    }
    kernel = list(test_machine.look_at_kernel([], {}, host)) if not looks.keys() & fault.of_host.keys() else []
    found = [*kernel, *(one for name, look in looks.items() if name in fault.of_host for one in look())]
    rejected = [one for one in (judged(one, {}) for one in found) if one.outcome == "failed"]
    assert rejected and all(one.ruling == "reject" and one.finding != "MGPU-OTHER" for one in rejected)


# --- paths of collectives ---

LOG = """\
node-a:71:93 [0] NCCL INFO Using network IB
node-a:71:93 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
node-a:71:93 [0] NCCL INFO Channel 01/0 : 1[1b000] -> 0[43000] via SHM/direct/direct
node-a:71:93 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0
node-a:71:93 [0] NCCL INFO Channel 00/0 : 2[0] -> 3[1] [receive] via NET/IB/0/GDRDMA
node-a:71:93 [0] NCCL INFO Connected all rings
"""


def test_paths_are_read_from_the_log_of_nccl():
    paths = {(0, 1): "P2P/CUMEM/read", (1, 0): "SHM/direct/direct", (1, 2): "NET/Socket/0", (2, 3): "NET/IB/0/GDRDMA"}
    assert paths_in(LOG.splitlines()) == paths
    assert environment()["NCCL_DEBUG"] == "INFO" and "%p" in environment()["NCCL_DEBUG_FILE"]


def test_a_slower_path_than_there_is_rejects_the_host() -> None:
    first, second = run_reports.gpus(2), run_reports.gpus(2, host=1, first=2)
    direct = {f"p2p_{number}": "read+write+nvlink+atomics" for number in range(4)}
    gpus = [replace(gpu, facts=direct) for gpu in (*first, *second)]
    told: list[Any] = [paths_in(LOG.splitlines()), "NCCL's log names no path"]
    found = examine_paths(told, gpus, {0: "mlx5_0 port 1"})
    use, there = "collectives use", "and direct access is there (read+write+nvlink+atomics)"
    assert [(str(one.subject), one.outcome, one.seen) for one in found] == [
        ("host 0", "skipped", "NCCL's log names no path"),
        ("host 0", "failed", f"GPU 1 -> GPU 0: {use} SHM/direct/direct, {there}"),
        ("host 0", "failed", f"GPU 1 -> GPU 2: {use} NET/Socket/0, and mlx5_0 port 1 is active"),
        ("host 1", "failed", f"GPU 2 -> GPU 3: {use} NET/IB/0/GDRDMA, {there}"),
        ("host 0", "passed", ""),
    ]
    assert identify(found[1]).id == "MGPU-TRANSPORT"
    bare = [replace(gpu, facts={}) for gpu in gpus]
    assert not wrong(examine_paths(told, bare, {}))


def test_paths_are_asked_of_the_ranks_with_the_fabric_of_the_host(healthy):
    asked = []
    plan: Any = SimpleNamespace(level="standard", simulate=None)
    node = Node(SimpleNamespace(), RunLog(), run_reports.gpus(2), plan, (Host(0, "node-a"), Host(1, "node-b")))  # type: ignore[arg-type]
    node.kernel_before = {("node-a", ""): healthy, ("node-b", ""): {}}
    node.on_ranks = lambda check, fn, **more: asked.append((check, fn, more)) or [{(0, 1): "NET/IB/0"}]  # type: ignore[method-assign, func-returns-value]
    test_machine.test_the_fabric_is_used(node)
    assert node.fabric == {0: "mlx5_0 port 1"}
    assert asked == [("machine", paths_of_rank, {"environment": environment()})]
    (seen,) = node._log.observations()
    assert (seen.outcome, seen.work.operations, seen.evidence) == ("passed", 1, {"paths": {"NET/IB/0": 1}})


def test_ranks_read_their_own_log_or_say_why_not(ranks, monkeypatch, tmp_path):
    assert ranks.run(paths_of_rank, size=2) == ["NCCL wrote no log: No such file or directory"] * 2  # simulated
    rank: Any = SimpleNamespace(device="cpu")
    log = tmp_path / f"{os.getpid()}.log"
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(tmp_path / "%p.log"))
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    assert paths_of_rank(rank) == "the backend is gloo, which has no such paths"
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: log.write_text(LOG))
    assert paths_of_rank(rank) == paths_in(LOG.splitlines()) and not log.exists()
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: log.write_text("NCCL INFO cudaDriverVersion\n"))
    assert paths_of_rank(rank) == "NCCL's log names no path"
