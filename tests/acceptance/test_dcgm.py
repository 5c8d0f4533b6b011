"""Results of DCGM's diagnostic, in the layouts that `dcgmi/Diag.cpp` of DCGM 3.2, 3.3 and 4 writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mgpu_check.acceptance.dcgm.diagnostic import examine_diagnostic, read_diagnostic
from mgpu_check.acceptance.findings import KINDS, judged, listed
from mgpu_check.acceptance.plan import check_runs, floors
from mgpu_check.acceptance.run_report import Gpu
from mgpu_check.acceptance.verdict import remedy_for
from mgpu_check.devices.observations import Observation, Part, Subject
from tests.acceptance import run_reports

GPUS = run_reports.gpus(2)
SERIALS = [gpu.serial for gpu in GPUS]
REPLAYS = "Detected 143 PCIe replays for GPU 1, above the threshold of 80"


def old(**result: Any) -> dict[str, Any]:
    """DCGM 3.2: gpu_ids, one text of warnings, no serial numbers. A GPU that did not run a test leaves null."""
    tests = [{"name": "PCIe", "results": [{"gpu_ids": "0", "status": "Pass"}, {"gpu_ids": "1", **result}]}]
    hardware = [{"name": "GPU Memory", "results": [None, {"gpu_ids": "1", "info": "free memory", "status": "Pass"}]}]
    deployment = [{"name": "Denylist", "results": [{"status": "Pass"}]}, {"name": "NVML Library", "results": [SKIPPED]}]
    categories = {"Deployment": deployment, "Integration": tests, "Hardware": hardware}
    return {
        "DCGM GPU Diagnostic": {"test_categories": [{"category": k, "tests": v} for k, v in categories.items()]},
        "Driver Version Detected": "535.104.05",
        "GPU Device IDs": ["2330", "2330"],
        "version": "3.2.6",
    }


SKIPPED = {"status": "Skip"}
OLD = old(status="Fail", warnings=REPLAYS, error_id=30)
REMAP = {"gpu_id": 1, "status": "Fail", "warnings": [{"warnings": "remap", "error_id": 96}]}
MISCOMPARE = {"warning": "miscompare", "error_id": 50, "error_category": 7, "error_severity": 2}
DIAGNOSTIC = [{"gpu_id": "0", "status": "Pass"}, {"gpu_id": "1", "status": "Fail", "warnings": [None, MISCOMPARE]}]
LATE_CATEGORIES = [
    {"category": "Deployment", "tests": [{"name": "Page Retirement/Row Remap", "results": [REMAP]}]},
    {"category": "Hardware", "tests": [{"name": "Diagnostic", "results": DIAGNOSTIC}]},
]
LATE = {  # DCGM 3.3: gpu_id, a list of warnings, serial numbers
    "DCGM GPU Diagnostic": {"test_categories": LATE_CATEGORIES},
    "GPU Device Serials": {"0": SERIALS[1], "1": SERIALS[0]},
    "version": "3.3.9",
}


def entity(number: int, status: str, **more: Any) -> dict[str, Any]:
    return {"entity_group": "GPU", "entity_group_id": 1, "entity_id": number, "status": status, **more}


PASSED = [entity(0, "Pass"), entity(1, "Pass")]
POWER = {"warning": "450 W of\n525", "error_id": 42}
POWERED = [
    entity(0, "Skip", info=["GPU 0 does not support it"]),
    entity(1, "Fail", warnings=[{**POWER, "error_severity": 2}]),
    {"entity_group": "CPU", "entity_group_id": 7, "entity_id": 0, "status": "Pass"},
]
STRESS = [
    {"name": "targeted_power", "results": POWERED, "test_summary": {"status": "Fail", "warnings": [POWER]}},
    {"name": "memtest", "test_summary": {"status": "Fail", "warnings": [{"warning": "no memory"}]}},
]
SOFTWARE = {"name": "software", "results": PASSED, "test_summary": {"status": "Pass"}}
NEW_CATEGORIES = [{"category": "Deployment", "tests": [SOFTWARE]}, {"category": "Stress", "tests": STRESS}]
ENTITIES = [{"entity_id": n, "serial_num": SERIALS[n], "device_id": "2330"} for n in range(2)]
NEW = {  # DCGM 4
    "DCGM Diagnostic": {"test_categories": NEW_CATEGORIES},
    "entity_groups": [{"entity_group": "GPU", "entity_group_id": 1, "entities": ENTITIES}],
    "metadata": {"version": "4.6.0", "Driver Version Detected": "580.95.05"},
}


@pytest.fixture
def given(tmp_path: Path) -> Callable[..., list[Observation]]:
    def examined(document: object, gpus: tuple[Gpu, ...] = GPUS, visible: int = 2) -> list[Observation]:
        path = tmp_path / "dcgm.json"
        path.write_text(json.dumps(document))
        return [judged(one, {}) for one in examine_diagnostic(read_diagnostic(path), gpus, {0: visible})]

    return examined


def told(observations: list[Observation]) -> list[tuple[str, str, str, str]]:
    return [(str(one.subject), one.case.partition(": ")[2], one.outcome, one.seen) for one in observations]


def test_dcgm_3_2_by_index(given):
    found = given(OLD)
    assert told(found) == [
        ("host 0", "Denylist", "passed", ""),
        ("host 0", "NVML Library", "skipped", "NVML Library: Skip"),
        ("GPU 0", "PCIe", "passed", ""),
        ("GPU 1", "PCIe", "failed", f"PCIe: Fail: {REPLAYS}"),
        ("GPU 1", "GPU Memory", "passed", ""),
    ]
    failed = found[3]
    assert failed.evidence["errors"] == "30" and failed.case == "DCGM 3.2.6: PCIe"
    assert [(one.id, one.action) for one in listed(found)] == [("MGPU-DCGM-FAILED", "inspect-node")]
    assert remedy_for(Part("gpu", (1,)), [failed]).advice == f"drain the node; {KINDS['MGPU-DCGM-FAILED'].do}"
    swapped = (replace(GPUS[0], pci=GPUS[1].pci), replace(GPUS[1], pci=GPUS[0].pci))
    assert [one.subject for one in given(OLD, swapped) if one.outcome == "failed"] == [Subject("gpu", (0,))]


def test_an_index_says_nothing_in_a_run_of_some_gpus(given):
    found = given(OLD, GPUS, 8)
    assert {one.outcome for one in found if one.work.operations == 0} == {"skipped", "unknown"}
    assert not any(one.subject.kind == "gpu" or one.outcome == "failed" for one in found)
    assert "PCIe of GPU 1 of DCGM: Fail; the file has no serial numbers" in found[3].seen


def test_dcgm_3_3_by_serial_number(given):
    assert told(given(LATE)) == [  # DCGM has the GPUs the other way round
        ("GPU 0", "Page Retirement/Row Remap", "failed", "Page Retirement/Row Remap: Fail: remap"),
        ("GPU 1", "Diagnostic", "passed", ""),
        ("GPU 0", "Diagnostic", "failed", "Diagnostic: Fail: miscompare"),
    ]


def test_dcgm_4_with_entities_and_summaries(given):
    found = given(NEW)
    assert told(found) == [
        ("GPU 0", "software", "passed", ""),
        ("GPU 1", "software", "passed", ""),
        ("GPU 0", "targeted_power", "skipped", "targeted_power: Skip"),
        ("GPU 1", "targeted_power", "failed", "targeted_power: Fail: 450 W of 525"),
        ("host 0", "targeted_power", "passed", ""),
        ("host 0", "memtest", "failed", "memtest: Fail: no memory"),  # a failure that DCGM ties to no GPU
    ]
    elsewhere = (GPUS[0], replace(GPUS[1], serial="other"))
    (skipped,) = [one for one in given(NEW, elsewhere) if "is not in this run" in one.seen and "power" in one.seen]
    assert (skipped.outcome, skipped.subject) == ("skipped", Subject("host", (0,)))


def test_a_gpu_without_a_test_that_ran_is_unknown(given):
    needed = {"dcgm": floors(GPUS, "quick", 0.9, None, dcgm=True)["dcgm"]}
    assert "dcgm" not in floors(GPUS, "quick", 0.9, None)
    only = old(status="Skip")
    only["DCGM GPU Diagnostic"]["test_categories"].pop()
    run = check_runs(given(only), needed, lambda check: (0, 0))["dcgm"]
    assert run.outcome == "unknown" and "less than its least work on GPU 1: 0 of 1 operations" in run.why
    assert check_runs(given(old(status="Pass")), needed, lambda check: (0, 0))["dcgm"].outcome == "passed"


def test_a_diagnostic_that_did_not_run_or_is_of_another_node_is_unknown(given):
    (one,) = given({"DCGM Diagnostic": {"runtime_error": "no GPU", "version": "4.6.0"}})
    assert (one.outcome, one.seen) == ("unknown", "the diagnostic did not run: no GPU")
    (one,) = given(NEW, tuple(replace(gpu, serial=f"x{gpu.index}") for gpu in GPUS))
    assert one.outcome == "unknown" and f"is about other GPUs, with serial numbers {SERIALS[0]}" in one.seen


def test_warnings_are_warnings_and_iterations_all_count(given):
    found = given({"iterations": [old(status="Warn", warnings="hot"), OLD], "Overall Result": "Fail"})
    assert [(one.id, one.ruling) for one in listed(found)] == [
        ("MGPU-DCGM-FAILED", "reject"),
        ("MGPU-DCGM-WARN", "warn"),
    ]
    assert len(found) == 10


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "the file is '[]', not an object"),
        ({"tests": []}, "there is no 'DCGM Diagnostic' or 'DCGM GPU Diagnostic' in ['tests']"),
        ({"DCGM Diagnostic": {}}, "test_categories is 'None', not a list"),
        ({"DCGM Diagnostic": {"test_categories": []}}, "it has no result of a test"),
        (old(status="Perfect"), "status of PCIe is 'Perfect'; DCGM has Pass, Fail, Warn, Skip"),
        ({"iterations": {}}, "iterations is '{}', not a list"),
        ({**NEW, "entity_groups": [{"entity_group_id": 1}]}, "it is in no layout of DCGM (KeyError('entities'))"),
    ],
    ids=range(7),
)
def test_other_files_are_refused(given, document: object, words: str):
    with pytest.raises(ValueError, match="dcgmi diag -r 3 -j") as refused:
        given(document)
    assert words in str(refused.value)


@pytest.mark.slow
def test_a_failed_test_of_dcgm_rejects_the_node(command: Callable[..., str], tmp_path: Path) -> None:
    serials = json.loads(json.dumps(NEW))
    for number, one in enumerate(serials["entity_groups"][0]["entities"]):
        one["serial_num"] = f"SIMULATED-{number}"
    (tmp_path / "dcgm.json").write_text(json.dumps(serials))
    arguments = ("accept", "--gpus=2", "--simulate", "--gpu-level=quick", "-k", "dcgm", f"--dcgm={tmp_path}/dcgm.json")
    said = command(*arguments, code=1)
    assert "REJECTED on 2 SIMULATED cpu GPUs: GPU 1, host" in said
    assert "  seen: dcgm: GPU 1: targeted_power: Fail: 450 W of 525 (DCGM 4.6.0: targeted_power); 1 of 2 looks" in said
    assert "  do: drain the node; do what DCGM says" in said
