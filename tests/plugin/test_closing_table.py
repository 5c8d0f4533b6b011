"""The closing table of the packaged suite: why a check was skipped, and what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from mgpu_check.errors import RankFailure, RankHang, StartupFailure
from mgpu_check.plugin import execution
from mgpu_check.plugin.report import outcomes


@pytest.mark.slow
def test_a_skipped_check_has_no_examples(run):
    result = run(
        *("-v", "--gpus=1", "--simulate", "--gpu-level=quick", "--pyargs", "mgpu_check.suite"),
        *("-k", "test_memories_are_separate or test_all_reduce_of_views_on_the_cpu"),
    )
    (skipped,) = (line for line in result.outlines if " skipped " in line and "allreduce" in line)
    assert " 0  -  " in skipped
    assert "2 checks of 2 properties" in result.stdout.str()  # also under plain pytest


def test_examples_of_a_packaged_check_are_no_copies_of_each_other():
    def different() -> int:
        """Draw large numbers a hundred times; how many have come first in an example."""
        firsts: list[int] = []

        @seed(1)
        @settings(max_examples=100, database=None, phases=[Phase.generate])
        @given(numbers=st.lists(st.integers(2**32, 2**40), min_size=6, max_size=6))
        def draw(numbers: list[int]) -> None:
            firsts.append(numbers[0])

        draw()
        return len(set(firsts))

    with execution._each_example_for_itself():
        assert different() > 80
    assert different() < 50, "Hypothesis does not copy examples any more"


SCATTER = "mgpu_check.suite.scatter.test_scatter"


@pytest.mark.parametrize(
    ("module", "error", "simulated", "advice"),
    [
        (SCATTER, RankFailure("wrong"), False, "or a GPU or link; to find a faulty part"),
        (SCATTER, RankHang("late"), False, ""),
        (SCATTER, RankFailure("wrong"), True, "or the machine below the simulated GPUs"),
        (SCATTER, ExceptionGroup("two", [RankFailure("a"), RankFailure("b")]), False, "run"),
        (SCATTER, ExceptionGroup("two", [StartupFailure("no memory")]), False, ""),
        ("mgpu_check.acceptance.memory.test_memory", RankFailure("wrong"), False, ""),
        (SCATTER, None, False, ""),
        ("test_of_a_user", RankFailure("wrong"), False, ""),
    ],
)
def test_a_failed_check_of_the_suite_advises_an_acceptance(module, error, simulated, advice):
    item: Any = SimpleNamespace(module=SimpleNamespace(__name__=module), user_properties=[])
    outcomes.add_failure(item, error, [], simulated)
    text = dict(item.user_properties).get("mgpu_check.advice", "")
    assert advice in text and bool(text) == bool(advice)
    assert not text or text.endswith("run mgpu-check accept")


LEAVES_OUT = """
    import pytest
    from mgpu_check.asserts.known_defects import left_out

    @pytest.mark.ranks(2)
    def test_ranks(rank):
        left_out(f"case {rank.index}", "no such device")
        left_out("another", "no such device")

    def test_node(gpus):
        left_out("a stage", "torch refuses it")
"""


@pytest.mark.slow
def test_cases_that_a_check_leaves_out_are_named(run, pytester):
    pytester.makepyfile(LEAVES_OUT)
    pytester.makeconftest(
        """
        def pytest_collection_modifyitems(items):
            for item in items:
                item.user_properties.append(("mgpu_check.property", item.name))
                item.user_properties.append(("mgpu_check.check", "this check"))
        """
    )
    text = run("--gpus=2", "--simulate").stdout.str()
    assert text.count("passed: this check") == 2
    assert "- left out: case 0, another, case 1: no such device" in text
    assert "- left out: a stage: torch refuses it" in text
