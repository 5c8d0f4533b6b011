"""A failure in the ranks has a clear report, and the run continues."""

from __future__ import annotations

import os
import re
import signal

import pytest

from mgpu_check.plugin.report.failures import joined
from tests.plugin.conftest import processes_with, wait_for

GPUS = ("--gpus=4", "--simulate", "--rank-timeout=5")


def test_a_users_repository_with_several_kinds_of_failure(run, pytester):
    """Each is red with name and cause, and all later tests run. The matrix of faults has many more kinds."""
    pytester.makepyfile(
        test_it="""
        import os, signal, sys
        import pytest, torch, torch.distributed as dist
        from hypothesis import given, strategies as st

        @pytest.mark.ranks
        @given(n=st.integers(2, 8), v=st.integers(2, 5))
        def test_wrong_assertion(rank, n, v):
            x = torch.full((n,), float(v * (rank.index + 1)))
            dist.all_reduce(x)
            total = x.sum().item()
            assert total <= 180 or v < 3

        @pytest.mark.ranks
        def test_rank_2_raises(rank):
            print("out of", rank.index)
            print("err of", rank.index, file=sys.stderr)
            if rank.index == 2:
                raise ValueError("no such thing")
            dist.barrier()

        def test_in_the_parent(ranks):
            ranks.run(lambda rank: [1, 2][rank.index], size=3)

        def test_node_process_crashes(gpus):
            os.kill(os.getpid(), signal.SIGABRT)

        @pytest.mark.ranks
        def test_result_that_cannot_travel(rank):
            assert [1, 2, rank.index] == [1, 2, 2]

        @pytest.mark.ranks
        def test_after_all_that(rank):
            x = torch.ones(1)
            dist.all_reduce(x)
            assert x.item() == 4
        """
    )
    result = run(*GPUS)
    result.assert_outcomes(failed=5, passed=1)
    result.stdout.fnmatch_lines(
        [
            "ranks 0-3 of 4 raised AssertionError: assert (200.0 <= 180 or 5 < 3)",
            ">*assert total <= 180 or v < 3",
            "Fa*: test_wrong_assertion(",  # "Failing test case", "Falsifying example" in older versions
            "    rank=rank,",
            "    n=4,",
            "    v=5,",
            "rank 2 of 4 raised ValueError: no such thing",
            "ranks 0-1, 3 still ran * later, and were stopped",
            ">*raise ValueError(*no such thing*)",
            "*barrier*",
            "*Captured stdout of rank 0 of 4 call*",
            "out of 0",
            "*Captured stderr of rank 3 of 4 call*",
            "err of 3",
            "test_*.py:*: in test_in_the_parent",
            "rank 2 of 3 raised IndexError: list index out of range",
            "the node process died: signal SIGABRT",
            "*At index 2 diff: 0 != 2*",
        ]
    )
    result.stdout.no_fnmatch_line("*/mgpu_check/*")  # the engine keeps out of the picture
    result.stdout.fnmatch_lines(["FAILED test_it.py::test_rank_2_raises - RankFailure: rank 2 of 4*"])


def test_a_hang_prints_its_example_and_is_tried_once(run, pytester):
    pytester.makepyfile(
        """
        import time, pytest
        from hypothesis import given, strategies as st

        @pytest.mark.ranks(2, timeout=1)
        @given(n=st.integers(0, 64))
        def test_hang(rank, n):
            with open("tries", "a") as file:
                file.write("x")
            if rank.index == 1:
                time.sleep(3600)
        """,
        test_steps="""
        import threading, pytest
        from hypothesis import stateful, strategies as st

        class Sums(stateful.RuleBasedStateMachine):
            sums = stateful.Bundle("sums")

            @stateful.initialize(target=sums, n=st.just(7))
            def begin(self, n):
                return n

            @stateful.rule(target=sums, n=sums, some=st.lists(st.just(1), min_size=1, max_size=1))
            def add(self, n, some):
                return self.ranks.run(lambda: n + sum(some), size=2)[0]

            @stateful.precondition(lambda self: len(self.bundle("sums")) > 2)
            @stateful.rule(n=sums)
            def hang(self, n):
                self.ranks.run(lambda rank: rank.index == 0 or threading.Event().wait(), size=2, timeout=1)

            @stateful.invariant()
            def holds(self):
                pass

        class TestMachine(Sums.TestCase):
            @pytest.fixture(autouse=True)
            def give(self, ranks):
                Sums.ranks = ranks
        """,
    )
    result = run(*GPUS)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["Failing test case (not shrunk, because every try would hang): n=*"])
    steps = [
        "rank 1 of 2 did not finish <lambda> within 1 s",
        "Failing test case (not shrunk, because every try would hang): ",
        "state = Sums()",
        "sums_0 = state.begin(n=7)",
        "state.holds()",
        "sums_1 = state.add(n=sums_0, some=[[]1])",
        "state.hang(n=sums_*)",
        "state.teardown()",
    ]
    result.stdout.fnmatch_lines([*steps, "FAILED *TestMachine::runTest - RankHang: *"])
    assert len(pytester.path.joinpath("tries").read_text()) == 2  # once on each rank


@pytest.mark.slow
def test_teardowns_that_fail_late_deaths_and_flaky_failures(run, pytester):
    """The ranks after a teardown that raises are fresh, and a death after a rank's part is an error of that test."""
    pytester.makepyfile(
        test_teardown="""
        import os, pytest

        @pytest.fixture
        def broken():
            yield
            raise RuntimeError("teardown")

        @pytest.mark.ranks(2)
        def test_poison(rank, broken):
            os.environ["POISON"] = "1"

        @pytest.mark.ranks(2)
        def test_innocent(rank):
            assert "POISON" not in os.environ
        """,
        test_late="""
        import os, signal, pytest

        @pytest.fixture
        def late(request):
            yield
            os.kill(request.node.module.PIDS[1], signal.SIGKILL)
            while os.path.exists(f"/proc/{request.node.module.PIDS[1]}"):
                pass

        PIDS = []
        def test_first(ranks, late):
            PIDS.extend(ranks.run(os.getpid, size=2))

        def test_second(ranks):
            ranks.run(os.getpid, size=2)
        """,
        test_not_again="""
        import os, pytest
        from hypothesis import given, settings, strategies as st

        @pytest.mark.ranks(2)
        @settings(database=None)
        @given(n=st.integers(0, 100))
        def test_flaky(rank, n):
            if not os.path.exists(f"failed-{rank.index}"):
                open(f"failed-{rank.index}", "w").close()
                assert n == -1, "ONCE"
        """,
    )
    result = run(*GPUS)
    result.assert_outcomes(passed=4, errors=2, failed=1)
    result.stdout.fnmatch_lines(["rank 1 of 2 died after its part of the test was done: signal SIGKILL"])
    result.stdout.fnmatch_lines(
        [
            "*produces unreliable results: Fa* on the first call but did not on a subsequent one",
            "Fa*: test_flaky(",
            "ranks 0-1 of 2 raised AssertionError: ONCE",
            "*repeat with*",
            "*::test_flaky --gpu-replay=*",
        ]
    )
    result.stdout.no_fnmatch_line("*Exception Group*")


@pytest.mark.parametrize(
    ("number", "arguments"),
    [
        *((signal.SIGINT, ()), (signal.SIGKILL, ())),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in ((signal.SIGTERM, ()), (signal.SIGINT, ("-n1",)))),
    ],
)
def test_no_process_survives_an_end_from_outside(pytester, in_background, number, arguments):
    """Ctrl-C, and the ends that give pytest no chance to clean up."""
    pytester.makepyfile(
        """
        import subprocess, sys, time, pytest

        @pytest.mark.ranks
        def test_long(rank):
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
            open(f"started-{rank.index}", "w").close()
            time.sleep(3600)
        """
    )
    run = in_background("--gpus=4", "--simulate", *arguments)
    wait_for(lambda: len(list(pytester.path.glob("started-*"))) == 4)
    os.killpg(run.process.pid, number)
    code, output = run.process.wait(60), run.output
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in output
        assert re.search(
            r"^(mgpu-check: )?ranks 0-3 of 4 did not finish test_long within [\d.]+ s$", output, re.MULTILINE
        ), output
        assert "ranks 0-3 are in test_long (test_no_process_survives_an_end_from_outside.py:8)" in output
        assert code == pytest.ExitCode.INTERRUPTED
    # Processes of the ranks end with the fork server, which notices the end of pytest by itself.
    wait_for(lambda: not processes_with(str(pytester.path)))


def test_an_answer_after_ctrl_c_is_no_death(pytester, run):
    pytester.makepyfile(
        """
        import os, signal

        def test_it(ranks):
            def interrupt(rank, process):
                if rank.index == 0:
                    os.kill(process, signal.SIGINT)
            ranks.run(interrupt, os.getpid())
        """
    )
    result = run("--gpus=4", "--simulate")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.no_fnmatch_line("*died*")


def test_a_warning_that_torch_logs_in_every_process_is_one_section():
    def logged(rank: int, text: str = "did not find any unused parameters") -> str:
        return f"[rank{rank}]:[W1126 01:29:1{rank}.019481911 reducer.cpp:1529] Warning: {text} (function operator())\n"

    output = [(f"rank {rank} of 3", "stderr", logged(rank)) for rank in range(3)]
    assert joined(output) == [("stderr of rank 0 of 3, and 2 more alike", logged(0))]
    others = [("rank 0 of 3", "stderr", logged(0)), ("rank 1 of 3", "stderr", logged(1, "another"))]
    assert [title for title, _ in joined(others)] == ["stderr of rank 0 of 3", "stderr of rank 1 of 3"]
    own = [(f"rank {rank} of 3", "stdout", "the same\n") for rank in range(2)]
    assert len(joined(own)) == 2, "a user's own output is kept by rank"
