"""Write annotations for GitHub: a line of output that GitHub Actions shows at a line of a pull request.

The format is that of GitHub's workflow commands:
https://docs.github.com/actions/reference/workflows-and-actions/workflow-commands
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def wanted(choice: str | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether to write annotations.

    Args:
        choice: "github" or "none"; None for "github" in a workflow of GitHub.
    """
    return choice == "github" or (choice is None and environment.get("GITHUB_ACTIONS") == "true")


def annotation(title: str, message: str, site: str = "", environment: Mapping[str, str] = os.environ) -> str:
    """Return the workflow command for an error.

    Args:
        site: a line of a file, "src/train.py:40"; "" for an annotation of the whole run.
    """
    place = line_of(site, environment)
    fields = {"title": title}
    if place is not None and not os.path.isabs(place[0]):  # a file outside of the repository has no line to show
        fields = {"file": place[0], "line": str(place[1]), **fields}
    told = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in fields.items())
    return f"::error {told}::{_escaped(message)}"


def line_of(site: str, environment: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Return a file and its line: the path in the repository, or the absolute path of a file outside of it.

    Args:
        site: "src/train.py:40"; else the line is unknown: None.
    """
    file, _, line = site.rpartition(":")
    if not file or not line.isdecimal():
        return None
    file = os.path.abspath(file)
    path = os.path.relpath(file, os.path.abspath(environment.get("GITHUB_WORKSPACE", os.getcwd())))
    return (file if path.split(os.sep)[0] == os.pardir else path), int(line)


def _escaped(text: str, more: str = "") -> str:
    for character in "%\r\n" + more:
        text = text.replace(character, f"%{ord(character):02X}")
    return text
