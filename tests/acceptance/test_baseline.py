"""A baseline of a healthy node is read back unchanged, and counts for the part that it was recorded of."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_check.acceptance.performance.checks import judge
from mgpu_check.acceptance.references import FORM, Baseline, Floors, entries_of, read_baseline, record, write
from mgpu_check.acceptance.run_report import Gpu
from mgpu_check.devices.observations import Measurement, Observation, Subject

NONE = Floors("none.json", ())
SOFTWARE = {"driver": "580.1", "cuda": "13.0", "nccl": "2.28", "torch": "2.13.0", "python": "3.11"}
WHEN = "2026-11-22T16:00:00+00:00"


def gpus(count: int = 4, name: str = "Model", hosts: int = 1, **facts: Any) -> list[Gpu]:
    facts = {"vbios": "96.00", "power_limit": 700.0, **facts}
    each = [(host, index) for host in range(hosts) for index in range(count)]
    return [Gpu(n, host, index, name, str(n), 80 << 30, facts=facts) for n, (host, index) in enumerate(each)]


def measurements(count: int = 4, factor: float = 1.0, repeats: int = 5) -> list[Measurement]:
    made = [
        Measurement("x", Subject("gpu", (n,)), "memory bandwidth", "B/s", factor * (2e12 + n * 1e10), repeats, 1 << 30)
        for n in range(count)
    ]
    for a, b in itertools.permutations(range(count), 2):
        speed, copy = factor * (2e11 if a // 2 == b // 2 else 2e10), Subject("copy", (a, b))
        made.append(Measurement("x", copy, "copy bandwidth", "B/s", speed, repeats, 1 << 26))
    return made


def recorded(path: Path, *args: Any, **more: Any) -> Baseline:
    record(path, entries_of(*args, **more))
    return read_baseline(path)


def test_what_was_recorded_comes_back(tmp_path):
    there = recorded(tmp_path / "b.json", measurements(), gpus(), SOFTWARE, WHEN)
    (entry,) = there.entries
    assert (entry.name, entry.memory, entry.gpus, entry.recorded) == ("Model", 80 << 30, 4, WHEN)
    assert entry.software == {name: SOFTWARE[name] for name in ("driver", "cuda", "nccl", "torch")}
    assert entry.facts == {"vbios": "96.00", "power_limit": 700.0}
    by_quantity = {r.quantity: r for r in entry.measurements}
    assert by_quantity["memory bandwidth"].places == {str(n): 2e12 + n * 1e10 for n in range(4)}
    assert by_quantity["copy bandwidth"].places["2>3"] == 2e11 and by_quantity["copy bandwidth"].subjects == 12


def test_a_file_has_several_models_and_versions_and_an_entry_is_replaced(tmp_path):
    path = tmp_path / "b.json"
    recorded(path, measurements(), gpus(), SOFTWARE, WHEN)
    recorded(path, measurements(), gpus(name="Other"), SOFTWARE, WHEN)
    recorded(path, measurements(), gpus(), {**SOFTWARE, "torch": "2.14"}, WHEN)
    there = recorded(path, measurements(factor=2.0), gpus(), SOFTWARE, "2026-12-01T00:00:00+00:00")
    assert sorted((e.name, e.software["torch"], e.recorded[:7]) for e in there.entries) == [
        ("Model", "2.13.0", "2026-12"),
        ("Model", "2.14", "2026-11"),
        ("Other", "2.13.0", "2026-11"),
    ]
    mixed = [*gpus(2), *(Gpu(2 + n, 0, 2 + n, "Other", str(n), 1 << 34) for n in range(2))]
    assert [e.name for e in entries_of(measurements(), mixed, SOFTWARE, WHEN)] == ["Model", "Other"]


def test_few_repeats_and_facts_in_which_gpus_differ_are_not_recorded():
    assert entries_of(measurements(repeats=2), gpus(), SOFTWARE, WHEN)[0].measurements == ()
    made = [
        Gpu(n, 0, n, "M", "", 1, facts={"ecc": "on", "vbios": str(n), "p2p_0": "read", "p2p_1": "read"}) for n in (0, 1)
    ]
    assert entries_of([], made, {}, WHEN)[0].facts == {"ecc": "on", "p2p": "read"}


def test_expected_facts_are_those_of_the_same_software_or_the_latest(tmp_path):
    path = tmp_path / "b.json"
    recorded(path, [], gpus(driver="580.1"), SOFTWARE, "2026-11-02")
    there = recorded(path, [], gpus(8, driver="570.0"), {**SOFTWARE, "driver": "570.0"}, "2026-11-01")
    assert there.expected(gpus(), {**SOFTWARE, "driver": "570.0"})[0]["driver"] == "570.0"
    assert there.expected(gpus(), {**SOFTWARE, "driver": "590.0"})[0]["driver"] == "580.1"
    facts, why = there.expected(gpus(name="Other"))
    assert not facts and "has no Other" in why and "Model" in why
    assert "2 models" in there.expected([gpus(1)[0], Gpu(1, 0, 1, "Other", "1")])[1]


def test_gpus_are_counted_where_all_of_the_host_were_in_the_run(tmp_path):
    there = recorded(tmp_path / "b.json", [], gpus(), SOFTWARE, WHEN)
    assert there.count(gpus()) == 4 and there.count(gpus(name="Other")) is None
    assert recorded(tmp_path / "b.json", [], gpus(), SOFTWARE, WHEN, {0: 8}).count(gpus()) is None


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "b.json"
    before = recorded(path, measurements(), gpus(), SOFTWARE, WHEN)

    def broken(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="No space"):
        write(path, Baseline(str(path), ()))
    assert read_baseline(path) == before and [p.name for p in tmp_path.iterdir()] == ["b.json"]


def test_what_is_no_baseline_is_not_overwritten(tmp_path):
    path = tmp_path / "train.json"
    path.write_text('{"lr": 0.1}')
    with pytest.raises(ValueError, match="format is missing"):
        record(path, entries_of(measurements(), gpus(), SOFTWARE, WHEN))
    assert path.read_text() == '{"lr": 0.1}'


# --- comparing ---


@settings(max_examples=60, deadline=None)
@given(st.floats(0.9, 1.5), st.integers(1, 4))
def test_a_healthy_run_is_like_its_baseline(factor, count):
    there = FORM.decoded(_document(measurements(count), gpus(count)), "b.json")
    found = judge(measurements(count, factor), gpus(count), there, NONE, {0: SOFTWARE, 1: SOFTWARE})
    assert {o.outcome for o in found} == {"passed"}


@settings(max_examples=60, deadline=None)
@given(st.floats(0.1, 0.8), st.integers(1, 4))
def test_gpus_that_are_all_slower_than_the_baseline_are_found(factor, count):
    there = FORM.decoded(_document(measurements(count), gpus(count)), "b.json")
    found = judge(measurements(count, factor), gpus(count), there, NONE, {0: SOFTWARE, 1: SOFTWARE})
    assert {o.outcome for o in found} == {"failed"} and "recorded at 2026-11-22" in found[0].seen


def _document(made: list[Measurement], of: list[Gpu]) -> Any:
    entries = [asdict(entry) for entry in entries_of(made, of, SOFTWARE, WHEN)]
    return json.loads(json.dumps({"format": "mgpu-check baseline", "version": 1, "entries": entries}))


HEALTHY = FORM.decoded(_document(measurements(), gpus()), "b.json")


def outcomes(made: list[Measurement], of: list[Gpu], software: Any = SOFTWARE, floors: Any = NONE) -> list[Observation]:
    return list(judge(made, of, HEALTHY, floors, {0: software, 1: software}))


def test_links_are_compared_place_by_place():
    """A bridge that fell back to PCIe is like other links, and unlike itself."""
    made = [replace(m, value=2e10) if m.subject.members == (0, 1) else m for m in measurements()]
    found = outcomes(made, gpus())
    assert [str(o.subject) for o in found if o.outcome == "failed"] == ["copy GPU 0 -> GPU 1"]


def test_hosts_of_a_run_are_compared_with_one_that_was_recorded():
    second = [
        replace(m, subject=Subject(m.subject.kind, tuple(n + 4 for n in m.subject.members)), value=m.value / 2)
        for m in measurements()
    ]
    found = outcomes([*measurements(), *second], gpus(hosts=2))
    assert {m for o in found if o.outcome == "failed" for m in o.subject.members} == {4, 5, 6, 7}


@pytest.mark.parametrize("name", ["driver", "cuda", "nccl", "torch"])
def test_with_other_software_speed_is_unknown_and_that_is_said(name):
    found = outcomes(measurements(factor=0.5), gpus(), {**SOFTWARE, name: "0"})
    told = [o for o in found if o.case == "absolute speed"]
    assert [o.outcome for o in told] == ["unknown"] * 4
    assert f"recorded with other software: {name} {SOFTWARE[name]} there, 0 here" in told[0].seen
    assert not [o for o in found if o.outcome == "failed"]


def test_a_model_that_was_not_recorded_is_unknown_even_where_it_has_floors():
    h100 = [Gpu(n, 0, n, "NVIDIA H100 80GB HBM3", str(n), 80 << 30) for n in range(4)]
    made = [m for m in measurements() if m.quantity == "memory bandwidth"]
    told = [o for o in outcomes(made, h100, floors=None) if o.outcome == "unknown"]
    assert len(told) == 4 and "b.json has no NVIDIA H100" in told[0].seen
    told = [o for o in outcomes([replace(m, size=7) for m in made], gpus()) if o.outcome == "unknown"]
    assert len(told) == 4 and "does not list any of the measured quantities" in told[0].seen


# --- reading ---

DOCUMENT: Any = _document(measurements(), gpus())


def with_entry(**more: Any) -> dict[str, Any]:
    return {**DOCUMENT, "entries": [{**DOCUMENT["entries"][0], **more}]}


def with_measure(**more: Any) -> dict[str, Any]:
    return with_entry(measurements=[{**DOCUMENT["entries"][0]["measurements"][0], **more}])


@pytest.mark.parametrize(
    ("document", "error"),
    [
        ({}, r'b\.json: format is missing; give "mgpu-check baseline"'),
        ({"format": "x"}, r'b\.json: format is "x"; give'),
        ({"format": "mgpu-check baseline", "version": 2}, r"version is 2; give 1"),
        ({"format": "mgpu-check baseline", "version": 1},
         r"entries is missing; give a list\. `mgpu-check accept --record-baseline=FILE` writes"),
        (with_entry(name=""), r'entries\[0\]\.name is ""; give a text'),
        (with_measure(unit="GB/s"), r'measurements\[0\]\.unit is "GB/s"; give one of B/s, FLOP/s, s'),
        (with_measure(places={"0": None}), r"measurements\[0\]\.places\.0 is null; give a finite number above 0"),
    ],
)  # fmt: skip
def test_errors_name_file_key_value_and_what_is_valid(document, error):
    with pytest.raises(ValueError, match=error):
        FORM.decoded(document, "b.json")
