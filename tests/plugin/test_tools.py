"""Other tools of pytest users: debuggers, orders and selections, timeouts, coverage, captured output."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.plugin.conftest import MARK, InBackground, processes_with, wait_for

GPUS = ("--gpus=2", "--simulate", "--rank-timeout=30")


@pytest.fixture
def typed(in_background: InBackground) -> Callable[..., str]:
    """The output of a run of pytest with `words` on its standard input."""

    def typed(words: str, *arguments: str) -> str:
        run = in_background(*GPUS, *arguments, typed=words)
        run.process.wait(120)
        return run.output

    return typed


def test_pdb_opens_where_there_is_something_to_see(typed, pytester):
    pytester.makepyfile(
        test_it="""
        import pytest
        from hypothesis import given, strategies as st

        @pytest.mark.ranks(2)
        def test_on_ranks(rank):
            mine = "LOCAL OF A RANK"
            assert rank.index == 0

        @pytest.mark.ranks(2)
        @given(n=st.integers(0, 100))
        def test_two_bugs(rank, n):
            assert n < 90
            if n > 10:
                raise ValueError

        def test_node(gpus):
            mine = "LOCAL OF THE NODE"
            assert not gpus

        def test_calls_ranks(ranks):
            mine = "LOCAL" + " OF THE CALLER"
            ranks.run(lambda: 1 / 0)

        def test_asserts_itself(ranks):
            mine = "LOCAL" + " OF THE ASSERTION"
            assert ranks.size == 3
        """
    )
    output = typed("p mine\nc\np mine\nc\n", "--pdb")
    assert output.count("entering PDB") == 2
    assert output.count("mgpu-check: no debugger for this test: it ran in other processes") == 3
    assert "'LOCAL OF THE CALLER'" in output
    assert "'LOCAL OF THE ASSERTION'" in output
    assert "rank 1 of 2 raised AssertionError" in output
    assert "5 failed" in output


def test_a_debugger_in_a_rank_is_refused_and_a_finding_shows_the_call_of_a_check_and_not_its_lines(run, pytester):
    """But an error of the check itself shows them."""
    pytester.makepyfile(
        test_it="""
        import pdb
        import pytest
        from mgpu_check.suite.fixtures.checks import assert_devices_are

        @pytest.mark.ranks(2)
        def test_breakpoint(rank):
            breakpoint()

        @pytest.mark.ranks(2)
        def test_pytest(rank):
            if rank.index == 1:
                pytest.set_trace()

        def test_node(gpus):
            pdb.set_trace()
            gpus

        @pytest.mark.ranks(2)
        def test_after(rank):
            pass

        def test_on_devices(gpus):
            assert_devices_are(gpus, gpus[:1])

        @pytest.mark.ranks(2)
        def test_on_ranks(rank):
            assert_devices_are([rank.device], [])

        def test_broken(gpus):
            assert_devices_are(gpus, None)
        """
    )
    result = run(*GPUS)
    result.assert_outcomes(failed=6, passed=1)
    refused = "RuntimeError: a debugger has no terminal here: this runs in another process than pytest. Print*"
    result.stdout.fnmatch_lines(
        [
            f"ranks 0-1 of 2 raised {refused}",
            ">*breakpoint()",
            f"rank 1 of 2 raised {refused}",
            f"the node process raised {refused}",
        ]
    )
    found, broken = result.stdout.str().split("_ test_broken _")
    assert "assert_devices_are(gpus, gpus[:1])" in found and "assert_devices_are([rank.device], [])" in found
    assert "checks.py" not in found and "checks.py" in broken


def test_trace_is_refused_where_it_would_step_through_the_engine(typed, pytester):
    pytester.makepyfile(
        test_it="""
        import pytest

        @pytest.mark.ranks(2)
        def test_on_ranks(rank):
            pass

        def test_in_parent(ranks):
            mine = "LOCAL" + " OF THE CALLER"
            ranks.run(lambda: None)
        """
    )
    output = typed("n\np mine\nc\n", "--trace")
    assert "--trace steps through tests in the pytest process, but this one runs in another" in output
    assert "'LOCAL OF THE CALLER'" in output
    assert "1 passed, 1 error" in output


ORDERED = """
    import pytest

    @pytest.mark.ranks(2)
    def test_a(rank):
        assert rank.size == 2

    @pytest.mark.ranks(2)
    def test_b(rank):
        assert rank.index == 0

    def test_c(ranks):
        assert ranks.run(lambda: 1) == [1, 1]

    def test_d(gpus):
        raise ValueError
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("style", "words"),
    [
        *((style, words) for style, words in (("long", "-vv"), ("short", "-q"))),
        *(("line", "-vv"), ("native", "-q"), ("no", "-vv")),
    ],
)
def test_every_style_of_traceback(run, pytester, style, words):
    pytester.makepyfile(test_it=ORDERED)
    result = run(*GPUS, f"--tb={style}", words)
    result.assert_outcomes(passed=2, failed=2)
    shown = style not in ("no", "line")
    assert ("repeat with" in result.stdout.str()) == shown
    if style != "no":
        result.stdout.fnmatch_lines(["*rank 1 of 2 raised AssertionError: assert 1 == 0"])


SLOW = """
    import subprocess, sys, time
    import pytest, torch.distributed as dist
    from hypothesis import given, strategies as st

    @pytest.mark.ranks(2)
    def test_before(rank):
        dist.barrier()

    @pytest.mark.ranks(2)
    @pytest.mark.timeout(1)
    def test_slow(rank):
        if rank.index:
            subprocess.run([sys.executable, "-c", "import time; time.sleep(3600)"])
        dist.barrier()

    @pytest.mark.ranks(2)
    @pytest.mark.timeout(1)
    @given(n=st.integers(0, 100))
    def test_slow_example(rank, n):
        if n > 3:
            time.sleep(3600)

    @pytest.mark.timeout(1)
    def test_slow_in_parent(ranks):
        ranks.run(time.sleep, 3600, size=1)

    @pytest.mark.ranks(2)
    def test_after(rank):
        dist.barrier()
"""


@pytest.mark.unmeasured
def test_pytest_timeout_by_signal_tells_where_the_ranks_were(run, pytester):
    pytest.importorskip("pytest_timeout")
    pytester.makepyfile(test_it=SLOW)
    result = run(*GPUS)
    result.assert_outcomes(passed=2, failed=3)
    result.stdout.fnmatch_lines(
        [
            "rank 1 of 2 did not finish test_slow within * s",
            "rank 1 is in * (test_it.py:13)",
            "rank 0 is in barrier #1 (test_it.py:14)",
            "Timeout (>1.0s) from pytest-timeout.",
            "ranks 0-1 of 2 did not finish test_slow_example within * s",
            "Failing test case (not shrunk, because every try would hang): n=*",
            "rank 0 of 1 did not finish * within * s",
        ]
    )


def test_pytest_timeout_by_thread_ends_all_processes(pytester, warm, monkeypatch):
    pytest.importorskip("pytest_timeout")
    monkeypatch.setenv(MARK, str(pytester.path))
    monkeypatch.setenv("TMPDIR", str(pytester.mkdir("tmp")))
    pytester.makepyfile(test_it=SLOW)
    result = pytester.runpytest_subprocess(*GPUS, "--timeout-method=thread")
    assert result.ret == 1
    wait_for(lambda: not processes_with(str(pytester.path)))
    wait_for(lambda: not list(Path(pytester.path, "tmp").glob("mgpu-check-*")))


def test_a_killed_run_leaves_no_directory(pytester, warm, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(pytester.mkdir("tmp")))
    pytester.makepyfile(
        """
        import os, pytest
        from mgpu_check import assert_resume_continues

        @pytest.mark.ranks(2)
        def test_it(rank):
            pass

        def test_end(ranks):
            process = os.getpid()

            def train(rank, directory, start, stop):
                os.kill(process, 9)

            assert_resume_continues(ranks, train)
        """
    )
    assert pytester.runpytest_subprocess(*GPUS).ret == -9
    wait_for(lambda: not list(Path(pytester.path, "tmp").glob("mgpu-check-*")))


@pytest.mark.unmeasured
@pytest.mark.parametrize("parallel", [(), pytest.param(("-n1",), marks=pytest.mark.slow)], ids=["one process", "xdist"])
def test_pytest_cov_measures_what_ranks_run(run, pytester, parallel):
    pytest.importorskip("pytest_cov")
    pytester.makepyfile(
        measured="""
        def step(index):
            if index == 0:
                return "zero"
            if index == 1:
                return "one"
            return "more"

        def on_node():
            return 1

        def fails():
            raise ValueError

        def never():
            return 1
        """,
        test_it="""
        import measured, pytest
        from hypothesis import given, strategies as st

        @pytest.mark.ranks(2)
        @given(n=st.integers())
        def test_step(rank, n):
            measured.step(rank.index)

        def test_node(gpus):
            measured.on_node()

        @pytest.mark.ranks(2)
        @pytest.mark.xfail  # what a rank runs before it raises counts, too
        def test_fails(rank):
            measured.fails()
        """,
    )
    result = run(*GPUS, "--cov=measured", "--cov-report=term-missing", *parallel)
    result.assert_outcomes(passed=2, xfailed=1)
    result.stdout.fnmatch_lines(["measured.py * 83%   6, 15"])
    assert [path.name for path in pytester.path.glob(".coverage*")] == [".coverage"]


def test_rerunfailures_tries_on_fresh_ranks(run, pytester):
    pytest.importorskip("pytest_rerunfailures")
    pytester.makepyfile(
        """
        import os, pathlib, pytest

        @pytest.mark.ranks(2)
        def test_flaky(rank):
            mark = pathlib.Path(f"tried-{rank.index}")
            if not mark.exists():
                mark.touch()
                os._exit(5)

        @pytest.mark.ranks(2)
        def test_broken(rank):
            assert rank.index == 0
        """
    )
    result = run(*GPUS, "--reruns=2", "--junitxml=out.xml")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*3 rerun*"])
    for case in ET.parse(pytester.path / "out.xml").getroot().iter("testcase"):
        names = [entry.get("name") for entry in case.iter("property")]
        assert len(names) == len(set(names)) > 0
