"""Problems in SARIF: the fields that its schema demands, rules, places, and files without a verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import jsonschema

from mgpu_check.cli.comparing import conclude
from mgpu_check.compare.comparison import ComparisonPlan, ScriptComparison
from mgpu_check.compare.verdict import ComparisonVerdict, Kind
from mgpu_check.diagnosis.report import Finding, Report
from mgpu_check.sarif import Problem, document

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
PLACE = {
    "type": "object",
    "properties": {
        "artifactLocation": {
            "type": "object",
            "properties": {"uri": {"type": "string", "format": "uri-reference"}, "uriBaseId": {"type": "string"}},
            "required": ["uri"],
            "additionalProperties": False,
        },
        "region": {"type": "object", "properties": {"startLine": {"type": "integer", "minimum": 1}}},
    },
    "required": ["artifactLocation"],
    "additionalProperties": False,
}
RULE = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "shortDescription": TEXT,
        "help": TEXT,
        "helpUri": {"type": "string", "format": "uri"},
    },
    "required": ["id"],
    "additionalProperties": False,
}
DRIVER = {
    "type": "object",
    "properties": {"name": {}, "version": {}, "informationUri": {"format": "uri"}, "rules": {"items": RULE}},
    "required": ["name"],
    "additionalProperties": False,
}
RESULT = {
    "type": "object",
    "properties": {
        "ruleId": {"type": "string"},
        "ruleIndex": {"type": "integer", "minimum": 0},
        "level": {"enum": ["none", "note", "warning", "error"]},
        "message": TEXT,
        "locations": {"items": {"properties": {"physicalLocation": PLACE}, "additionalProperties": False}},
    },
    "required": ["message"],
    "additionalProperties": False,
}
NOTE = {"type": "object", "properties": {"level": {}, "message": TEXT}, "required": ["message"]}
INVOCATION = {
    "type": "object",
    "properties": {"executionSuccessful": {"type": "boolean"}, "toolExecutionNotifications": {"items": NOTE}},
    "required": ["executionSuccessful"],
    "additionalProperties": False,
}
RUN = {
    "type": "object",
    "properties": {
        "tool": {"type": "object", "properties": {"driver": DRIVER}, "required": ["driver"]},
        "invocations": {"type": "array", "items": INVOCATION},
        "results": {"type": "array", "items": RESULT},
    },
    "required": ["tool"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {"$schema": {"format": "uri"}, "version": {"const": "2.1.0"}, "runs": {"items": RUN}},
    "required": ["version", "runs"],
    "additionalProperties": False,
}
"""The part of the schema of SARIF 2.1.0 that these files use: what it demands, and the names of all their fields."""


def read(text: str) -> dict[str, Any]:
    """Check a file, and return its run."""
    found = json.loads(text)
    jsonschema.validate(found, SCHEMA)
    (run,) = found["runs"]
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
    return dict(run)


def test_problems_have_rules_and_places(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mistake = ("mean-of-means", "a title", "off by 2", "average once", "https://example.org/mean-of-means.md")
    problems = [
        Problem(*mistake, site="src/a b.py:40"),
        Problem("failed-test", "another title", "wrong", level="warning"),
        Problem(*mistake, site="/elsewhere/train.py:7"),
    ]
    run = read(document(problems, environment={}))
    assert run["invocations"] == [{"executionSuccessful": True}]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == ["mean-of-means", "failed-test"]
    assert rules[0]["help"] == {"text": "average once"} and rules[0]["helpUri"].endswith("/mean-of-means.md")
    first, second, third = run["results"]
    assert first["locations"] == [
        {
            "physicalLocation": {
                "artifactLocation": {"uri": "src/a%20b.py", "uriBaseId": "%SRCROOT%"},
                "region": {"startLine": 40},
            }
        }
    ]
    assert (first["level"], second["level"], "locations" in second) == ("error", "warning", False)
    assert third["locations"][0]["physicalLocation"]["artifactLocation"] == {"uri": "file:///elsewhere/train.py"}


def test_a_file_without_a_verdict_is_not_successful():
    run = read(document([], "the run was killed"))
    assert run["invocations"] == [
        {
            "executionSuccessful": False,
            "toolExecutionNotifications": [{"level": "error", "message": {"text": "the run was killed"}}],
        }
    ]


def concluded(tmp_path: Path, verdict: ComparisonVerdict) -> dict[str, Any]:
    """Return the run in the file of `mgpu-check compare --sarif`."""
    plan = ComparisonPlan(["python", "train.py", "--epochs=2"], "train.py --epochs=2", 2, {}, {}, "", 300.0, None)
    done = ScriptComparison(plan)
    done.verdict = verdict
    conclude(done, json=None, sarif=tmp_path / "out.sarif")
    return read((tmp_path / "out.sarif").read_text())


def lines_of(run: dict[str, Any]) -> list[tuple[str, str, int]]:
    places = [(result["ruleId"], result["locations"][0]["physicalLocation"]) for result in run["results"]]
    return [(rule, place["artifactLocation"]["uri"], place["region"]["startLine"]) for rule, place in places]


def test_a_comparison_has_a_result_for_each_likely_mistake(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    findings = [Finding("mean-of-means", "an average", site="loss.py:12"), Finding("world-size-factor", "2 times")]
    run = concluded(tmp_path, ComparisonVerdict("differs", Report("differs: step 1", findings=findings)))
    assert lines_of(run) == [("mean-of-means", "loss.py", 12), ("world-size-factor", "train.py", 1)]
    assert [result["level"] for result in run["results"]] == ["error", "warning"]
    assert run["results"][0]["message"]["text"] == "differs: step 1\nlooks like mean-of-means: an average"
    assert run["invocations"] == [{"executionSuccessful": True}]


def test_each_verdict_but_equal_has_a_result(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = {}
    for kind in get_args(Kind):
        run = concluded(tmp_path, ComparisonVerdict(kind, Report(f"{kind}: why")))
        seen[kind] = lines_of(run), run["invocations"][0]["executionSuccessful"]
    assert seen == {
        "equal": ([], True),
        "differs": ([("results-differ", "train.py", 1)], True),
        "not comparable": ([("not-compared", "train.py", 1)], False),
        "undecided": ([("not-compared", "train.py", 1)], False),
    }
