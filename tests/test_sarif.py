"""Problems in SARIF: the fields that its schema demands, rules, places, and files without a verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

from mgpu_check.cli.comparing import conclude
from mgpu_check.compare.comparison import ComparisonPlan, ScriptComparison
from mgpu_check.compare.verdict import ComparisonVerdict, Kind
from mgpu_check.diagnosis.report import Finding, Report
from mgpu_check.sarif import Problem, document

FIELDS = {
    "log": "version runs|$schema",
    "runs": "tool|invocations results",
    "tool": "driver|",
    "driver": "name|version informationUri rules",
    "rules": "id|shortDescription help helpUri",
    "results": "message|ruleId ruleIndex level locations",
    "invocations": "executionSuccessful|toolExecutionNotifications",
    "toolExecutionNotifications": "message|level",
    "locations": "|physicalLocation",
    "physicalLocation": "artifactLocation|region",
    "artifactLocation": "uri|uriBaseId",
    "region": "startLine|",
    **dict.fromkeys(["message", "shortDescription", "help"], "text|"),
}
"""The fields of each object that SARIF 2.1.0 demands, and others of its schema that these files use."""


def check_fields(name: str, value: object) -> None:
    if isinstance(value, list):
        for part in value:
            check_fields(name, part)
    elif isinstance(value, dict):
        demanded, allowed = (set(names.split()) for names in FIELDS[name].split("|"))
        assert demanded <= value.keys() <= demanded | allowed, name
        for field, part in value.items():
            check_fields(field, part)


def read(text: str) -> dict[str, Any]:
    """Check a file, and return its run."""
    found = json.loads(text)
    check_fields("log", found)
    assert found["version"] == "2.1.0"
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
