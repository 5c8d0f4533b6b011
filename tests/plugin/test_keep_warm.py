"""`--gpu-keep-warm`: what the header says, and that the next run forks its ranks from the same keeper."""

from __future__ import annotations

import re

import pytest

from tests.engine.test_kept import ended, kill_keepers

RANKS = """
    import pytest

    @pytest.mark.ranks(2)
    def test_ranks(rank):
        assert rank.size == 2
"""


@pytest.fixture
def own_directory(pytester, monkeypatch):
    directory = pytester.mkdir("run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    yield directory
    kill_keepers("XDG_RUNTIME_DIR", directory)


@pytest.mark.slow
@pytest.mark.unmeasured
@pytest.mark.usefixtures("own_directory")
def test_the_next_run_finds_the_imports(run, pytester):
    pytester.makepyfile(test_ranks=RANKS)
    given = ("--gpus=2", "--simulate")
    first = run(*given, "--gpu-keep-warm", "test_ranks.py")  # which is no value of the option
    first.assert_outcomes(passed=1)
    first.stdout.fnmatch_lines(["mgpu-check *; imports kept warm from now on, for 300 s"])
    last = run(*given, "--gpu-keep-warm=0", "-n1")
    last.assert_outcomes(passed=1)
    match = re.search(r"; imports kept warm by process (\d+)$", last.stdout.str(), re.MULTILINE)
    assert match is not None, last.stdout.str()
    assert ended(int(match[1]))


@pytest.mark.slow
def test_a_run_that_measures_every_process_keeps_nothing(run, pytester, monkeypatch):
    monkeypatch.setenv("COVERAGE_PROCESS_START", "nothing")
    pytester.makepyfile("def test_nothing(): pass")
    result = run("--gpus=2", "--simulate", "--gpu-keep-warm")
    result.stdout.fnmatch_lines(["*; imports are not kept warm, because coverage measures every process"])


@pytest.mark.parametrize("early", [True, False])
def test_a_start_that_fails_during_the_collection_is_wrong_usage(run, pytester, early):
    pytester.makeconftest("""
        from mgpu_check.engine.launcher import LocalLauncher
        from mgpu_check.errors import StartupFailure

        def start(self):
            raise StartupFailure("no room; make some")

        LocalLauncher.start = start
    """)
    mark = "ranks" if early else "ra' 'nks"
    pytester.makepyfile(test_ranks=f"import pytest\n@getattr(pytest.mark, '{mark}')(2)\ndef test_it(rank): pass")
    result = run("--gpus=2", "--simulate")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: mgpu-check: no room; make some"])
