"""Files for machines beside the full report: the short JSON, and a textfile for Prometheus."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mgpu_check.acceptance.findings import judged, listed
from mgpu_check.acceptance.report import page, summary
from mgpu_check.acceptance.report.files import brief, read, write
from mgpu_check.acceptance.report.page import health_of
from mgpu_check.acceptance.run_report import RunReport
from mgpu_check.devices.observations import Observation, Subject
from tests.acceptance import run_reports


def judged_report(report: RunReport) -> RunReport:
    """The report with findings, as a run gives it."""
    observations = tuple(judged(one, {}) for one in report.observations)
    return replace(report, observations=observations, findings=tuple(listed(observations)))


# JSON


@pytest.mark.parametrize("name", run_reports.ALL)
def test_a_short_report_counts_what_went_right_and_keeps_what_went_wrong(name: str) -> None:
    whole = judged_report(run_reports.ALL[name]())
    short = brief(whole)
    assert summary.tallies(short) == summary.tallies(whole)
    assert listed(short.observations) == listed(whole.observations)
    for one, other in zip(short.verdict.accusations, whole.verdict.accusations, strict=True):
        assert summary.evidence_of(short, one) == summary.evidence_of(whole, other)
    assert summary.failed_of(short, short.verdict) == summary.failed_of(whole, whole.verdict)
    for subject in {entry.subject for entry in whole.observations}:
        work = [sum((e.work.operations for e in r.observations if e.subject == subject), 0) for r in (short, whole)]
        assert work[0] == work[1]
    assert brief(short).observations == short.observations


def test_many_failures_are_eight_and_one_that_stands_for_the_rest() -> None:
    good = run_reports.good(2)
    many = tuple(Observation("compute", Subject("gpu", (1,)), "failed", f"wrong {n}", f"case {n}") for n in range(100))
    accused = replace(run_reports.bad().verdict.accusations[0], observations=tuple(range(100)), shared=(3, 98))
    whole = replace(good, observations=many, verdict=replace(good.verdict, accusations=(accused,)))
    short = brief(whole)
    assert [(entry.seen, entry.times) for entry in short.observations][7:] == [("wrong 7", 1), ("wrong 8", 92)]
    assert short.observations[8].case == "92 cases, such as: case 8"
    (found,) = short.verdict.accusations
    assert found.observations == tuple(range(9)) and found.shared == (3, 8)


def test_samples_are_thinned_and_those_with_low_clocks_and_grown_counters_stay() -> None:
    whole = run_reports.bad()
    short = brief(whole)
    for gpu in range(8):
        some, every = ([sample for sample in one.samples if sample.gpu == gpu] for one in (short, whole))
        assert len(some) <= 100 < len(every) and some[-1].values == every[-1].values
        names = [{name for name, _, _ in health_of(samples)} for samples in (some, every)]
        assert names[0] == names[1]
    rows = [health_of([sample for sample in one.samples if sample.gpu == 3]) for one in (short, whole)]
    grown = [[row for row in some if "sent again" in row[0]] for some in rows]
    assert grown[0] == grown[1] != []


# Prometheus

SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\})? (-?[0-9.e+-]+|NaN)')


@pytest.mark.parametrize("name", run_reports.ALL)
def test_each_line_is_a_comment_or_a_sample_of_a_metric_that_was_described(name: str) -> None:
    described, seen = set(), set()
    for line in summary.to_prometheus(judged_report(run_reports.ALL[name]())).splitlines():
        if line.startswith("# HELP "):
            assert re.fullmatch(r"# HELP mgpu_check_[a-z_]+ .+\.", line)
        elif line.startswith("# TYPE "):
            described.add(line.split()[2])
            assert line.endswith(" gauge")
        else:
            found = SAMPLE.fullmatch(line)
            assert found and found[1] in described, line
            assert (found[1], found[2]) not in seen, line  # no metric twice with the same labels
            seen.add((found[1], found[2]))
    assert len(described) >= 8


def test_the_textfile_of_a_bad_node(tmp_path: Path) -> None:
    bad = judged_report(run_reports.bad())
    write(tmp_path / "node.prom", bad)
    text = (tmp_path / "node.prom").read_text()
    assert 'mgpu_check_verdict{host="node-a",verdict="REJECTED"} 1\n' in text
    assert 'mgpu_check_verdict{host="node-a",verdict="ACCEPTED"} 0\n' in text
    assert "mgpu_check_exit_code 1\n" in text and "mgpu_check_simulated 0\n" in text
    assert re.search(r'mgpu_check_gpu_accused\{gpu="3",.*serial="165302400003".*\} 1\n', text)
    assert re.search(r'mgpu_check_gpu_accused\{gpu="2",.*\} 0\n', text)
    assert (
        'mgpu_check_finding{id="MGPU-COMPUTE-DATA",severity="replace",action="replace-gpu",ruling="reject",'
        'subject="GPU 3"} 4\n'
    ) in text
    assert 'mgpu_check_observations{check="links",outcome="failed"} 2\n' in text


def test_labels_are_escaped() -> None:
    report = run_reports.one_gpu()
    odd = replace(report, gpus=(replace(report.gpus[0], name='a"b\\c\nd'),))
    assert 'model="a\\"b\\\\c\\nd"' in summary.to_prometheus(odd)


def test_the_short_report_is_as_the_schema_says(tmp_path: Path) -> None:
    write(tmp_path / "a.json", brief(judged_report(run_reports.bad())))
    assert json.loads((tmp_path / "a.json").read_text())["findings"][0]["id"].startswith("MGPU-")
    assert read(tmp_path / "a.json").findings


# Findings in reports for people


def test_pages_show_findings_warnings_and_the_policy() -> None:
    bad = judged_report(run_reports.bad())
    off = Observation("inventory", Subject("gpu", (2,)), "failed", "mode is <off>", evidence={"field": "persistence"})
    findings = (*bad.findings, *listed([judged(off, {})]))
    first, *others = bad.verdict.accusations
    first = replace(first, findings=("MGPU-COMPUTE-DATA",), severity="replace", action="replace-gpu")
    verdict = replace(bad.verdict, accusations=(first, *others))
    html = page.render(replace(bad, verdict=verdict, findings=findings, policy={"MGPU-XID-PAST": "reject"}))
    assert "MGPU-COMPUTE-DATA; severity replace, action replace-gpu" in html
    assert "MGPU-PERSISTENCE-MODE: GPU 2: mode is &lt;off&gt;; do: " in html
    assert "policy: MGPU-XID-PAST = reject" in html
