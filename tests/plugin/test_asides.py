"""Messages of ranks besides results: warnings and notes for Hypothesis arrive where those of other tests do."""

from __future__ import annotations

import inspect
import re

import pytest
from torch.distributed import _functional_collectives as functional

GPUS = ("--gpus=2", "--simulate", "--rank-timeout=30")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [(), ("-n1",)], ids=["one process", "xdist"])
def test_warnings_of_ranks_reach_the_summary_once(run, pytester, parallel):
    pytester.makepyfile(
        test_it="""
        import warnings
        import pytest
        from hypothesis import given, settings, strategies as st

        class OwnWarning(UserWarning):
            pass

        @pytest.mark.ranks(2)
        @settings(max_examples=20)
        @given(n=st.integers())
        def test_same_on_all(rank, n):
            warnings.warn("said by all")

        @pytest.mark.ranks(2)
        def test_each_its_own(rank):
            warnings.warn(f"said by {rank.index}", OwnWarning)
            class Local(DeprecationWarning):
                pass
            warnings.warn("of a class that only the rank has", Local)

        @pytest.mark.ranks(2)
        @pytest.mark.filterwarnings("ignore:not wanted")
        def test_ignored(rank):
            warnings.warn("not wanted")

        def test_expected(ranks):
            with pytest.warns(OwnWarning, match="expected"):
                ranks.run(lambda: warnings.warn("expected", OwnWarning))

        def test_before_a_failure(gpus):
            warnings.warn("said before the failure")
            assert False

        @pytest.mark.ranks(2)
        def test_of_torch_in_a_collective(rank):
            import torch, torch.distributed as dist, torch.distributed._functional_collectives as functional
            functional.all_gather_tensor(torch.ones(1, 1), 1, dist.group.WORLD).sum()

        @pytest.mark.ranks(1)
        def test_many(rank):
            for n in range(1100):
                warnings.warn(f"number {n}")
        """
    )
    result = run(*GPUS, *parallel)
    from_torch = "FutureWarning" in inspect.getsource(functional.all_gather_tensor)  # before 2.13 there is none
    result.assert_outcomes(passed=6, failed=1, warnings=5 + from_torch + 1000)
    result.stdout.fnmatch_lines(
        [
            "test_it.py::test_same_on_all",
            "  */test_it.py:12: UserWarning: said by all",
            "    warnings.warn(*said by all*)",
        ]
    )
    for line in (
        "  */test_it.py:16: OwnWarning: said by 0",
        "  */test_it.py:16: OwnWarning: said by 1",
        "  */test_it.py:19: DeprecationWarning: Local: of a class that only the rank has",
        "  */test_it.py:31: UserWarning: said before the failure",
        *(["  */test_it.py:37: FutureWarning: *all_gather_tensor*"] if from_torch else []),
    ):
        result.stdout.fnmatch_lines([line])
    result.stdout.no_fnmatch_line("*not wanted*")


@pytest.mark.slow
def test_notes_events_and_targets_of_ranks_reach_hypothesis(run, pytester):
    pytester.makepyfile(
        """
        import pytest
        from hypothesis import Phase, assume, event, given, note, settings, strategies as st, target

        @pytest.mark.ranks(2)
        @settings(database=None)
        @given(n=st.integers(0, 100))
        def test_notes(rank, n):
            note(f"n is {n}")
            if rank.index == 1:
                note("only here")
            assert n < 50

        @settings(database=None)
        @given(n=st.integers(0, 100))
        def test_in_parent(ranks, n):
            def body(rank):
                note(f"rank {rank.index} had {n}")
            ranks.run(body)
            assert n < 50

        @pytest.mark.ranks(2)
        @settings(max_examples=30)
        @given(n=st.integers(0, 100))
        def test_events(rank, n):
            assume(n != 7)
            event("even" if n % 2 == 0 else "odd")
            target(n + rank.index, label="size")

        @pytest.mark.ranks(2)
        @settings(database=None)
        @given(n=st.integers(0, 100))
        def test_a_body_that_imports_hypothesis_itself(rank, n):
            import hypothesis
            hypothesis.note(f"imported at {n}")
            assert n < 60

        @pytest.mark.ranks(2)
        def test_outside_of_a_property(rank):
            note("to whom?")
        """
    )
    result = run(*GPUS, "--hypothesis-show-statistics", "-W", "error")
    result.assert_outcomes(passed=1, failed=4)
    result.stdout.fnmatch_lines(["rank 0: n is 50", "rank 1: n is 50", "rank 1: only here"])
    result.stdout.fnmatch_lines(["*rank 0 had 50", "*rank 1 had 50"])
    result.stdout.fnmatch_lines(["imported at 60"])
    result.stdout.fnmatch_lines(["ranks 0-1 of 2 raised InvalidArgument: Cannot make notes outside of a test"])
    assert re.search(r"\d+\.\d+%, odd", result.stdout.str())
    assert re.search(r"\d+\.\d+%, even", result.stdout.str())
    assert "Highest target score: 101" in result.stdout.str()
