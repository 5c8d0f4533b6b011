"""JUnit files: one valid file with the full account of a run, from workers, ranks and hosts alike."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

GPUS = ("--gpus=2", "--simulate", "--rank-timeout=20")

TESTS = """
    import os, sys
    import pytest, torch.distributed as dist
    from hypothesis import given, settings, strategies as st

    @pytest.mark.ranks(1, 2)
    def test_passes(rank):
        dist.barrier()

    @pytest.mark.ranks(2)
    def test_fails(rank):
        sys.stdout.write("bell \\x07 null \\x00 escape \\x1b[31m latin \\xe9 emoji \\U0001f600\\n")
        sys.stdout.flush()
        os.write(2, b"no text \\xff\\xfe ]]> <&>\\n")
        dist.barrier()
        assert rank.index == 0, "control \\x01 lone surrogate \\udc80 ]]> <&>"

    @settings(max_examples=20, database=None)
    @given(size=st.integers(1, 2), n=st.integers(0, 100))
    def test_property(ranks, size, n):
        def body(rank):
            assert rank.index == 0 or n < 10
        ranks.run(body, size=size)

    def test_node(gpus):
        assert len(gpus) == 1

    @pytest.fixture
    def broken():
        raise ValueError("no fixture")

    def test_setup(ranks, broken):
        pass

    @pytest.mark.ranks(2)
    def test_dies(rank):
        if rank.index == 1:
            os._exit(3)
"""


def cases_of(path: Path) -> dict[str, ET.Element]:
    """The cases of a JUnit file by name; the file must be valid, and no case may be in it twice."""
    cases = ET.parse(path).getroot().findall("testsuite/testcase")
    found = {f"{case.get('classname')}::{case.get('name')}": case for case in cases}
    assert len(found) == len(cases)
    return found


def properties_of(case: ET.Element) -> dict[str, str]:
    return {p.get("name", "").removeprefix("mgpu_check."): p.get("value", "") for p in case.iter("property")}


def test_a_case_says_ranks_sizes_seeds_devices_and_how_to_repeat_it(run, pytester):
    pytester.makepyfile(test_it=TESTS)
    run(*GPUS, "--junitxml=out.xml", "-o", "junit_logging=all").assert_outcomes(passed=2, failed=4, errors=1)
    cases = cases_of(pytester.path / "out.xml")
    assert len(cases) == 7
    told = {name.removeprefix("test_it::"): properties_of(case) for name, case in cases.items()}
    for name, properties in told.items():
        assert properties["devices"] == f"SIMULATED cpu x{1 if 'ranks=1' in name else 2}", name
        assert properties["seed"] == "0", name
        assert ("replay" in properties) == (not name.startswith("test_passes")), name
    assert {name: properties.get("failed_ranks") for name, properties in told.items()} == {
        "test_passes[ranks=1]": None,
        "test_passes[ranks=2]": None,
        "test_fails": "1",
        "test_property": "1",
        "test_node": "",
        "test_setup": "",
        "test_dies": "1",
    }
    assert told["test_passes[ranks=1]"]["world_sizes"] == "1"
    assert told["test_property"]["world_sizes"] == "1 2"
    assert told["test_property"]["hypothesis_seed"] == "0"
    assert "--gpu-replay=" in told["test_property"]["replay"]
    assert "hypothesis_seed" not in told["test_fails"]
    # The output of each rank is in a section of its own; characters that XML cannot hold are escaped.
    text = ET.tostring(cases["test_it::test_fails"], encoding="unicode")
    for words in ("bell #x07 null #x00 escape #x1B[31m", "latin \xe9 emoji ", "no text \ufffd\ufffd"):
        assert words in text, words
    assert "emoji \U0001f600" in text or "emoji #x1F600" in text  # older versions of pytest escape it
    failure = cases["test_it::test_fails"].find("failure")
    assert failure is not None
    assert "control #x01 lone surrogate \\udc80 ]]> <&>" in (failure.text or "")
    assert (failure.text or "").splitlines()[-1] == told["test_fails"]["replay"]


def comparable(path: Path) -> dict[str, str]:
    """Return the content of a file, without times."""
    return {
        name: re.sub(
            r" time=\"[^\"]*\"|\d+(\.\d+)? s later| of the last 0\.\d+ s", "", ET.tostring(case, encoding="unicode")
        )
        for name, case in cases_of(path).items()
    }


def test_the_file_is_the_same_under_xdist(run, pytester):
    pytester.makepyfile(test_it=TESTS)
    options = (*GPUS, "-o", "junit_logging=all")
    run(*options, "--junitxml=one.xml")
    run(*options, "--junitxml=two.xml", "-n2").assert_outcomes(passed=2, failed=4, errors=1)
    one, two = comparable(pytester.path / "one.xml"), comparable(pytester.path / "two.xml")
    assert one.keys() == two.keys()
    for name in one:
        assert one[name] == two[name]


@pytest.mark.parametrize("parallel", [(), ("-n1",)], ids=["one process", "xdist"])
def test_a_rank_that_dies_while_idle_is_a_case_of_its_own(run, pytester, parallel):
    pytester.makepyfile(
        """
        import os

        def test_kills_one_while_idle(ranks):
            pids = ranks.run(os.getpid)
            test_kills_one_while_idle.victim = pids[1]

        def test_after():
            pid = test_kills_one_while_idle.victim
            os.kill(pid, 9)
            while os.path.exists(f"/proc/{pid}"):
                pass
        """
    )
    result = run(*GPUS, "--junitxml=out.xml", *parallel)
    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    suite = ET.parse(pytester.path / "out.xml").getroot().find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("errors"), suite.get("failures")) == ("3", "1", "0")
    (error,) = suite.iter("error")
    assert "rank 1 of 2 died while no test used it: signal SIGKILL" in (error.text or "")
    assert "test_kills_one_while_idle" in (error.text or "")
    case = cases_of(pytester.path / "out.xml")["mgpu_check::ranks that died while no test used them"]
    assert case.find("error") is not None
