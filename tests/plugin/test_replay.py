"""The shell line at the end of a failure: it is there, and it repeats the failure when a shell runs it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

GPUS = ("--gpus=2", "--simulate", "--rank-timeout=1")


def lines_of(output: str) -> list[str]:
    """The lines below each heading "repeat with", up to the next one that is no command."""
    found, inside = [], False
    for line in output.splitlines():
        if re.fullmatch(r"-+ repeat with -+", line):
            inside = True
        elif inside and re.match(r"\S*(python\d?|pytest|mgpu-check) ", line):
            found.append(line)
        else:
            inside = False
    return found


def repeat(pytester: pytest.Pytester, line: str, directory: Path) -> tuple[int, str]:
    """Return the result of `line`, pasted into a shell in `directory`: the words are what the shell makes of it, and the
    program is forked where that makes no difference."""
    said = subprocess.run(f"printf '%s\\0' {line}", shell=True, stdout=subprocess.PIPE, text=True, check=True)
    program, *words = said.stdout.split("\0")[:-1]
    if Path(program).name == "mgpu-check":
        assert shutil.which(program) == shutil.which("mgpu-check", path=Path(sys.executable).parent)
        words[:0] = ["-m", "mgpu_check"]
    else:
        assert shutil.which(program) == sys.executable
    with contextlib.chdir(directory):
        ran = pytester.run(sys.executable, *words)
    return int(ran.ret), ran.stdout.str() + ran.stderr.str()


FAILING = """
    import os, signal, time
    import pytest, torch.distributed as dist
    from hypothesis import example, given, settings, strategies as st

    @pytest.mark.ranks(1, 2)
    @pytest.mark.parametrize("text", ["it's a $HOME * & ;"])
    def test_quoting(rank, text):
        assert rank.size == 1, "QUOTED"

    @pytest.mark.ranks(2)
    @settings(database=None)
    @example(n=77)
    @given(n=st.integers(0, 10**9))
    def test_explicit(rank, n):
        assert n != 77, "EXPLICIT"

    @settings(database=None)
    @given(n=st.integers(0, 10**9))
    def test_rank_of_parent(ranks, n):
        def body():
            assert n < 1000, "RANK OF PARENT"
        ranks.run(body)

    class TestNode:
        @settings(database=None)
        @given(n=st.integers(0, 10**9))
        def test_node(self, gpus, n):
            assert n < 4321, "NODE"

    @pytest.fixture
    def broken():
        raise ValueError("SETUP")

    def test_setup(ranks, broken):
        pass

    @pytest.mark.ranks(2)
    @settings(database=None)
    @given(n=st.integers(0, 10**9))
    def test_hang(rank, n):
        if n > 10**6 and rank.index == 1:
            print("HUNG AT", n)
            time.sleep(3600)

    @pytest.mark.ranks(2)
    def test_death(rank):
        if rank.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    @pytest.mark.ranks(2)
    @settings(database=None)
    @given(n=st.integers(0, 1000))
    def test_two_bugs(rank, n):
        if n > 500:
            raise ValueError("LARGE")
        if 20 < n < 400:
            raise KeyError("MIDDLE")
"""

SEEN: dict[str, list[str]] = {
    "test_quoting[ranks=2-it's a $HOME * & ;]": ["AssertionError: QUOTED"],
    "test_explicit": [],
    "test_rank_of_parent": [],
    "TestNode::test_node": ["NODE", "n=4321"],
    "test_setup": [],
    "test_hang": ["did not finish test_hang within 1 s", "HUNG AT"],
    "test_death": [],
    "test_two_bugs": ["LARGE", "n=501", "MIDDLE", "n=21"],
}
"""What the failure says when its line has repeated it; none where the line differs in the name of the test only."""


@pytest.mark.parametrize("parallel", [(), pytest.param(("-n2",), marks=pytest.mark.slow)], ids=["one process", "xdist"])
def test_every_failure_is_repeated_by_the_line_at_its_end(run, pytester, parallel):
    """And an example that passes by now is green."""
    pytester.makeini("[pytest]\n")
    path = pytester.mkpydir("tests").joinpath("test_it.py")
    path.write_text(re.sub(r"^    ", "", FAILING, flags=re.MULTILINE))
    below = pytester.mkdir("called from")
    os.chdir(below)  # pytester returns from there
    result = run(*GPUS, *parallel, "../tests")
    lines = lines_of(result.stdout.str())
    names = {name: [line for line in lines if f"::{name}" in "".join(shlex.split(line))] for name in SEEN}
    assert {name: len(found) for name, found in names.items()} == {
        name: 2 if name == "test_two_bugs" else 1 for name in SEEN
    }
    ids = {word for line in lines for word in shlex.split(line) if "::" in word}
    assert ids == {f"../tests/test_it.py::{name}" for name in SEEN}
    if parallel:
        return
    for name, found in names.items():
        outputs = [repeat(pytester, line, below) for line in found if SEEN[name]]
        assert [code for code, _ in outputs] == [pytest.ExitCode.TESTS_FAILED] * len(outputs), outputs
        for words in SEEN[name]:
            assert any(words in output for _, output in outputs), (name, words, outputs)
        if name == "test_hang":  # an example that was not shrunk is drawn again
            hung = re.search(r"HUNG AT (\d+)", result.stdout.str())
            assert hung is not None and f"HUNG AT {hung[1]}" in outputs[0][1]
    assert "--gpu-replay=" in names["test_two_bugs"][0]
    assert "--gpu-replay=" not in names["test_explicit"][0]
    path.write_text(path.read_text().replace("n > 500", "n > 5000").replace("20 < n", "5000 < n"))
    code, output = repeat(pytester, names["test_two_bugs"][0], below)
    assert (code, "1 passed" in output) == (pytest.ExitCode.OK, True), output


def test_options_that_decide_what_a_test_does_are_repeated(run, pytester, monkeypatch):
    """The line has all options of mgpu-check, others only if they were typed, and none of the ini file."""
    monkeypatch.setenv("MGPU_CHECK_RANK_TIMEOUT", "9")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--gpus=2")
    pytester.path.joinpath("own.ini").write_text("[pytest]\nsimulate = true\naddopts = --needed-too\n")
    pytester.path.joinpath("helper.py").write_text("def pytest_report_header(): return 'HELPER'\n")
    pytester.makeconftest(
        """
        def pytest_addoption(parser):
            parser.addoption("--level", type=int, default=0)
            parser.addoption("--deep", action="store_true")
            parser.addoption("--needed-too", action="store_true")
        """
    )
    pytester.mkdir("tests").joinpath("test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.ranks(2)\n"
        "def test_it(rank, pytestconfig_values):\n"
        "    assert pytestconfig_values != (3, True, True, 9.0), 'AS CALLED'\n"
        "@pytest.fixture\n"
        "def pytestconfig_values(request):\n"
        "    from mgpu_check.settings import active\n"
        "    option = request.config.option\n"
        "    return option.level, option.deep, option.needed_too, active().rank_timeout\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(pytester.path))
    typed = "-x -c own.ini --tb short -p helper --level 3 -k test_it --deep -rA -vv --hypothesis-seed=4"
    result = pytester.runpytest_subprocess(*typed.split(), "--import-mode=importlib", "tests")
    (line,) = lines_of(result.stdout.str())
    words = shlex.split(line)
    assert words[words.index("pytest") + 1 :] == [
        *("--gpus=2", "--rank-timeout=9", "-c", "own.ini", "-p", "helper", "--level", "3", "--deep"),
        *("--import-mode=importlib", "tests/test_it.py::test_it"),
    ]
    code, output = repeat(pytester, line, pytester.path)
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "AS CALLED" in output
    assert "HELPER" in output


@pytest.mark.slow
def test_another_ini_file_nearer_to_the_test_is_not_taken(run, pytester):
    """It was not when the run was called with several directories; with one node id, it would be."""
    below = pytester.mkdir("below")
    (below / "test_below.py").write_text(
        "import pytest\n@pytest.mark.ranks(1)\ndef test_it(rank, strict):\n    assert strict, 'NO INI FILE'\n"
        "@pytest.fixture\ndef strict(pytestconfig): return pytestconfig.getini('xfail_strict')\n"
    )
    (below / "pytest.ini").write_text("[pytest]\nxfail_strict = true\n")
    (line,) = lines_of(run(*GPUS, ".").stdout.str())
    code, output = repeat(pytester, line, pytester.path)
    assert (code, "NO INI FILE" in output) == (pytest.ExitCode.TESTS_FAILED, True), output


PROPERTY = """
    import pytest
    from hypothesis import given, settings, strategies as st

    @pytest.mark.ranks(1)
    @settings(database=None)
    @given(n=st.integers(0, 1000))
    def test_it(rank, n):
        assert n < LIMIT

    @pytest.mark.ranks(1)
    def test_other(rank):
        pass

    LIMIT = 500
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu-replay=nonsense"], "--gpu-replay: 'nonsense' is not valid; copy the whole line*"),
        (
            ["--gpu-replay=1.2.3:AEEB"],
            "--gpu-replay: the example was recorded with Hypothesis 1.2.3; version *; install hypothesis==1.2.3, or*",
        ),
        (["--gpu-replay={version}:no blob"], "--gpu-replay: the text after the colon is not an example of Hypothesis*"),
        (
            ["--gpu-replay={version}:AEEB"],
            "--gpu-replay: it is the example of one test, but 2 are selected; give one node id",
        ),
        (
            ["--gpu-replay={version}:AEEB", "-k", "other"],
            "--gpu-replay: test_it.py::test_other draws no examples; run it without this option",
        ),
    ],
)
def test_an_example_that_is_none_is_a_usage_error(run, pytester, arguments, message):
    pytester.makepyfile(test_it=PROPERTY)
    version = importlib.metadata.version("hypothesis")
    result = run(*GPUS, *(argument.format(version=version) for argument in arguments))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: mgpu-check: {message}"])


@pytest.mark.slow  # one process refuses it, too
def test_an_example_for_several_tests_under_xdist(run, pytester):
    pytester.makepyfile(test_it=PROPERTY)
    result = run(*GPUS, f"--gpu-replay={importlib.metadata.version('hypothesis')}:AEEB", "-n1")
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["*it is the example of one test, but 2 are selected; give one node id"])


@pytest.mark.slow
def test_a_check_of_the_packaged_suite_is_repeated_by_the_command(pytester, warm, monkeypatch):
    """A planted fault makes one fail: called as `mgpu-check`, and as plain pytest with other ini files about."""
    pytester.path.joinpath("plant.py").write_text(
        "import pytest\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_runtest_setup(item):\n"
        "    from mgpu_check.plugin.serialization import Planting\n"
        "    from mgpu_check.plugin.stash import SESSION\n"
        "    from mgpu_check.suite.common.faults.registry import PLANTER\n"
        "    item.config.stash[SESSION].fault = Planting(PLANTER, 'remainder-dropped')\n"
    )
    pytester.makeini("[pytest]\ngpus = 2\nsimulate = true\n")
    monkeypatch.setenv("PYTHONPATH", str(pytester.path))
    options = ("-p", "plant", "-k", "test_shards_cover_the_batch", "--hypothesis-seed=0")
    for start in (("mgpu_check", "--gpus=2", "--simulate"), ("pytest", "--pyargs", "mgpu_check.suite")):
        result = pytester.run(sys.executable, "-m", *start, *options)
        (line,) = lines_of(result.stdout.str())
        assert re.search(r"mgpu[-_]check --gpus=2 --simulate -p plant test_scatter\.py::test_shards_cover", line)
    code, output = repeat(pytester, line, pytester.path)
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert "1 failed" in output
