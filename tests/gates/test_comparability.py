"""Trained parameters that were compared with one device in some case, or in none."""

from __future__ import annotations

import types
from typing import Any

import pytest

from mgpu_check.diagnosis.observations import Expected, ObservedRun, Relations
from mgpu_check.errors import NotCompared
from mgpu_check.gates.comparison.coverage import ParameterCoverage
from mgpu_check.gates.search.scenarios import Scenario

WHY = "it is divided"


def coverage(*cases):
    """Return the coverage of cases: their world size, the parameters compared, and those not."""
    program: Any = types.SimpleNamespace(gate="assert_step_scales")
    found = ParameterCoverage(program, "step")
    for size, compared, missed in cases:
        expected = Expected(ObservedRun(trained={*compared, *missed}), None)
        found.add(Scenario(size, 4), expected, Relations(unjudged=dict.fromkeys(missed, WHY)))
    return found


@pytest.mark.parametrize(
    ("cases", "unjudged"),
    [
        ([], {}),
        ([(2, "a", "b"), (2, "ab", "")], {}),  # in another case
        ([(2, "ab", ""), (2, "a", "b")], {}),
        ([(2, "a", "b"), (4, "", "ab")], {"[ab]": "frozen"}),  # accepted
    ],
)
def test_parameters_that_were_compared_or_need_not_be(cases, unjudged):
    coverage(*cases).finish(unjudged)


@pytest.mark.parametrize(
    ("cases", "unjudged", "names", "lines"),
    [
        ([(2, "a", "b"), (4, "ab", "")], {}, ["b"], ["1 of 2 trained parameters were not", f"size 2: b: {WHY}"]),
        ([(2, "a", "b"), (4, "", "ab")], {"b": "frozen"}, ["a"], ["1 of 2 trained", f"at world size 4: a: {WHY}"]),
    ],
    ids=["elsewhere", "another than is accepted"],
)
def test_parameters_that_were_compared_in_no_case_are_named(cases, unjudged, names, lines):
    with pytest.raises(NotCompared) as caught:
        coverage(*cases).finish(unjudged)
    assert list(caught.value.names) == names
    assert all(line in str(caught.value) for line in lines), str(caught.value)
    assert str(caught.value).count("at world size") == len(lines) - 1
    assert str(caught.value).endswith('accept it with unjudged={"pattern": "reason"}')


def test_a_pattern_that_hides_nothing_is_refused():
    with pytest.raises(ValueError, match="unjudged has 'a', which matches no parameter that was not compared"):
        coverage((2, "a", "b")).finish({"a": "frozen", "b": "frozen"})
