"""The image has what it copies, what its commands name, and what the manifests call."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from mgpu_check.cli.accept import _OWN, _OWN_SWITCHES
from mgpu_check.cli.suite import misuse

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture
def steps() -> list[tuple[str, str]]:
    lines = (ROOT / "deploy" / "Containerfile").read_text().replace("\\\n", " ").splitlines()
    words = (line.partition(" ") for line in lines if line and not line.startswith("#"))
    return [(step, rest.strip()) for step, _, rest in words]


def test_each_step_is_known_and_in_its_order(steps: list[tuple[str, str]]) -> None:
    names = [step for step, _ in steps]
    assert names[0] == "FROM" and names[-2:] == ["ENTRYPOINT", "CMD"]
    assert set(names) <= {"FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}
    assert max(place for place, name in enumerate(names) if name == "RUN") < names.index("USER")
    (user,) = (rest for step, rest in steps if step == "USER")
    assert all(int(number) for number in user.split(":")), "runAsNonRoot of Kubernetes needs a number above 0"


def test_the_base_has_a_python_that_the_package_supports(steps: list[tuple[str, str]]) -> None:
    (version,) = re.findall(r"python:(3\.\d+)-slim$", steps[0][1])
    assert f"Programming Language :: Python :: {version}" in PROJECT["project"]["classifiers"]


def test_all_that_the_build_of_the_package_reads_is_copied(steps: list[tuple[str, str]]) -> None:
    copied = [word for step, rest in steps if step == "COPY" for word in shlex.split(rest)[:-1]]
    assert [word for word in copied if not (ROOT / word).exists()] == []
    hatch = PROJECT["tool"]["hatch"]
    read = ["pyproject.toml", *PROJECT["project"]["license-files"], hatch["version"]["path"]]
    read += [one["path"] for one in hatch["metadata"]["hooks"]["fancy-pypi-readme"]["fragments"]]
    read += hatch["build"]["targets"]["wheel"]["packages"]
    assert [
        path for path in read if not any(fnmatch(path, word) or path.startswith(f"{word}/") for word in copied)
    ] == []
    (extra,) = (found for step, rest in steps if step == "RUN" for found in re.findall(r"'/src\[(\w+)\]'", rest))
    assert extra in PROJECT["project"]["optional-dependencies"]


def test_manifests_call_what_the_image_has(steps: list[tuple[str, str]]) -> None:
    entry, default = (json.loads(rest) for _, rest in steps[-2:])
    assert entry[0] in PROJECT["project"]["scripts"]
    calls = [shlex.join([*entry, *default])]
    for path in sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            pod: dict[str, Any] = document.get("spec", {}).get("template", {}).get("spec", {})
            for one in [*pod.get("initContainers", []), *pod.get("containers", [])]:
                if one["image"] == "IMAGE":
                    calls += one["args"][0].splitlines() if "command" in one else [shlex.join([*entry, *one["args"]])]
    programs = [rest.split()[-1] for step, rest in steps if step == "COPY"]
    for call in calls:
        words = shlex.split(call.removeprefix("exec "))
        if words[0] == "python3":
            assert words[1] in programs
        else:
            assert words[:2] == [*entry, "accept"] and misuse(words[2:], _OWN, _OWN_SWITCHES) is None
    assert len(calls) == 4
