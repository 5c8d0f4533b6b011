"""A function that ranks call by its name: it is imported there, and nowhere else."""

from __future__ import annotations

import sys

import pytest

NAMED = "mgpu_check.suite.collectives.groups"


def test_ranks_import_the_function_and_it_gets_its_rank(ranks, tmp_path, monkeypatch):
    tmp_path.joinpath("only_on_ranks.py").write_text(
        "def last(a, rank, *, b=0):\n    return a, rank.index, b\n"
        "def given(rank, a):\n    return rank, a\n"
        "def keyword(*, rank):\n    return rank.index\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert ranks.run("only_on_ranks:last", 5, b=7, size=2) == [(5, 0, 7), (5, 1, 7)]
    assert [rank.index for rank, a in ranks.run("only_on_ranks:given", 1, size=3)] == [0, 1, 2]
    assert ranks.run("only_on_ranks:given", rank="mine", a=2, size=1) == [("mine", 2)]
    assert ranks.run("only_on_ranks:keyword", size=2) == [0, 1]
    assert "only_on_ranks" not in sys.modules


def test_an_error_in_it_is_an_error_of_its_rank(ranks):
    with pytest.raises(Exception, match="no attribute 'missing'"):
        ranks.run(f"{NAMED}:missing", size=1)


@pytest.mark.parametrize("text", ["module", "module.function", "a b:c", ""])
def test_a_text_that_names_no_function_is_refused(ranks, text):
    with pytest.raises(ValueError, match=rf"fn='{text}' is no function; give a function, or its name such as"):
        ranks.run(text)
