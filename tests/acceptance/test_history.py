"""GPUs over their reports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mgpu_check.__main__ import main
from mgpu_check.acceptance.report.files import write
from mgpu_check.acceptance.report.history import history, lines
from mgpu_check.acceptance.run_report import RunReport
from mgpu_check.devices.observations import Measurement, Observation, Subject
from mgpu_check.devices.telemetry.values import TelemetrySample
from tests.acceptance import run_reports


def serial(index: int) -> str:
    return f"165302400{index:03}"


def on(day: int, report: RunReport) -> RunReport:
    return replace(report, started=f"2026-11-{day:02}T15:00:00+00:00")


def slowed(report: RunReport, factors: dict[int, float]) -> RunReport:
    """A report whose products are slower by these factors, by GPU."""
    return replace(
        report,
        measurements=tuple(
            replace(m, value=m.value * factors.get(m.subject.members[0], 1.0)) if m.unit == "FLOP/s" else m
            for m in report.measurements
        ),
    )


def counted(report: RunReport, gpu: int, **counters: int) -> RunReport:
    return replace(report, samples=(*report.samples, TelemetrySample(report.seconds, gpu, counters)))


@pytest.fixture
def directory(tmp_path: Path):
    def made(*reports: RunReport) -> Path:
        for number, report in enumerate(reports):
            write(tmp_path / f"{number}.json", report)
        return tmp_path

    return made


GOOD = run_reports.good(4, 5.0)


def changes(directory: Path) -> dict[str, list[tuple[str, str]]]:
    return {gpu.key: [(c.kind, c.outcome) for c in gpu.changes] for gpu in history(directory).gpus if gpu.changes}


def test_nothing_has_changed(directory, capsys):
    where = directory(on(1, GOOD), on(2, GOOD))
    assert main(["accept", "history", str(where)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "4 GPUs without a change; 0 GPUs in one report only",
        "4 GPUs in 2 reports: 0 got worse, 0 undecided; 0 files could not be read",
    ]
    assert main(["accept", "history", str(where), f"--gpu={serial(2)}"]) == 0
    assert "  nothing has changed" in capsys.readouterr().out


def test_a_gpu_becomes_slower_and_the_others_do_not(directory, capsys):
    where = directory(on(3, slowed(GOOD, {2: 0.8})), on(1, GOOD), on(2, GOOD))
    assert changes(where) == {serial(2): [("speed", "worse")] * 2}
    assert main(["accept", "history", str(where)]) == 1
    said = capsys.readouterr().out
    assert "matrix product float16 (gpu), size 8192: 20% slower than before, the 3 others of its model by 0%" in said
    assert "(695 TFLOP/s -> 695 TFLOP/s -> 556 TFLOP/s)" in said  # in order of time, not of files


def test_copies_of_pageable_memory_drift_by_their_own_limit(directory):
    def copied(**last: float) -> RunReport:
        copies = [
            Measurement("links", Subject("upload", (gpu,)), name, "B/s", last.get(f"gpu{gpu}", 10e9), 5, 1)
            for name in ("copy", "pageable copy")
            for gpu in range(4)
        ]
        return replace(GOOD, measurements=tuple(copies))

    where = directory(on(1, copied()), on(2, copied(gpu1=7.9e9, gpu2=8.5e9)))
    told = {gpu.key: [change.text.partition(",")[0] for change in gpu.changes] for gpu in history(where).gpus}
    assert told[serial(1)] == ["copy (upload)", "pageable copy (upload)"] and told[serial(2)] == ["copy (upload)"]


def test_slower_without_a_control_is_undecided(directory):
    assert not changes(directory(on(1, GOOD), on(2, slowed(GOOD, dict.fromkeys(range(4), 0.8)))))  # all alike
    pair = run_reports.good(2, 5.0)
    where = directory(on(1, pair), on(2, slowed(pair, {0: 0.7})))
    assert changes(where) == {serial(0): [("speed", "undecided")] * 2}
    assert main(["accept", "history", str(where)]) == 2


def test_counters_grow(directory, capsys):
    first = counted(GOOD, 1, remapped_uncorrected=1, ecc_uncorrected=2, pcie_replays=0, ecc_corrected=3)
    last = counted(GOOD, 1, remapped_uncorrected=3, ecc_uncorrected=1, pcie_replays=900, ecc_corrected=4)
    xid = Observation("health", Subject("gpu", (0,)), "failed", "Xid 48", evidence={"kind": "xid", "code": 48})
    last = replace(last, observations=(*last.observations, xid))
    where = directory(on(1, first), on(2, last))
    told = {change.text: change.outcome for gpu in history(where).gpus for change in gpu.changes}
    assert told == {
        "Xid 48: 1 more (0 -> 1)": "worse",
        "rows remapped after uncorrected errors: 2 more (1 -> 3)": "worse",
        "uncorrected memory errors since the driver was loaded: 1 more (2 -> 1)": "worse",  # cleared between
        "packets sent again over PCIe: 900 more (0 -> 900)": "note",  # in a day
        "corrected memory errors since the driver was loaded: 1 more (3 -> 4)": "note",
    }
    assert main(["accept", "history", str(where)]) == 1 and "worse: Xid 48: 1 more" in capsys.readouterr().out


def test_moves_software_and_verdicts_over_time(directory, capsys):
    bad = run_reports.bad()
    good = run_reports.good(8, 5.0)
    there = replace(
        good,
        hosts=(replace(good.hosts[0], name="node-b", software={**run_reports.SOFTWARE, "driver": "590.1"}),),
        gpus=(good.gpus[1], replace(good.gpus[0], number=1, index=1, pci="0000:aa:00.0"), *good.gpus[2:]),
    )
    there = replace(there, gpus=tuple(replace(gpu, number=n) for n, gpu in enumerate(there.gpus)))
    where = directory(on(1, good), on(2, there), on(3, bad))
    found = {gpu.key: gpu for gpu in history(where).gpus}
    text = [change.text for change in found[serial(0)].changes]
    assert "moved from node-a (cuda:0, PCI 0000:1b:00.0) to node-b (cuda:1, PCI 0000:aa:00.0)" in "\n".join(text)
    assert any("driver from 580.95.05 to 590.1" in one for one in text)
    assert [point.verdict for point in found[serial(3)].points] == ["ACCEPTED", "ACCEPTED", "REJECTED"]
    assert ("verdict", "worse") in [(c.kind, c.outcome) for c in found[serial(3)].changes]
    assert main(["accept", "history", str(where), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["format"], document["version"], document["reports"]) == ("mgpu-check history", 1, 3)
    assert [gpu["key"] for gpu in document["gpus"]] == [serial(n) for n in range(8)]


def test_files_that_are_no_reports_are_counted(directory, tmp_path, capsys):
    where = directory(on(1, GOOD), on(2, GOOD))
    document = json.loads((where / "0.json").read_text())
    (where / "below").mkdir()
    (where / "below" / "new.json").write_text(json.dumps({**document, "version": 2}))
    (where / "half.json").write_text((where / "0.json").read_text()[:300])
    assert main(["accept", "history", str(where)]) == 2
    said = capsys.readouterr().out
    assert "version is 2; give 1, which this version of mgpu-check reads" in said and "half.json is not JSON" in said
    assert "2 files could not be read" in said


def test_gpus_without_identity_are_counted(directory):
    nameless = tuple(replace(gpu, uuid="", serial="") for gpu in GOOD.gpus)
    shared = tuple(replace(gpu, serial="one") for gpu in GOOD.gpus)  # a board of four GPUs
    found = history(directory(on(1, replace(GOOD, gpus=nameless)), on(2, replace(GOOD, gpus=shared))))
    assert found.nameless == 4 and [gpu.key for gpu in found.gpus] == [gpu.uuid for gpu in GOOD.gpus]
    assert "4 GPUs without serial number and UUID: not followed" in lines(found)


def test_wrong_usage(directory, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.json").write_text("[]")
    where = directory(on(1, GOOD), on(2, replace(GOOD, simulated="cpu")))
    for arguments, words in (
        ([str(tmp_path / "none")], "is not a directory"),
        ([str(tmp_path / "empty")], "has no report, and no file that ends in .json"),
        ([str(tmp_path / "other")], "has no report: "),
        ([str(where)], "1.json is of a SIMULATED node"),
        ([str(where / "empty"), "--gpu=1"], "has no report"),
        ([], "the following arguments are required: DIR"),
    ):
        assert main(["accept", "history", *arguments]) == 4
        assert words in capsys.readouterr().err
    (where / "1.json").unlink()
    assert (
        main(["accept", "history", str(where), "--gpu=1"]) == 4
        and "no report has this serial" in capsys.readouterr().err
    )
