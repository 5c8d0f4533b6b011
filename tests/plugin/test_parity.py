"""Pytest reports the same of a test on ranks as of one in its own process: results, threads, finalizers, fixtures by
name."""

from __future__ import annotations

import pytest

GPUS = ("--gpus=2", "--simulate", "--rank-timeout=30")

TESTS = """
    import gc, os, threading
    import pytest
    from hypothesis import given, settings, strategies as st

    class Broken:
        def __del__(self):
            raise ValueError("of a finalizer")

    def broken_thread():
        thread = threading.Thread(target=lambda: [][1], name="mine")
        thread.start()
        thread.join()

    @pytest.mark.ranks(2)
    def test_returns(rank):
        return rank.index == 7

    @pytest.mark.ranks(2)
    @settings(max_examples=2)
    @given(n=st.integers())
    def test_returns_of_examples(rank, n):
        return n == n

    @pytest.mark.ranks(2)
    def test_thread(rank):
        broken_thread()

    def test_thread_in_run(ranks):
        ranks.run(broken_thread)

    @pytest.mark.ranks(2)
    def test_finalizer(rank):
        Broken()

    @pytest.mark.ranks(2)
    def test_finalizer_of_a_cycle(rank):
        one = Broken()
        one.itself = one

    def test_in_the_node_process(gpus):
        broken_thread()

    @pytest.mark.ranks(2)
    def test_thread_beside_a_failure(rank):
        broken_thread()
        assert rank.index == 5

    @pytest.mark.ranks(2)
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_ignored(rank):
        broken_thread()

    @pytest.mark.ranks(2)
    def test_innocent(rank):
        gc.collect()
"""


BY_NAME = """
    import os
    import pytest

    def leave(rank):
        os.environ["LEFT"] = "1"
        print("printed by", rank.index)

    def look():
        return "LEFT" in os.environ

    @pytest.fixture(scope="module")
    def teardown(request):
        yield
        assert request.getfixturevalue("ranks").run(look) == [False, False]
        request.getfixturevalue("ranks").run(leave)

    def test_by_name(request, teardown):
        request.getfixturevalue("ranks").run(leave)

    def test_next(ranks):
        assert ranks.run(look) == [False, False]

    def test_fails(request):
        def fail(rank):
            assert os.getpid() == 1, "seen"
        request.getfixturevalue("ranks").run(leave)
        request.getfixturevalue("ranks").run(fail)

    def test_last(ranks):
        assert ranks.run(look) == [False, False]
"""
"""Ranks that are asked for by name make a test as any other."""


def test_results_threads_and_finalizers_are_told_as_warnings_and_ranks_by_name_are_ranks(run, pytester):
    pytester.makepyfile(test_it=TESTS, test_named=BY_NAME)
    result = run(*GPUS)
    result.assert_outcomes(passed=11, failed=3)
    for line in (
        "*PytestReturnNotNoneWarning: Test functions should return None, but *::test_returns returned <class 'bool'>.",
        "*Tests run under @given should return None, but test_returns_of_examples returned True instead.*",
        "*.py:*: PytestUnhandledThreadExceptionWarning: Exception in thread mine",
        "*.py:*: PytestUnraisableExceptionWarning: Exception ignored in: <function Broken.__del__ at *>",
        "*::test_finalizer_of_a_cycle",
        "*::test_thread_beside_a_failure",
        "*ranks 0-1 of 2 raised AssertionError: seen*",
        "*Captured stdout of rank 1 of 2 call*",
    ):
        result.stdout.fnmatch_lines([line])
    assert "::test_ignored" not in result.stdout.str()
    assert "::test_innocent" not in result.stdout.str()


@pytest.mark.slow
def test_they_are_red_where_warnings_are_errors(run, pytester):
    pytester.makepyfile(TESTS)
    result = run(*GPUS, "-W", "error")
    result.assert_outcomes(passed=3, failed=7, errors=2)
    for line in (
        "FAILED *::test_returns - *",
        "FAILED *::test_thread - *",
        "FAILED *::test_thread_in_run - *",
        "FAILED *::test_finalizer - *",
        "FAILED *::test_in_the_node_process*",
        "ERROR *::test_finalizer_of_a_cycle*",
        "ERROR *::test_thread_beside_a_failure*",
    ):
        result.stdout.fnmatch_lines([line])
    for warning, place in (
        ("PytestUnhandledThreadException", "IndexError"),
        ("PytestUnraisableException", "ValueError"),
    ):
        result.stdout.fnmatch_lines([f"ranks 0-1 of 2 raised {warning}Warning: Exception *: {place}: *"])
