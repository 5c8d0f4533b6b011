"""Known defects of others: what meets one is KNOWN, what it does not explain fails, and one that does not show is
told."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from typing import Any

import pytest

from mgpu_check.asserts import known_defects
from mgpu_check.asserts.known_defects import KNOWN_DEFECTS, Met, is_known, known_defect, reported_to

NAME = "gloo-views-with-gaps"
STRIKES: dict[str, Any] = {"contiguous": False, "size": 2}


def wrong(message="wrong"):
    raise AssertionError(message)


def test_each_has_a_link_and_checks_that_name_it():
    for name, defect in KNOWN_DEFECTS.items():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
        assert defect.link.startswith("https://")
        assert defect.summary
        assert not defect.summary.endswith(".")
        assert defect.shown_by
        for check in defect.shown_by:
            file, _, test = check.partition("::")
            name = file.removesuffix(".py")
            module = importlib.import_module(f"mgpu_check.suite.{name.removeprefix('test_')}.{name}")
            assert callable(getattr(module, test))


def test_what_a_known_defect_explains_is_reported_and_goes_on():
    met: list[Met] = []
    with reported_to(met.append):
        with known_defect(NAME, **STRIKES):
            wrong()
        with known_defect(NAME, **STRIKES):
            pass
        assert is_known(NAME, failed=True, **STRIKES)
    assert met == [Met(NAME, True), Met(NAME, False), Met(NAME, True)]


@pytest.mark.parametrize(
    ("facts", "error"),
    [
        ({"contiguous": True, "size": 2}, AssertionError),
        ({"contiguous": False, "size": 1}, AssertionError),
        (STRIKES, RuntimeError),
    ],
    ids=["no gaps", "one rank", "another kind of error"],
)
def test_what_it_does_not_explain_fails(facts, error):
    met: list[Met] = []
    with reported_to(met.append), pytest.raises(error), known_defect(NAME, **facts):
        raise error
    assert met == []


def test_a_result_that_the_defect_would_not_have_given_fails():
    met: list[Met] = []
    with (
        reported_to(met.append),
        pytest.raises(AssertionError, match="the sum"),
        known_defect(NAME, explained=lambda: wrong("neither"), **STRIKES),
    ):
        wrong("the sum")
    assert met == []


def test_outside_of_a_run_nothing_is_known():
    with pytest.raises(AssertionError), known_defect(NAME, **STRIKES):
        wrong()


def test_an_unknown_one_is_refused():
    with pytest.raises(ValueError, match=f"'such' is unknown; choose one of {NAME}"), known_defect("such"):
        pass


@pytest.mark.parametrize(
    ("since", "fixed", "has"),
    [("", "", True), ("2.13", "", True), ("2.13.1", "", False), ("", "2.13", False), ("2.2", "2.14", True)],
)
def test_a_defect_is_in_some_versions_of_torch(since, fixed, has):
    assert replace(KNOWN_DEFECTS[NAME], since=since, fixed=fixed).is_in("2.13.0+cpu") is has


def test_another_version_of_torch_knows_nothing(monkeypatch):
    mended = replace(KNOWN_DEFECTS[NAME], fixed="2.0")
    monkeypatch.setitem(known_defects.KNOWN_DEFECTS, NAME, mended)
    with reported_to(lambda met: None):
        assert not is_known(NAME, failed=True, **STRIKES)


@pytest.mark.slow
def test_a_run_counts_what_is_known_apart(run, pytester):
    pytester.makepyfile(
        f"""
        from hypothesis import given, settings, strategies as st
        from mgpu_check.asserts.known_defects import known_defect

        def on_a_rank(rank, size, fails):
            with known_defect({NAME!r}, contiguous=False, size=size):
                assert not (fails and rank.index), "wrong"

        def test_shows(ranks):
            ranks.run(on_a_rank, 2, True)

        @settings(max_examples=5)
        @given(fails=st.booleans())
        def test_shows_in_some_examples(ranks, fails):
            ranks.run(on_a_rank, 2, fails)

        def test_shows_in_one_process(gpus):
            with known_defect({NAME!r}, contiguous=False, size=2):
                assert False

        def test_shows_here(ranks):
            with known_defect({NAME!r}, contiguous=False, size=2):
                ranks.run(lambda: 1 / 0 if False else exec("assert False"))

        def test_not_explained(ranks):
            ranks.run(on_a_rank, 1, True)

        def test_does_not_show(ranks):
            ranks.run(on_a_rank, 2, False)
        """
    )
    result = run("--gpus=2", "--simulate", "-rk", "--junitxml=out.xml")
    text = result.stdout.str()
    assert "1 failed, 1 passed" in text
    assert "4 KNOWN" in text
    assert "test_not_explained" in text
    assert "did not show" not in text  # elsewhere it did
    xml = (pytester.path / "out.xml").read_text()
    assert xml.count(f'name="mgpu_check.known_defects" value="{NAME}"') == 4
    assert xml.count(f'name="mgpu_check.known_defects_unseen" value="{NAME}"') == 1
    alone = run("--gpus=2", "--simulate", "-k", "test_does_not_show").stdout.str()
    assert f"the known defect {NAME} did not occur with torch" in alone
