"""Each GPU is itself, and the kernel log shows its past."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mgpu_check.acceptance.findings import judged
from mgpu_check.acceptance.health.checks import examine_past_xids
from mgpu_check.acceptance.inventory.checks import examine_identity
from mgpu_check.devices.observations import Subject
from mgpu_check.devices.telemetry import nvml
from mgpu_check.devices.telemetry.nvml import past_xids, xids_in
from mgpu_check.devices.telemetry.sources import Override
from tests.acceptance.watching import GPUS, SLOTS, watched

HOST = Subject("host", (0,))


def told(monkeypatch: pytest.MonkeyPatch, *overrides: Override, **profile: Any) -> list[tuple[str, Subject, str]]:
    entries = examine_identity(watched(monkeypatch, overrides, profile).first, SLOTS)
    found = [judged(entry, {}) for entry in entries]
    return [(entry.finding, entry.subject, entry.seen) for entry in found]


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("uuid", "uuid-2", "its GPUs 1, 2 have one UUID: uuid-2"),
        ("serial", "SIMULATED-2", "its GPUs 1, 2 have one serial number of the board: SIMULATED-2"),
    ],
)
def test_two_gpus_of_one_identity_are_about_the_host(
    monkeypatch: pytest.MonkeyPatch, field: str, value: str, text: str
) -> None:
    assert told(monkeypatch, Override(1, field, value)) == [("MGPU-IDENTITY-DUPLICATE", HOST, text)]


def test_a_slot_that_torch_knows_otherwise_is_about_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = told(monkeypatch, Override(1, "pci", SLOTS[2]), Override(2, "pci", SLOTS[1]))
    assert [(finding, subject.members) for finding, subject, _ in found] == [
        ("MGPU-PCI-MISMATCH", (1,)),
        ("MGPU-PCI-MISMATCH", (2,)),
    ]
    assert found[0][2] == f"PCI bus id is {SLOTS[2]} for the driver's library, and {SLOTS[1]} for torch"


def test_boards_with_several_gpus_and_mig_devices_may_share(monkeypatch: pytest.MonkeyPatch) -> None:
    serials = [Override(gpu, "serial", "one") for gpu in GPUS]
    shared = [len(told(monkeypatch, *serials, **profile)) for profile in ({}, {"multi_gpu_board": True}, {"mig": "on"})]
    assert shared == [1, 0, 0]


def test_what_is_not_known_is_no_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("serial", "pci", "uuid"):
        assert told(monkeypatch, *(Override(gpu, name, None) for gpu in GPUS)) == []
    run = watched(monkeypatch, [Override(1, "pci", "0000:1B:00.0")])
    assert examine_identity(run.first, {1: ""}) == []  # torch does not report it


LOG = """\
6,1,1;NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.95.05
3,2,2;NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
Nov 20 10:00:00 node kernel: [12.3] NVRM: Xid (PCI:0000:1B:00): 79, pid=123
4,3,3;NVRM: Xid (PCI:0001:c1:00.0): 63, Row Remapper: New row marked for remapping
NVRM: Xid (PCI:nonsense): 13
"""


def test_xids_are_found_in_lines_of_any_log() -> None:
    assert xids_in(LOG.splitlines()) == {("00000000:1B:00.0", 79): 2, ("00000001:C1:00.0", 63): 1}


def test_the_first_log_that_can_be_read_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ring, other = tmp_path / "kmsg", tmp_path / "kern.log"
    monkeypatch.setattr(nvml, "_KMSG", ring)
    monkeypatch.setattr(nvml, "_FILES", (tmp_path / "none", other))
    assert past_xids() is None
    other.write_text("old line\n" * 100 + LOG)
    assert past_xids() == xids_in(LOG.splitlines())
    monkeypatch.setattr(nvml, "_MOST", 60)
    assert past_xids() == {}  # the end only
    ring.write_text(LOG.splitlines()[3])
    assert past_xids() == {("00000001:C1:00.0", 63): 1}


def test_past_xids_are_warnings_and_consequences_are_left_out() -> None:
    found = [judged(entry, {}) for entry in examine_past_xids({1: {79: 2, 45: 9}, 3: {63: 1}})]
    assert [(entry.subject.members, entry.finding, entry.outcome) for entry in found] == [
        ((1,), "MGPU-XID-PAST", "passed"),
        ((3,), "MGPU-XID-PAST", "passed"),
    ]
    assert found[0].seen == "Xid 79: the GPU has fallen off the bus, 2 times in the kernel log before the run"
