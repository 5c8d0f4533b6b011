"""A report becomes files for people and machines, and the verdict on a terminal."""

from __future__ import annotations

import functools
import json
import re
import sys
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from mgpu_check.acceptance.plan import CHECKLIST
from mgpu_check.acceptance.report.files import SCHEMA, check_paths, clear, read, to_json, write
from mgpu_check.acceptance.report.files import schema as published
from mgpu_check.acceptance.report.summary import lines, rates
from mgpu_check.acceptance.run_report import CheckRun, Verdict
from mgpu_check.devices.observations import Measurement, Observation, Part, Subject, Work
from tests.acceptance import run_reports
from tests.acceptance.report_pages import report


@functools.cache
def schema() -> dict[str, Any]:
    return json.loads(SCHEMA.read_text())


@pytest.mark.parametrize("name", run_reports.ALL)
def test_json_follows_the_schema_and_is_read_back(name, tmp_path):
    write(tmp_path / "a.json", report(name))
    document = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    for row in ("observations", "measurements", "samples"):  # some of each are enough
        document[row] = document[row][:20] + document[row][-10:]
    jsonschema.Draft202012Validator(schema()).validate(document)
    back = read(tmp_path / "a.json")
    assert json.loads(to_json(back)) == json.loads(to_json(report(name)))
    for field in ("verdict", "gpus", "checks"):
        assert getattr(back, field) == getattr(report(name), field)


def test_the_published_schema_is_that_of_the_account():
    jsonschema.Draft202012Validator.check_schema(schema())
    assert published() == SCHEMA.read_text(), f"python -m {published.__module__} writes it"
    measurement, gpu = (schema()["$defs"][name] for name in ("Measurement", "Gpu"))
    assert measurement["description"] == "The speed of one subject."
    spread = measurement["properties"]["spread"]["description"]
    assert spread.startswith("median absolute deviation of the repeats from")
    assert gpu["properties"]["serial"]["description"] == gpu["properties"]["pci"]["description"] == "empty if unknown."


def test_numbers_that_are_not_finite_and_values_that_json_lacks_are_kept(tmp_path):
    speed = Measurement("links", Subject("upload", (0,)), "upload", "B/s", float("inf"), 1, 4, float("nan"))
    entry = Observation("memory", Subject("gpu", (0,)), "failed", evidence={"found": [float("-inf"), {1, 2}]})
    write(tmp_path / "a.json", replace(report("one GPU"), measurements=(speed,), observations=(entry,)))
    document = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    jsonschema.Draft202012Validator(schema()).validate(document)
    back = read(tmp_path / "a.json")
    assert back.measurements[0].value == float("inf") and back.measurements[0].spread != back.measurements[0].spread
    assert back.observations[0].evidence == {"found": ["-Infinity", "{1, 2}"]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("", "is not JSON"),
        ("[]", "the whole is []; give an object. `mgpu-check accept --report=FILE.json` writes such a file"),
        ('{"format": "mgpu-check comparison"}', 'format is "mgpu-check comparison"; give "mgpu-check acceptance"'),
        ({"version": 2}, "version is 2; give 1, which this version of mgpu-check reads"),
        ({"version": None}, "version is null; give 1"),
        ({"seconds": "long"}, 'seconds is "long"; give a number'),
        ({"seconds": True}, "seconds is true; give a number"),
        ({"level": "slow"}, 'level is "slow"; give one of glance, quick, standard, long'),
        ({"gpus": {}}, "gpus is {}; give a list"),
        ({"gpus": [{"number": 0}]}, "gpus[0].host is missing; give an integer"),
        ({"verdict": {"kind": "MAYBE"}}, 'verdict.kind is "MAYBE"; give one of ACCEPTED, REJECTED, INCONCLUSIVE'),
        ({"verdicts": {"one": {"kind": "ACCEPTED"}}}, "; give an object whose names are numbers"),
        ({"verdicts": {"1": {"kind": "ACCEPTED", "unknown": [3]}}}, "verdicts.1.unknown[0] is 3; give a text"),
        ({"seed": "x"}, 'seed is "x"; give an integer or null'),
    ],
)
def test_a_file_that_is_no_such_report_is_refused_by_the_field(change, words, tmp_path):
    path = tmp_path / "a.json"
    text = change
    if isinstance(change, dict):
        text = json.dumps({**json.loads(to_json(report("inconclusive"))), **change})
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{re.escape(words)}"):
        read(path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("report.txt", r"does not end in \.html, \.json or \.prom; choose one of them"),
        ("no/such/report.json", "there is no directory .*/no/such for report.json"),
        (
            "/proc/self/report.json",
            r"/proc/self/report\.json cannot be written: .*; choose a directory that you may write to",
        ),
        ("directory.json", r"is a directory; give the name of a file in it, such as .*directory\.json/report\.html"),
    ],
)
def test_a_name_that_is_no_report_is_refused_before_a_run(name, words, tmp_path):
    (tmp_path / "directory.json").mkdir()
    check_paths([tmp_path / "right.json", str(tmp_path / "right.PROM")])
    with pytest.raises(ValueError, match=words):
        check_paths([tmp_path / "right.json", tmp_path / name])
    assert [path.name for path in tmp_path.iterdir()] == ["directory.json"]


def test_reports_of_earlier_runs_are_removed_before_a_run(tmp_path):
    write(tmp_path / "a.prom", report("one GPU"))
    clear([tmp_path / "a.prom", str(tmp_path / "never.json")])
    assert list(tmp_path.iterdir()) == []


def test_a_page_without_the_extra_is_refused_before_a_run(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    check_paths([tmp_path / "a.json", tmp_path / "a.prom"])
    for path in (tmp_path / "a.html", "a.html"):
        with pytest.raises(ValueError, match=r"a\.html needs jinja2, .*pip install 'mgpu-check\[report\]'"):
            check_paths([path])
    with pytest.raises(ValueError, match="needs jinja2"):
        write(tmp_path / "a.html", report("one GPU"))
    for suffix in ("json", "prom"):
        write(tmp_path / f"a.{suffix}", report("one GPU"))


# The terminal


def test_the_terminal_says_the_verdict_first_and_all_that_finds_the_part():
    said = lines(report("bad"))
    assert said[0] == "REJECTED: GPU 3, link GPU 0 -> GPU 5; 1 failure that no part explains"
    text = "\n".join(said)
    gpu = report("bad").gpus[3]
    assert f"cuda:3 of node-a; {gpu.name}; UUID {gpu.uuid}; serial {gpu.serial}; PCI {gpu.pci}" in text
    assert "  seen: compute: GPU 3: 96 of 1048576 elements are wrong" in text
    assert "  second look: follows the device: on ranks 0, 4 and 7 too" in text
    assert "  do: drain the node, reset this GPU" in text
    assert "  look again: mgpu-check accept --gpus=8 -k 'compute or training' --hypothesis-seed=7" in text
    assert "failures that no part explains:\n  collectives: group of GPUs 0, 1" in text
    assert "could not be checked:\n  health: GPU 6: the device does not know ECC counters" in text
    assert re.search(r"compute +failed +60 s +8 +3 +1 +0 +40 operations", text)  # each outcome by itself
    assert "checks: 2 passed, 5 failed, 0 skipped, 1 unknown" in text
    assert said[-1] == "repeat: mgpu-check accept --gpus=8 --hypothesis-seed=7"
    assert "SIMULATED" not in text


def test_sets_of_parts_that_explain_failures_alike_are_listed_and_not_named(tmp_path):
    sets = tuple(tuple(Part("gpu", (number,)) for number in pair) for pair in ((0, 2), (1, 3)))
    bad = report("bad")
    unsure = replace(bad, verdict=replace(bad.verdict, accusations=(), rivals=(sets,)))
    said = lines(unsure)
    assert said[0] == "REJECTED: 1 failure that several sets of parts explain equally well"
    assert "  none is named of GPU 0 and GPU 2; or GPU 1 and GPU 3" in said
    page, document = tmp_path / "report.html", tmp_path / "report.json"
    write(page, unsure)
    write(document, unsure)
    assert "none is named of GPU 0 and GPU 2; or GPU 1 and GPU 3" in page.read_text()
    assert read(document).verdict.rivals == (sets,)


def test_the_terminal_says_what_is_simulated_and_of_which_host():
    said = lines(report("two hosts"))
    assert said[0] == "REJECTED on 8 SIMULATED cpu GPUs: GPU 6 (cuda:2 of node-b)"
    assert said[1:5] == [
        "  SIMULATED: this shows what the checks do, not the state of any hardware",
        "  planted: memory-stuck-bit:device=6,address=1048577,bit=5",
        "  node-a: ACCEPTED",
        "  node-b: REJECTED",
    ]
    assert said[-1].endswith("--simulate --hypothesis-seed=3")  # which the command has already


def test_the_headline():
    assert {name: lines(report(name))[0] for name in ("good", "one GPU", "inconclusive")} == {
        "good": "ACCEPTED: 8 GPUs passed 8 checks",
        "one GPU": "ACCEPTED: 1 GPU passed 8 checks",
        "inconclusive": "INCONCLUSIVE: compute: GPU 1: 3 operations of 40; only compute, memory ran",
    }


def test_a_run_in_which_nothing_was_seen_is_reported(tmp_path):
    empty = replace(
        report("one GPU"),
        verdict=Verdict("INCONCLUSIVE", unknown=("no check ran",)),
        verdicts={}, hosts=(), gpus=(), checks=(), observations=(), measurements=(), samples=(),
    )  # fmt: skip
    for suffix in ("html", "json", "prom"):
        write(tmp_path / f"a.{suffix}", empty)
    assert read(tmp_path / "a.json") == empty
    assert lines(empty)[0] == "INCONCLUSIVE: no check ran" and "no check ran" in (tmp_path / "a.html").read_text()


def test_the_rarest_fault_that_is_found_follows_from_the_work():
    """With n independent operations, 1 in N is missed with probability (1 - 1/N)^n."""
    good = report("good")

    def told(**operations):
        runs = tuple(
            CheckRun(name, 0.0, 1.0, "failed" if count < 0 else "passed", Work(), Work(operations=abs(count)))
            for name, count in operations.items()
        )
        return rates(replace(good, checks=runs))

    assert told(links=30, memory=500) == (
        "faults as rare as 1 in 10 copies on a link are found with a probability of 95 %"
    )
    assert "1 in 13352 results of a GPU, 1 in 7 steps of training are" in told(compute=40_000, training=20)
    for name, check in CHECKLIST.items():
        assert bool(told(**{name: 300})) == bool(check.counts)
        assert told(**{name: -300}) == told(**{name: 1}) == "", "failures are shown otherwise"
    (number,) = re.findall(r"1 in (\d+)", told(compute=1000))
    assert (1 - 1 / int(number)) ** 1000 <= 0.05 < (1 - 1 / (int(number) + 1)) ** 1000
    run = CheckRun("compute", 0.0, 1.0, "passed", Work(), Work(operations=1000))
    assert told(compute=1000) in "\n".join(lines(replace(good, checks=(run,))))
