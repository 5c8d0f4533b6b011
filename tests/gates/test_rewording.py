"""Texts are for users: reworded at random, they change no verdict and no mistake that is named."""

from __future__ import annotations

import ast
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gates import rewording


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., pytest.RunResult]:
    """Run pytest where every Python process rewords what it imports."""
    top = Path(__file__).parents[2]
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed of the rewording: {seed}")
    pytester.makepyfile(
        sitecustomize=f"""
            import importlib.util, sys
            spec = importlib.util.spec_from_file_location("_rewording", {str(top / "tests/gates/rewording.py")!r})
            module = sys.modules["_rewording"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            module.install({seed})
        """
    )
    # Pytest's own import hook, which rewrites the assertions of plugins, comes before that by now.
    pytester.makeconftest(f"import _rewording\n_rewording.install({seed})\n")
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", f"{pytester.path}:{top}")
    return lambda *options: pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", *options)


@pytest.mark.slow
def test_no_verdict_and_no_mistake_depends_on_a_text(run, pytester):
    shutil.copy(Path(__file__).parent / "programs" / "reworded.py", pytester.path / "test_reworded.py")
    # The tests hold the expected result of each program.
    run("--gpus=4", "--simulate", "--rank-timeout=60", "--hypothesis-seed=0").assert_outcomes(passed=8)


PLANTED = """
import re

NAMED = re.compile(r"rank (\\d+) did not finish")

def message(rank): return f"rank {rank} did not finish all_reduce #{7} ({'train.py'}:{12})"
def by_form(text): return bool(re.search(r"(\\w+_\\w+) #\\d+ \\(([^)]*)\\)", text))
def by_regex(text): return bool(NAMED.search(text))
def by_words(text): return "did not finish" in text
def by_prefix(text): return text.removeprefix("rank ") != text
def by_data(rank): return rank == 1
"""


def test_who_reads_a_message_does_not_find_it_again():
    def found(tree: ast.Module) -> list[str]:
        names: dict[str, Callable[[object], bool]] = {}
        exec(compile(tree, "planted", "exec"), names)
        return [
            n for n, read in names.items() if n.startswith("by_") and read(1 if n == "by_data" else names["message"](1))
        ]

    assert found(ast.parse(PLANTED)) == ["by_form", "by_regex", "by_words", "by_prefix", "by_data"]
    assert found(rewording.reworded(PLANTED, seed=1)) == ["by_data"]
