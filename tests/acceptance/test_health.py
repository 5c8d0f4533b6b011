"""Conclusions from telemetry: the GPU that is sick, the one that differs, and the unknown values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from mgpu_check.acceptance.faults import all_hardware_faults, planted_from
from mgpu_check.acceptance.findings import judged, listed
from mgpu_check.acceptance.health.checks import examine_growth, examine_health, examine_troubles
from mgpu_check.acceptance.inventory.checks import Reference, examine_identity, examine_inventory, examine_pcie
from mgpu_check.acceptance.verdict import explain
from mgpu_check.devices.observations import Observation, Subject
from mgpu_check.devices.telemetry.fields import FIELDS
from mgpu_check.devices.telemetry.sampler import Snapshot, Trouble
from mgpu_check.devices.telemetry.sources import Override
from tests.acceptance.watching import GPUS, NOMINAL, SLOTS, Run, watched


def examined(run: Run) -> list[Observation]:
    return [
        *examine_inventory(run.first, references=[NOMINAL]),
        *examine_identity(run.first, SLOTS),
        *examine_pcie(run.first, run.samples),
        *examine_health(run.snapshots, run.samples, run.troubles),
    ]


def failed(entries: list[Observation]) -> list[tuple[str, str, str]]:
    return [(entry.check, str(entry.subject), entry.seen) for entry in entries if entry.outcome == "failed"]


def test_healthy_gpus_pass_with_work(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = examined(watched(monkeypatch))
    assert {(entry.check, entry.outcome) for entry in entries} == {("inventory", "passed"), ("health", "passed")}
    assert all(entry.work.operations >= 10 for entry in entries)
    for check in ("inventory", "health"):
        assert {entry.subject for entry in entries if entry.check == check} == {Subject("gpu", (g,)) for g in GPUS}


PLANTED = [name for name, fault in all_hardware_faults().items() if fault.telemetry(fault.defaults)]


@pytest.mark.parametrize("name", PLANTED)
def test_each_planted_fault_accuses_its_part_with_a_kind_of_finding(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    planted = planted_from(name)
    overrides = planted.fault.telemetry(planted.parameters)
    hanging = [one for one in overrides if one.error == "timeout"]
    run = watched(monkeypatch, [one for one in overrides if one not in hanging])
    run.troubles += [Trouble("hang", one.gpu, one.field, "no answer", 3.0) for one in hanging]
    entries = examined(run)
    explanation = explain(entries, [0] * len(GPUS))
    assert set(explanation.parts) == set(planted.parts) and not explanation.unexplained
    assert set(planted.fault.caught_by) <= {entry.check for entry in entries if entry.outcome == "failed"}
    kinds = listed(judged(entry, {}) for entry in entries)
    assert kinds and all(kind.id != "MGPU-OTHER" and kind.advice for kind in kinds)
    assert "reject" in {kind.ruling for kind in kinds}


def on(gpus: Iterable[int], field: str, value: Any, **more: Any) -> list[Override]:
    return [Override(gpu, field, value, **more) for gpu in gpus]


@pytest.mark.parametrize(
    ("overrides", "blamed"),
    [
        (on((1, 3), "power_limit", 500), "GPU 1, GPU 3"),  # a tie: those that can do less, where there is such an order
        (on((1, 3), "vbios", "x"), "host 0"),  # and otherwise what they have in common
        (on(GPUS, "fabric", "in progress"), "host 0"),
        (on([2], "fabric", "in progress"), "GPU 2"),
        (on([1], "memory", (16 << 20) - 100), ""),  # firmware keeps some of it
        (on([1], "nvlinks", None), "GPU 1"),  # a field that one GPU alone does not know
        (on([2], "name", "B") + on([2], "power_limit", 300), "GPU 2"),  # facts are compared among GPUs of one model
        # some pairs without NVLink are a mesh, and not a defect
        (on([0], "p2p_3", "read+write+atomics") + on([3], "p2p_0", "read+write+atomics"), ""),
        # pairs of another topology are compared with their like
        (on([0], "p2p_1", "none") + on([1], "p2p_0", "none")
         + on([0], "topology_1", "node") + on([1], "topology_0", "node"), ""),
        (on(GPUS, "ecc_uncorrected", None), ""),  # no GPU has telemetry for it: nothing is concluded
        (on([2], "ecc_uncorrected", 3), "GPU 2"),  # errors from before the run
        (on([2], "retired_pages", 62), ""),
        (on([2], "retired_pages", 63), "GPU 2"),
        (on([1], "throttle", "power cap"), ""),  # a reached power limit is no fault
        (on([1], "throttle", "power cap, thermal (software)"), "GPU 1"),
        (on([1], "pcie_generation", 1) + on([1], "utilization", 0), ""),  # an idle link is slower
        (on([1], "xid", 45), ""),  # what a killed process leaves
        (on([1], "xid", 31), "GPU 1"),
        (on([1], "serial", "other", after=5), "GPU 1"),
        # a statement of the driver about a GPU concerns that GPU, however many have one
        (on([0], "remap_failed", True) + on([1], "sram_threshold", True) + on([2], "throttle", "thermal (hardware)"),
         "GPU 0, GPU 1, GPU 2"),
        (on(GPUS, "remap_pending", True), "GPU 0, GPU 1, GPU 2, GPU 3"),
    ],
)  # fmt: skip
def test_who_is_blamed(monkeypatch: pytest.MonkeyPatch, overrides: list[Override], blamed: str) -> None:
    explanation = explain(examined(watched(monkeypatch, overrides)), [0] * len(GPUS))
    assert ", ".join(sorted(map(str, explanation.parts))) == blamed and not explanation.unexplained


@pytest.mark.parametrize(
    ("expected", "overrides", "count", "subject", "seen"),
    [
        ({"power_limit": 700, "p2p": "read+write"}, [], 4, "", ""),
        ({"power_limit": 600}, [], 4, "host 0", "of its GPUs: power limit is 700 W, and the baseline has 600 W"),
        ({"vbios": "00.00.00.00.00"}, on([1], "vbios", "x"), 4, "GPU 1", "x, and the baseline has 00.00.00.00.00"),
        ({"p2p": "read+write+nvlink"}, on([1], "p2p_3", "read+write+atomics"), 4,
         "copy GPU 1 -> GPU 3", "atomics, and the"),
        ({}, [], 8, "host 0", "it has 4 GPUs, and the baseline has 8"),
    ],
)  # fmt: skip
def test_what_the_baseline_has_otherwise_is_named(
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, Any],
    overrides: list[Override],
    count: int,
    subject: str,
    seen: str,
) -> None:
    run = watched(monkeypatch, overrides)
    found = failed(examine_inventory(run.first, references=[Reference("the baseline", expected, (count,))]))
    assert {entry[1] for entry in found} == ({subject} if subject else set())
    assert not seen or any(seen in entry[2] for entry in found)


@pytest.mark.parametrize(
    ("wrong", "value", "blamed"),
    [
        ((0, 1, 2, 3), 12, ["host 0"]),
        ((0, 1, 2), 12, ["GPU 0", "GPU 1", "GPU 2"]),  # the majority is wrong, and the right one is not accused
        ((3,), 12, ["GPU 3"]),
        ((0, 1, 2, 3), 18, []),
        ((0, 1), 36, []),  # more than the data sheet
        ((2,), None, ["GPU 2"]),  # the others report it
        ((0, 1, 2, 3), None, []),
    ],
)
def test_gpus_are_held_against_their_data_sheet(
    monkeypatch: pytest.MonkeyPatch, wrong: tuple[int, ...], value: int | None, blamed: list[str]
) -> None:
    run = watched(monkeypatch, [Override(gpu, "nvlinks", value) for gpu in wrong])
    found = failed(examine_inventory(run.first, references=[NOMINAL]))
    assert [subject for _, subject, _ in found] == blamed
    assert all("and the data sheet has 18" in seen for _, _, seen in found)


def test_a_baseline_of_the_site_overrides_the_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    run = watched(monkeypatch, [Override(gpu, "ecc", "off") for gpu in GPUS])
    site = Reference("the baseline", {"ecc": "off"}, (4,))
    nominal = Reference("the data sheet", {"ecc": "on"}, (8,), nominal=True)
    assert failed(examine_inventory(run.first, references=[site, nominal])) == []
    texts = [seen for _, subject, seen in failed(examine_inventory(run.first, references=[nominal]))]
    of_ecc = "of its GPUs: ECC mode is off, and the data sheet has on"
    assert texts == ["it has 4 GPUs, and the data sheet has 8", of_ecc]


def test_what_the_baseline_has_and_a_gpu_does_not_say_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    run = watched(monkeypatch, [Override(gpu, "ecc", None) for gpu in GPUS])
    entries = examine_inventory(run.first, references=[Reference("the baseline", {"ecc": "on"})])
    assert [entry.outcome for entry in entries] == ["unknown"] * len(GPUS)


@pytest.mark.parametrize(
    ("counter", "value", "is_failed"),
    [
        ("ecc_corrected", 10, False),
        ("ecc_corrected", 11, True),
        ("pcie_replays", 15, False),  # 10 s of Gen5 x16: 5.12 are to be expected, and 6 deviations more are allowed
        ("pcie_replays", 30, True),
        ("nvlink_crc", 1000, False),
        ("nvlink_crc", 1001, True),
        ("nvlink_replay", 1, True),
        ("thermal_violation", 99_000_000, False),
        ("thermal_violation", 101_000_000, True),
        ("ecc_uncorrected_ever", 1, False),  # the counter since the driver was loaded says it
    ],
)
def test_growth_belongs_to_the_test_in_which_it_was(counter: str, value: int, is_failed: bool) -> None:
    counters = dict.fromkeys((name for name, one in FIELDS.items() if one.kind == "counter"), 0)
    gauges: dict[str, Any] = {"pcie_generation": 5, "pcie_width": 16}
    before = Snapshot(0.0, {}, {0: counters}, {0: gauges})
    after = replace(before, at=10.0, counters={0: {**counters, counter: value}})
    (entry,) = examine_growth(before, after, "in test_b")
    assert (entry.outcome, entry.case) == ("failed" if is_failed else "passed", "in test_b")
    if is_failed:
        assert entry.evidence["field"] == counter and entry.evidence["after"] == value


def test_a_counter_that_falls_says_that_the_gpu_was_reset_and_one_that_wraps_does_not() -> None:
    def grown(first: int, last: int) -> list[str]:
        before, after = (Snapshot(at, {}, {0: {"pcie_replays": n}}, {0: {}}) for at, n in ((0.0, first), (1.0, last)))
        return [entry.seen for entry in examine_growth(before, after, "x") if entry.outcome == "failed"]

    assert "the GPU was reset" in grown(7, 0)[0]
    assert grown((1 << 32) - 1, 1) == []


def test_slow_growth_is_seen_over_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = watched(monkeypatch, [Override(1, "ecc_corrected", 0, grows=0.5)])
    (entry,) = [e for e in examine_health(run.snapshots, run.samples, run.troubles) if e.outcome == "failed"]
    assert entry.case == "in the run" and entry.subject == Subject("gpu", (1,))


def test_what_nobody_knows_is_unknown_and_never_a_pass() -> None:
    absent = Snapshot(missing={0: "no driver", 1: "no driver"}, absent="no driver")
    entries = [*examine_inventory(absent), *examine_health([("", absent), ("", absent)], [], [])]
    assert {(entry.outcome, entry.seen) for entry in entries} == {("unknown", "no driver")}
    assert len(entries) == 4
    nothing = dict.fromkeys(FIELDS)
    empty = Snapshot(0.0, {0: nothing}, {0: {}}, {0: {}}, {0: {"ecc": "not supported"}})
    (of_facts,) = examine_inventory(empty)
    (of_health,) = examine_health([("", empty), ("", empty)], [], [])
    (of_links,) = examine_pcie(empty, [])
    assert of_facts.seen == "nothing is known of it: not supported"
    assert of_health.outcome == of_links.outcome == "unknown"


def test_without_load_nothing_is_known_of_clocks_and_links(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = examined(watched(monkeypatch, profile={"utilization": 0}))
    unknown = {(entry.check, entry.seen) for entry in entries if entry.outcome == "unknown"}
    assert unknown == {(check, "no sample was taken under load") for check in ("inventory", "health")}


def test_troubles_are_held_against_whom_they_are_about() -> None:
    said = [
        (Trouble("hang", 1, "power", "no answer", 1.0), ("GPU 1", "failed")),
        (Trouble("blocked", 2, "power", "no answer", 2.0), ("GPU 2", "unknown")),
        (Trouble("hang", None, "initialization", "no answer", 1.0), ("host 0", "failed")),
        (Trouble("sampler", None, "", "it has ended", 1.0), ("host 0", "unknown")),
        (Trouble("xid", 0, "", "", 1.0, 31337), ("GPU 0", "failed")),
    ]
    entries = examine_troubles([trouble for trouble, _ in said])
    assert [(str(entry.subject), entry.outcome) for entry in entries] == [outcome for _, outcome in said]
    assert entries[-1].seen == "Xid 31337" and "catalog" in entries[-1].evidence["advice"]
