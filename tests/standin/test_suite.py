"""The packaged suite, on real devices whose kernels compute nothing: what fails there fails for numbers only.

The other properties are not here: nearly every check of theirs computes, and would fail.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.standin.conftest import Machine

FEWER = """
from hypothesis import Phase, settings


def pytest_collection_modifyitems(items):
    for item in items:
        made = getattr(item.function, "_hypothesis_internal_use_settings", None)
        if made is not None:
            item.function._hypothesis_internal_use_settings = settings(
                made, max_examples=min(6, made.max_examples), phases=(Phase.explicit, Phase.generate)
            )
"""

FILES = ("fixtures", "scatter", "mismatch")
NUMBERS = ("allreduce", "gradients")
"""Nearly all that they check is numbers."""

LISTED = set(re.findall(r"^\| `(test_\w+)` \|", Path(__file__).with_name("README.md").read_text(), re.M))
"""The checks that need what kernels compute. Some examples do not, so a few of them may pass."""


@pytest.mark.parametrize("files", [FILES, pytest.param(NUMBERS, marks=pytest.mark.slow)], ids=["most", "numbers"])
def test_what_fails_in_the_packaged_suite_is_listed(
    machine: Machine, pytester: pytest.Pytester, files: tuple[str, ...]
) -> None:
    pytester.makepyfile(fewer=FEWER)
    # Two that are listed take as long as all others together.
    given = [
        "-p",
        "fewer",
        "--gpus=2",
        "--gpu-level=quick",
        "--hypothesis-seed=0",
        "--tb=line",
        "--junitxml=suite.xml",
        *("-k", "not resnet18"),
        *(f"test_{name}.py" for name in files),
    ]
    machine.has(2).command("mgpu_check", *given)
    cases = list(ElementTree.parse(pytester.path / "suite.xml").iter("testcase"))
    ran = {case.get("name", "") for case in cases}
    failed = {
        case.get("name", "") for case in cases if case.find("failure") is not None or case.find("error") is not None
    }
    assert failed - LISTED == set()
    assert len(failed) > len(LISTED & ran) // 2, "the list is of what fails"
    assert len(ran - LISTED) > (1 if files == NUMBERS else 10)
    assert {name for name in LISTED if "resnet18" in name}.isdisjoint(ran)
