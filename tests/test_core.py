"""The core works without its applications: a copy of the package that has none of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mgpu_check
from mgpu_check.applications import applications

PACKAGE = Path(mgpu_check.__file__).parent
HERE = Path(__file__).parent
COMMANDS = ("accept", "compare", "init", "init_arguments", "record", "run_options", "selftest", "suite")
"""Modules of `mgpu_check.cli` that run an application, or work for those that do."""

TESTS = """
import torch
from torch import nn
from mgpu_check import assert_step_scales


def step(model, batch, rank):
    model = nn.parallel.DistributedDataParallel(model)
    inputs, targets = batch
    nn.functional.mse_loss(model(inputs), targets, reduction="sum").div(DIVISOR).backward()


def test_step(ranks):
    assert_step_scales(
        ranks,
        build=lambda: nn.Linear(4, 2),
        batch=lambda n: (torch.randn(n, 4), torch.randn(n, 2)),
        step=step,
        sizes=[4],
        world_sizes=[2],
        max_examples=1,
    )


def test_options(pytestconfig):
    assert hasattr(pytestconfig.option, "gpus")
    assert not [name for name in vars(pytestconfig.option) if name.startswith("accept_")]
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """The environment of a copy of the package that has no application, and none of their commands."""
    directory = tmp_path_factory.mktemp("core")
    names = [*applications(), *(f"{name}.py" for name in COMMANDS)]
    shutil.copytree(
        PACKAGE,
        directory / "mgpu_check",
        ignore=lambda folder, entries: {
            name for name in names if name in entries and (Path(folder).name == "cli" or not name.endswith(".py"))
        },
    )
    return {**os.environ, "PYTHONPATH": str(directory)}


def run(environment, directory, *arguments):
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=directory, stdout=subprocess.PIPE, text=True
    )


def test_the_core_names_no_application():
    named = re.compile(rf"mgpu_check[./]({'|'.join(applications())}|cli)\b")
    above = {*applications(), "cli", "__init__.py", "__main__.py"}  # the last two are what the whole package shows
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in above]
    wrong = [str(path.relative_to(PACKAGE)) for path in files if named.search(path.read_text())]
    assert len(files) > 150 and wrong == []


def test_a_gate_without_applications(core, tmp_path):
    for name, divisor in (("right", "len(inputs) * rank.size"), ("wrong", "len(inputs)")):
        (tmp_path / f"test_{name}.py").write_text(TESTS.replace("DIVISOR", divisor))
    result = run(core, tmp_path, "-m", "pytest", "--gpus=2", "--simulate", "-p", "no:cacheprovider")
    assert "1 failed, 3 passed, 2 SIMULATED GPUs" in result.stdout, result.stdout


@pytest.mark.slow
def test_the_tests_of_the_core_pass(core, tmp_path):
    folders = ("engine", "numerics", "torch_hooks")
    shutil.copytree(HERE, tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pytest.ini"):
        shutil.copy(HERE.parent / name, tmp_path)
    of_applications = "not test_what_a_killed_comparison_has_left and not test_an_error_in_it_is_an_error"
    result = run(core, tmp_path, "-m", "pytest", "-q", "-k", of_applications, *(f"tests/{name}" for name in folders))
    assert result.returncode == 0, result.stdout
