"""Annotations for GitHub: its format, and the line of the user's code that each is at."""

from __future__ import annotations

import re

import pytest

from mgpu_check.annotations import annotation, wanted
from tests.plugin.test_markdown import GPUS

TRAINING = """
    import torch
    import torch.distributed as dist

    def step(model, batch, rank):
        mine = batch[rank.index :: rank.size].to(rank.device)
        model.to(rank.device)(mine).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.MAX)  # wrong
"""
TESTS = """
    import pytest, torch
    from torch import nn
    from mgpu_check import assert_step_scales
    from training import step

    def test_step(ranks):
        build, batch = lambda: nn.Linear(3, 1), lambda n: torch.randn(n, 3)
        assert_step_scales(ranks, step, build=build, batch=batch, max_examples=2)

    @pytest.mark.ranks(2)
    def test_rank(rank):
        assert rank.index < 2
        assert rank.index == 0, "100%, or\\nless"

    def test_without_ranks():
        assert False
"""


def read(text: str) -> tuple[dict[str, str], str]:
    """Read a command as the runner of GitHub does; return its properties and the message."""
    match = re.fullmatch(r"::error (.*?)::(.*)", text)
    assert match is not None, text
    fields = dict(field.split("=", 1) for field in match[1].split(","))

    def plain(value: str) -> str:
        return re.sub(r"%([0-9A-F]{2})", lambda code: chr(int(code[1], 16)), value)

    return {name: plain(value) for name, value in fields.items()}, plain(match[2])


def test_the_format(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = {"GITHUB_WORKSPACE": str(tmp_path)}
    text = annotation("a: b, c", "100 %\nof it", "src/train.py:40", here)
    assert text == "::error file=src/train.py,line=40,title=a%3A b%2C c::100 %25%0Aof it"
    assert read(text) == ({"file": "src/train.py", "line": "40", "title": "a: b, c"}, "100 %\nof it")
    assert read(annotation("a", "b", f"{tmp_path}/train.py:4", here))[0]["file"] == "train.py"
    assert read(annotation("a", "b", "/elsewhere/train.py:4", here))[0] == {"title": "a"}
    assert read(annotation("a", "b", "", here))[0] == {"title": "a"}
    assert read(annotation("a", "b", "..train/a.py:4", here))[0]["file"] == "..train/a.py"


def test_where_they_are_written():
    cases = ((None, "true", True), (None, "", False), ("none", "true", False), ("github", "", True))
    for choice, there, written in cases:
        assert wanted(choice, {"GITHUB_ACTIONS": there}) is written


@pytest.mark.slow
def test_each_failure_is_at_the_line_that_it_is_about(run, pytester, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    pytester.makepyfile(training=TRAINING, test_it=TESTS)
    result = run(*GPUS, "-n1")  # as reports of another process
    result.assert_outcomes(failed=3)
    found = [read(line) for line in result.outlines if line.startswith("::")]
    assert len(found) == 2  # the test without ranks has none
    (step, about), (rank, message) = sorted(found, key=lambda one: one[0]["file"], reverse=True)
    assert (step["file"], step["line"]) == ("training.py", "8")
    assert step["title"].startswith("wrong-reduction: ")
    assert "ScalingMismatch: step does not scale" in about and " -m pytest --gpus=2" in about
    assert (rank["file"], rank["line"], rank["title"]) == ("test_it.py", "13", "test_it.py::test_rank")
    assert "rank 1 of 2 raised AssertionError" in message


def test_a_run_from_another_directory_that_stops_early(run, pytester, monkeypatch):
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    pytester.makeini("[pytest]")
    tests = pytester.mkdir("tests")
    body = "import pytest\n@pytest.fixture\ndef broken(ranks): 1 / 0\ndef test_a(broken): pass\ndef test_b(): pass"
    (tests / "test_it.py").write_text(body)
    monkeypatch.setenv("GITHUB_WORKSPACE", str(pytester.path))
    monkeypatch.chdir(tests)
    result = run(*GPUS, "-x", "--gpu-annotations=github")
    (line,) = [line for line in result.outlines if line.startswith("::")]
    assert read(line)[0]["file"] == "tests/test_it.py"
