"""JUnit files: one valid file with the full account of a run, from workers, ranks and hosts alike."""

from __future__ import annotations

import os
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.plugin.test_markdown import GPUS, TESTS, assert_tells_all, sections


def cases_of(path: Path) -> dict[str, ET.Element]:
    """The cases of a JUnit file by name; the file must be valid, and no case may be in it twice."""
    cases = ET.parse(path).getroot().findall("testsuite/testcase")
    found = {f"{case.get('classname')}::{case.get('name')}": case for case in cases}
    assert len(found) == len(cases)
    return found


def properties_of(case: ET.Element) -> dict[str, str]:
    return {p.get("name", "").removeprefix("mgpu_check."): p.get("value", "") for p in case.iter("property")}


def comparable(path: Path) -> dict[str, str]:
    """Return the content of a file, without times."""
    return {
        name: re.sub(
            r" time=\"[^\"]*\"|\d+(\.\d+)? s later| of the last 0\.\d+ s", "", ET.tostring(case, encoding="unicode")
        )
        for name, case in cases_of(path).items()
    }


@pytest.mark.slow
def test_a_case_says_ranks_sizes_seeds_devices_and_how_to_repeat_it(run, pytester, monkeypatch):
    """With workers and without. So does the summary in Markdown."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # where `python` is this one
    pytester.makepyfile(test_it=TESTS)
    for name, parallel in (("one", ()), ("two", ("-n2",))):
        reports = (f"--junitxml={name}.xml", f"--gpu-report=out/{name}.md")
        result = run(*GPUS, "-o", "junit_logging=all", *reports, *parallel)
        result.assert_outcomes(passed=6, failed=5, errors=1, skipped=2, xfailed=1)
        assert_tells_all((pytester.path / "out" / f"{name}.md").read_text())
    one, two = comparable(pytester.path / "one.xml"), comparable(pytester.path / "two.xml")
    assert one.keys() == two.keys()
    for name in one:
        assert one[name] == two[name]
    cases = cases_of(pytester.path / "one.xml")
    told = {name.removeprefix("test_it::"): properties_of(case) for name, case in cases.items()}
    failed_ranks = {
        "test_passes[ranks=1]": None,
        "test_passes[ranks=2]": None,
        "test_fails": "1",
        "test_property_fails": "1",
        "test_node": "",
        "test_setup": "",
        "test_dies": "1",
    }
    for name, ranks in failed_ranks.items():
        properties = told[name]
        assert properties["devices"] == f"SIMULATED cpu x{1 if 'ranks=1' in name else 2}", name
        assert (properties["seed"], properties["simulated"]) == ("0", "cpu"), name
        assert ("replay" in properties) == (not name.startswith("test_passes")), name
        assert properties.get("failed_ranks") == ranks, name
    assert told["test_passes[ranks=1]"]["world_sizes"] == "1"
    assert told["test_property_fails"]["world_sizes"] == "1 2"
    assert told["test_property_fails"]["hypothesis_seed"] == "0"
    assert "--gpu-replay=" in told["test_property_fails"]["replay"]
    assert "hypothesis_seed" not in told["test_fails"]
    # The output of each rank is in a section of its own; characters that XML cannot hold are escaped.
    text = ET.tostring(cases["test_it::test_fails"], encoding="unicode")
    for words in ("bell #x07 null #x00 escape #x1B[31m", "latin \xe9 emoji ", "no text \ufffd\ufffd"):
        assert words in text, words
    assert "emoji \U0001f600" in text or "emoji #x1F600" in text  # older versions of pytest escape it
    failure = cases["test_it::test_fails"].find("failure")
    assert failure is not None
    assert "#x1B[31m #x01 lone surrogate \\udc80 ]]> <&>" in (failure.text or "")
    assert (failure.text or "").splitlines()[-1] == told["test_fails"]["replay"]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [(), ("-n1",)], ids=["one process", "xdist"])
def test_a_rank_that_dies_while_idle_fails_the_run_and_no_innocent_test(run, pytester, parallel):
    pytester.makepyfile(
        """
        import os, pytest, torch.distributed as dist

        def test_kills_one_while_idle(ranks):
            pids = ranks.run(os.getpid)
            test_kills_one_while_idle.victim = pids[1]

        def test_after():
            pid = test_kills_one_while_idle.victim
            os.kill(pid, 9)
            while os.path.exists(f"/proc/{pid}"):
                pass

        @pytest.mark.ranks
        def test_innocent(rank):
            dist.barrier()
        """
    )
    result = run(*GPUS, "--junitxml=out.xml", "--gpu-report=out.md", *parallel)
    result.assert_outcomes(passed=3)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    death = "rank 1 of 2 died while no test used it: signal SIGKILL (the last test was *::test_kills_one_while_idle)"
    result.stdout.fnmatch_lines(["*ranks that died while no test used them*", death])
    page = sections((pytester.path / "out.md").read_text())
    assert page[""][0] == "# mgpu-check: FAILED on 2 SIMULATED GPUs"
    assert "signal SIGKILL" in "\n".join(page["Ranks that died while no test used them"])
    suite = ET.parse(pytester.path / "out.xml").getroot().find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("errors"), suite.get("failures")) == ("4", "1", "0")
    (error,) = suite.iter("error")
    assert "rank 1 of 2 died while no test used it: signal SIGKILL" in (error.text or "")
    assert "test_kills_one_while_idle" in (error.text or "")
    case = cases_of(pytester.path / "out.xml")["mgpu_check::ranks that died while no test used them"]
    assert case.find("error") is not None
