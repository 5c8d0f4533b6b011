"""Write annotations for GitHub: a line of output that GitHub Actions shows at a line of a pull request.

The format is that of GitHub's workflow commands:
https://docs.github.com/actions/reference/workflows-and-actions/workflow-commands
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def wanted(choice: str | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether to write annotations. `choice`: "github" or "none"; None for "github" in a workflow of GitHub."""
    return choice == "github" or (choice is None and environment.get("GITHUB_ACTIONS") == "true")


def annotation(title: str, message: str, site: str = "", environment: Mapping[str, str] = os.environ) -> str:
    """Return the workflow command for an error.

    `site`: a line of a file, "src/train.py:40"; "" for an annotation of the whole run.
    """
    fields = {**_place(site, environment), "title": title}
    attributes = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in fields.items())
    return f"::error {attributes}::{_escaped(message)}"


def _place(site: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of a line: its file in the repository and its number; none if it is unknown, or elsewhere."""
    file, _, line = site.rpartition(":")
    if not file or not line.isdecimal():
        return {}
    repository = os.path.abspath(environment.get("GITHUB_WORKSPACE", os.getcwd()))
    path = os.path.relpath(os.path.abspath(file), repository)
    return {} if path.split(os.sep)[0] == os.pardir else {"file": path, "line": line}


def _escaped(text: str, reserved: str = "") -> str:
    for character in "%\r\n" + reserved:
        text = text.replace(character, f"%{ord(character):02X}")
    return text
