"""The action for workflows of GitHub and the hook for pre-commit: their commands, run as users' machines run them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
DEFAULTS = {name: str(one["default"]) for name, one in ACTION["inputs"].items()}
STEPS: dict[str, Any] = {step["name"]: step for step in ACTION["runs"]["steps"]}

TEST = """
import pytest

@pytest.mark.ranks(2)
def test_rank(rank):
    assert rank.index == 0
"""


def run(
    name: str, directory: Path, inputs: dict[str, str], outputs: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a step, and add its outputs to `outputs`."""

    def filled(text: str) -> str:
        text = re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda match: inputs[match[1]], text)
        return re.sub(r"\$\{\{ steps\.test\.outputs\.(\w+) \}\}", lambda match: outputs[match[1]], text)

    step = STEPS[name]
    environment = {name: filled(value) for name, value in step["env"].items()}
    files = {name: str(directory / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=directory,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "RUNNER_TEMP": str(directory),
            "GITHUB_ACTIONS": "true",
            "GITHUB_WORKSPACE": str(directory),
            **files,
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    if Path(files["GITHUB_OUTPUT"]).exists():
        for line in Path(files["GITHUB_OUTPUT"]).read_text().splitlines():
            key, _, value = line.partition("=")
            outputs[key] = value
    return done


def test_no_input_is_part_of_a_script():
    for step in STEPS.values():
        assert "${{" not in step["run"]  # whoever gives an input could run code


@pytest.mark.slow
def test_a_failure_is_annotated_and_in_the_summary(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(TEST)
    outputs: dict[str, str] = {}
    done = run("Test", tmp_path, {**DEFAULTS, "gpus": "2", "options": "-q -p no:cacheprovider"}, outputs)
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("::error ")]
    assert line.startswith("::error file=tests/test_it.py,line=6,title=")
    assert Path(outputs["junit"]).read_text().startswith("<?xml")
    assert run("Summary", tmp_path, DEFAULTS, outputs).returncode == 0
    assert (tmp_path / "GITHUB_STEP_SUMMARY").read_text().startswith("# mgpu-check: FAILED on 2 SIMULATED GPUs")


@pytest.mark.parametrize(
    ("inputs", "command"),
    [
        ({"paths": ""}, "mgpu-check --gpus=4 --gpu-level=quick --strict-gpus"),
        ({"simulate": "", "gpus": "all", "paths": "a b"}, "mgpu-check pytest --gpus=all"),
    ],
    ids=["suite", "real"],
)
def test_the_command(tmp_path, monkeypatch, inputs, command):
    program = tmp_path / "bin" / "mgpu-check"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho mgpu-check "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    said = run("Test", tmp_path, DEFAULTS | inputs, {}).stdout
    assert said.startswith(command)
    assert ("--simulate=cpu" in said) == ("simulate" not in inputs)
    assert said.rstrip().endswith(" a b") == (inputs["paths"] == "a b")


@pytest.mark.slow
def test_the_hook_selects_gates(tmp_path):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gate: runs before each commit\n")
    (tmp_path / "test_it.py").write_text("import pytest\n\n@pytest.mark.gate\ndef test_a(): ...\n\ndef test_b(): ...\n")
    program, *words = shlex.split(hook["entry"])
    command = [str(Path(sys.executable).with_name(program)), *words, "--collect-only", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert "test_it.py::test_a" in done.stdout and "test_b" not in done.stdout
