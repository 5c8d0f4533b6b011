"""The report as JUnit XML: a test case for each check and subject.

An unknown outcome becomes an ``error``: JUnit has no other element for a test without a result.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from mgpu_check.acceptance.report import view
from mgpu_check.acceptance.report.text import lines
from mgpu_check.acceptance.report.values import encoded
from mgpu_check.acceptance.run_report import CheckRun, RunReport
from mgpu_check.devices.observations import Observation, Outcome, Subject
from mgpu_check.processes.rank_lists import grouped

_MOST = 200
"""Most observations to list for one subject."""
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(report: RunReport) -> str:
    by_case = grouped(((entry.check, entry.subject), entry) for entry in report.observations)
    cases = [_case(report, check, subject, entries) for (check, subject), entries in by_case]
    heard = {entry.check for entry in report.observations}
    for run in view.checks_by_name(report):
        if run.outcome == "unknown" or run.name not in heard:
            cases.append(_of_check(run))
    counts = view.Tally.of(_OUTCOMES[next((part.tag for part in case if part.tag in _OUTCOMES), "")] for case in cases)
    totals = {
        "tests": str(len(cases)),
        "failures": str(counts.failed),
        "errors": str(counts.unknown),
        "skipped": str(counts.skipped),
        "time": f"{report.seconds:.3f}",
    }
    root = ET.Element("testsuites", totals)
    suite = ET.SubElement(root, "testsuite", {"name": "mgpu-check accept", **totals, "timestamp": report.started})
    hosts = ",".join(view.host_name(report, host.number) for host in report.hosts)
    if hosts:
        suite.set("hostname", _text(hosts))
    suite.append(_properties(report))
    suite.extend(cases)
    told = ET.SubElement(suite, "system-out")
    told.text = _text("\n".join(lines(report)))
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


_TAGS: dict[Outcome, str] = {"failed": "failure", "unknown": "error", "skipped": "skipped", "passed": ""}
_OUTCOMES = {tag: outcome for outcome, tag in _TAGS.items()}


def _properties(report: RunReport) -> ET.Element:
    verdict = report.verdict
    properties = {
        "verdict": verdict.kind,
        "level": report.level,
        "simulated": report.simulated or "",
        "planted": "\n".join(report.planted),
        "accused": "\n".join(view.name_of(report, accusation.part) for accusation in verdict.accusations),
        "repeat": view.repeat(report),
        "findings": "\n".join(dict.fromkeys(one.id for one in report.findings if one.ruling == "reject")),
        "warnings": "\n".join(view.warning_text(report, one) for one in view.warnings(report)),
        **{f"verdict of {view.host_name(report, number)}": one.kind for number, one in report.verdicts.items()},
        **{f"GPU {gpu.number}": view.describe_gpu(report, gpu) for gpu in report.gpus},
    }
    element = ET.Element("properties")
    for name, value in properties.items():
        ET.SubElement(element, "property", {"name": _text(f"mgpu_check.{name}"), "value": _text(value)})
    return element


def _case(report: RunReport, check: str, subject: Subject, entries: Sequence[Observation]) -> ET.Element:
    seconds = sum(entry.work.seconds for entry in entries)
    case = _element(check, view.name_of(report, subject), seconds)
    tally = view.Tally.of(entry.outcome for entry in entries for _ in range(entry.times))
    telling = [entry for entry in entries if entry.outcome == tally.outcome != "passed"]
    if tag := _TAGS[tally.outcome]:
        kind = telling[0].finding or tally.outcome
        reason = ET.SubElement(case, tag, {"message": _text(telling[0].seen), "type": kind})
        reason.text = _text("\n".join(_told(entry) for entry in telling[:_MOST]))
    known = [view.describe_gpu(report, gpu) for gpu in report.gpus if gpu.number in view.gpus_of(report, subject)]
    told = [str(tally), *known, *(_told(entry) for entry in entries[:_MOST])]
    told += [f"… and {len(entries) - _MOST} more"] if len(entries) > _MOST else []
    ET.SubElement(case, "system-out").text = _text("\n".join(told))
    return case


def _of_check(run: CheckRun) -> ET.Element:
    """Return a test case for a whole check that did too little work or has no observations."""
    case = _element(run.name, "all", run.seconds)
    if tag := _TAGS[run.outcome]:
        ET.SubElement(case, tag, {"message": _text(run.why), "type": run.outcome})
    return case


def _element(check: str, name: str, seconds: float) -> ET.Element:
    names = {"classname": f"mgpu_check.acceptance.{check}", "name": name, "time": f"{seconds:.3f}"}
    return ET.Element("testcase", {key: _text(value) for key, value in names.items()})


def _told(entry: Observation) -> str:
    parts = [entry.outcome, entry.case, entry.seen, f"did {view.work_text(entry.work)}"]
    parts += [json.dumps(encoded(entry.evidence))] if entry.evidence else []
    return ": ".join(filter(None, parts))


def _text(words: str) -> str:
    """Replace characters that XML does not allow by escapes."""
    return _ILLEGAL.sub(lambda match: f"\\x{ord(match[0]):02x}", words)
