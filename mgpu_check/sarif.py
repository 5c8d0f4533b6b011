"""Write problems in SARIF 2.1.0, the format of code scanning: https://docs.oasis-open.org/sarif/sarif/v2.1.0/."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from mgpu_check.annotations import line_of
from mgpu_check.version import __version__

_HOME = "https://github.com/mgpu-check/mgpu-check"
_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


@dataclass(frozen=True)
class Problem:
    """A problem at a line of the user's code.

    Attributes:
        rule: the class of problems that it belongs to, such as the name of a mistake.
        title: describes the rule, in one clause.
        advice: what to do; "" if the message says so.
        page: address of the page of the rule; "" for none.
        site: a line of a file, "src/train.py:40"; "" for none.
    """

    rule: str
    title: str
    message: str
    advice: str = ""
    page: str = ""
    site: str = ""
    level: Literal["error", "warning"] = "error"


def document(problems: Iterable[Problem], incomplete: str = "", environment: Mapping[str, str] = os.environ) -> str:
    """Return the text of a SARIF file.

    Args:
        incomplete: why there is no verdict, so that a file without problems does not look like success; "" if there is
            one.
    """
    problems = list(problems)
    rules = {problem.rule: _rule(problem) for problem in problems}
    invocation: dict[str, Any] = {"executionSuccessful": not incomplete}
    if incomplete:
        invocation["toolExecutionNotifications"] = [{"level": "error", "message": {"text": incomplete}}]
    driver = {"name": "mgpu-check", "version": __version__, "informationUri": _HOME, "rules": list(rules.values())}
    run = {
        "tool": {"driver": driver},
        "invocations": [invocation],
        "results": [_result(problem, list(rules).index(problem.rule), environment) for problem in problems],
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _rule(problem: Problem) -> dict[str, Any]:
    rule: dict[str, Any] = {"id": problem.rule, "shortDescription": {"text": problem.title}}
    if problem.advice:
        rule["help"] = {"text": problem.advice}
    if problem.page:
        rule["helpUri"] = problem.page
    return rule


def _result(problem: Problem, index: int, environment: Mapping[str, str]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": problem.rule,
        "ruleIndex": index,
        "level": problem.level,
        "message": {"text": problem.message},
    }
    if (place := line_of(problem.site, environment)) is not None:
        path, line = place
        # An absolute path is outside of the repository.
        uri = {"uri": Path(path).as_uri()} if os.path.isabs(path) else {"uri": quote(path), "uriBaseId": "%SRCROOT%"}
        result["locations"] = [{"physicalLocation": {"artifactLocation": uri, "region": {"startLine": line}}}]
    return result
