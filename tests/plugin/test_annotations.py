"""Annotations for GitHub: its format, and the line of the user's code that each is at."""

from __future__ import annotations

import re

from mgpu_check.annotations import annotation, wanted
from tests.plugin.test_markdown import GPUS


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
