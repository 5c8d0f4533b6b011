"""The closing table shows the values that the checks of the packaged suite got, why one was skipped, and what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from mgpu_check.errors import RankFailure, RankHang, StartupFailure
from mgpu_check.plugin import execution
from mgpu_check.plugin.report import properties
from mgpu_check.plugin.report.drawn import Drawn
from mgpu_check.plugin.report.table import print_to, row_of
from mgpu_check.suite.allreduce.cases import Contributions
from mgpu_check.suite.common.tensors import TensorSpec


@dataclass(frozen=True)
class Case:
    dtype: str
    shapes: tuple[TensorSpec, ...] = ()


def test_words_and_numbers_are_collected_by_the_names_of_fields():
    drawn = Drawn()
    for number, dtype in enumerate(("float32", "float64", "int64", "uint8")):
        spec = TensorSpec((number, 1024), dtype, seed=number)
        drawn.add({"size": number + 1, "data": Contributions(spec), "view": number > 1, "rate": 0.5})
    assert str(drawn) == (
        "dtype float32 float64 int64 (4), layout contiguous, values distinct, operation sum, view no yes, size 1 to 4, "
        "elements 0 to 3,072, rate 0.5"
    )


def test_cases_in_a_list_count_each():
    drawn = Drawn()
    drawn.add({"cases": [Case("bool", (TensorSpec((2, 3)), TensorSpec(()))), Case("int8")]})
    assert str(drawn) == "dtype bool float32 int8, layout contiguous, values distinct, elements 1 to 6"


def test_a_check_that_draws_the_same_again_and_again_is_seen():
    drawn = Drawn()
    for number in range(10):
        drawn.add({"count": number % 2})
    assert str(drawn) == "count 0 to 1, only 2 different"


def test_what_a_check_goes_through_itself_counts_as_no_example():
    drawn = Drawn()
    drawn.note({"dtype": ["int8", "int8"]})
    assert str(drawn) == "dtype int8"


def test_a_run_tells_what_was_drawn_and_a_skipped_check_has_drawn_nothing(run, pytester):
    result = run(
        *("-v", "--gpus=1", "--simulate", "--gpu-level=quick", "--junitxml=out.xml", "--pyargs", "mgpu_check.suite"),
        *(
            "-k",
            "test_memories_are_separate or test_all_reduce_of_views_on_the_cpu or test_tutorial_shapes or (collectives "
            "and test_copies_of_every_dtype)",
        ),
    )
    text = result.stdout.str()
    assert re.search(r"drawn: dtype (\w+ )*float32.* elements \d+ to ", text, re.DOTALL)
    (skipped,) = (line for line in text.splitlines() if " skipped " in line and "allreduce" in line)
    assert " 0  -  " in skipped
    assert re.search(r"drawn: function .*dtype [a-z0-9 ]+\(\d+\), op SUM", text, re.DOTALL), (
        "what a check enumerates itself"
    )
    assert re.search(r'name="mgpu_check.drawn" value="dtype (\w+ )*float32', (pytester.path / "out.xml").read_text())


def test_a_file_that_cannot_be_imported_has_no_row():
    assert row_of(pytest.CollectReport("test_x.py", "failed", None, None)) is None


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


@pytest.mark.parametrize(
    ("module", "error", "simulated", "advice"),
    [
        (
            "mgpu_check.suite.scatter.test_scatter",
            RankFailure("wrong"),
            False,
            "or a GPU or link; to find a faulty part",
        ),
        ("mgpu_check.suite.scatter.test_scatter", RankHang("late"), False, ""),
        (
            "mgpu_check.suite.scatter.test_scatter",
            RankFailure("wrong"),
            True,
            "or the machine below the simulated GPUs",
        ),
        (
            "mgpu_check.suite.scatter.test_scatter",
            ExceptionGroup("two", [RankFailure("a"), RankFailure("b")]),
            False,
            "run",
        ),
        ("mgpu_check.suite.scatter.test_scatter", StartupFailure("no memory"), False, ""),
        ("mgpu_check.suite.scatter.test_scatter", ExceptionGroup("two", [StartupFailure("no memory")]), False, ""),
        ("mgpu_check.acceptance.memory.test_memory", RankFailure("wrong"), False, ""),
        ("mgpu_check.suite.scatter.test_scatter", None, False, ""),
        ("test_of_a_user", RankFailure("wrong"), False, ""),
    ],
)
def test_a_failed_check_of_the_suite_advises_an_acceptance(module, error, simulated, advice):
    item: Any = SimpleNamespace(module=SimpleNamespace(__name__=module), user_properties=[])
    properties.add_failure(item, error, [], simulated)
    text = dict(item.user_properties).get("mgpu_check.advice", "")
    assert advice in text and bool(text) == bool(advice)
    assert not text or text.endswith("run mgpu-check accept")


def test_an_advice_ends_the_closing_table_once():
    found = [("mgpu_check.property", "scatter"), ("mgpu_check.advice", "a failed check shows this")]
    failed = [
        pytest.TestReport(name, ("file", 1, name), {}, "failed", None, "call", user_properties=found) for name in "ab"
    ]
    lines: list[str] = []
    terminal: Any = SimpleNamespace(
        stats={"failed": failed},
        section=lambda *_, **__: None,
        line=lambda text, **_: lines.append(text),
        write=lambda *_, **__: None,
        config=SimpleNamespace(invocation_params=SimpleNamespace(args=()), get_verbosity=lambda: 0),
        _tw=SimpleNamespace(fullwidth=80),
    )
    print_to(terminal, "quick")
    assert lines[-1] == "mgpu-check: a failed check shows this"
    assert sum("a failed check" in line for line in lines) == 1
