"""The summary in Markdown that a CI job shows of a run: for every end of a run, with workers and without."""

from __future__ import annotations

import re

import pytest

from mgpu_check.plugin.report.github import LARGEST, Page, code, fenced, text

GPUS = ("--gpus=2", "--simulate", "--rank-timeout=20")

TESTS = """
    import os, sys
    import pytest, torch.distributed as dist
    from hypothesis import given, settings, strategies as st
    from mgpu_check.errors import ScalingMismatch

    @pytest.mark.ranks(1, 2)
    def test_passes(rank):
        dist.barrier()

    @pytest.mark.ranks(2)
    def test_fails(rank):
        sys.stdout.write("bell \\x07 null \\x00 escape \\x1b[31m latin \\xe9 emoji \\U0001f600\\n")
        sys.stdout.flush()
        os.write(2, b"no text \\xff\\xfe ]]> <&>\\n")
        dist.barrier()
        assert rank.index == 0, "a | b <script> __init__ ```` [x](y) \\x1b[31m \\x01 lone surrogate \\udc80 ]]> <&>"

    @settings(max_examples=7, database=None)
    @given(size=st.integers(1, 2), n=st.integers())
    def test_property(ranks, size, n):
        ranks.run(dist.barrier, size=size)

    @settings(max_examples=20, database=None)
    @given(size=st.integers(1, 2), n=st.integers(0, 100))
    def test_property_fails(ranks, size, n):
        def body(rank):
            assert rank.index == 0 or n < 10
        ranks.run(body, size=size)

    @pytest.mark.ranks(2)
    def test_dies(rank):
        if rank.index == 1:
            os._exit(3)

    def test_node(gpus):
        assert len(gpus) == 1

    def test_scaling(ranks):
        ranks.run(dist.barrier, size=2)
        raise ScalingMismatch("off by 2", ranks=[0, 1], mistakes=["world-size-factor", "mean-of-means"])

    @pytest.mark.gpus(9)
    def test_too_many(gpus):
        pass

    def test_skipped():
        pytest.skip("no | reason")

    @pytest.mark.xfail(reason="known")
    def test_expected():
        assert False

    def test_plain():
        pass

    @pytest.fixture
    def broken():
        raise ValueError("no fixture")

    def test_setup(ranks, broken):
        pass

    @pytest.mark.parametrize("name", ["a|b", "`x`"])
    def test_names(gpus, name):
        assert len(gpus) == 2
"""


def sections(page: str) -> dict[str, list[str]]:
    """The lines of each section, by its title; those before the first by ""."""
    found: dict[str, list[str]] = {"": []}
    title = ""
    for line in re.sub(r"<details>.*?</details>", "", page, flags=re.DOTALL).splitlines():
        if line.startswith("## "):
            title = line.removeprefix("## ")
        found.setdefault(title, []).append(line)
    return found


def cells(lines: list[str]) -> list[list[str]]:
    """The rows of a table, without its head: split as GitHub does, at each bar that is not escaped."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if line.startswith("|")]
    assert len({len(row) for row in rows}) == 1
    return [[cell.strip() for cell in row] for row in rows[2:]]


def summary_of(run, pytester, *arguments: str) -> tuple[str, pytest.RunResult]:
    result = run(*GPUS, "--gpu-report=out/summary.md", *arguments)
    return (pytester.path / "out" / "summary.md").read_text(), result


def assert_tells_all(page: str) -> None:
    """Assert that `page` has all that has happened in `TESTS`."""
    found = sections(page)
    head = "\n".join(found[""])
    assert head.startswith("# mgpu-check: FAILED on 2 SIMULATED GPUs\n")
    assert "proves code, never hardware" in head and "nothing about hardware" in head
    assert all(word in head for word in ("torch 2.", "Python 3.", "pytest ", "Hypothesis "))
    assert "**5 failed, 1 error, 6 passed, 2 skipped, 1 xfailed**" in head
    failed = {row[0]: row[1:] for row in cells(found["Failed"])}
    names = ("test_fails`", "test_property_fails`", "test_dies`", "test_node`", "test_scaling`", "test_setup` (setup)")
    assert failed.keys() == {f"`test_it.py::{name}" for name in names}
    sizes, what, classes = failed["`test_it.py::test_scaling`"]
    assert (sizes, what) == ("2", "ScalingMismatch: off by 2")
    pages = "https://github.com/mgpu-check/mgpu-check/blob/main/docs/classes"
    assert classes == f"[world-size-factor]({pages}/world-size-factor.md), [mean-of-means]({pages}/mean-of-means.md)"
    assert failed["`test_it.py::test_fails`"][2] == "-"
    assert failed["`test_it.py::test_setup` (setup)"] == ["-", "ValueError: no fixture", "-"]
    assert {tuple(row) for row in cells(found["Skipped, or expected to fail"])} == {
        ("`test_it.py::test_too_many`", "needs 9 GPUs, --gpus=2"),
        ("`test_it.py::test_skipped`", "no &#124; reason"),
        ("`test_it.py::test_expected`", "expected to fail: known"),
    }
    assert {tuple(row) for row in cells(found["Passed"])} == {
        ("`test_it.py::test_passes[ranks=1]`", "1", "1"),
        ("`test_it.py::test_passes[ranks=2]`", "2", "1"),
        ("`test_it.py::test_property`", "1 2", "7"),
        ("`test_it.py::test_names[a\\|b]`", "-", "1"),
        ("``test_it.py::test_names[`x`]``", "-", "1"),
    }
    assert "1 test without GPUs also passed." in page
    # A failure has its report, and the line that repeats it.
    (details,) = re.findall(r"<details>\n(<summary>test&#95;it.py::test&#95;fails</.*?)</details>", page, re.DOTALL)
    assert details.startswith("<summary>test&#95;it.py::test&#95;fails</summary>\n\n`````text\n")
    story = details.split("`````")[1]
    assert "rank 1 of 2 raised AssertionError" in story
    assert "a | b <script> __init__ ```` [x](y)" in story
    assert "\x1b" not in page and "\x01" not in page
    assert "repeat with" not in story
    (line,) = re.findall(r"```sh\n(.*)\n```", details)
    assert line.startswith("python -m pytest --gpus=2 --simulate ") and "--gpu-report" not in line


def test_nothing_collected_and_nothing_run_are_no_success(run, pytester):
    pytester.makepyfile(test_it="def test_a(): pass\nimport pytest\n@pytest.mark.gpus(3)\ndef test_b(gpus): pass")
    page, result = summary_of(run, pytester, "-k", "nothing")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert page.startswith("# mgpu-check: NO TESTS on 2 SIMULATED GPUs\n")
    assert "**no tests were run**" in page
    page, result = summary_of(run, pytester, "-k", "test_b")
    assert result.ret == pytest.ExitCode.OK
    assert page.startswith("# mgpu-check: nothing was run on 2 SIMULATED GPUs\n")


def test_a_file_that_cannot_be_collected(run, pytester):
    pytester.makepyfile(test_it="import no_such_module_at_all")
    page, result = summary_of(run, pytester)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert page.startswith("# mgpu-check: INTERRUPTED on 2 SIMULATED GPUs\n")
    ((name, _, what, _),) = cells(sections(page)["Failed"])
    assert name == "`test_it.py`" and what.startswith("not collected: ModuleNotFoundError: No module named")


def test_an_interrupted_run_tells_what_it_has_done(run, pytester):
    pytester.makepyfile(test_it="def test_a(ranks): ranks.run(int)\ndef test_b(): raise KeyboardInterrupt")
    page, result = summary_of(run, pytester, "-p", "no:terminal")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert page.startswith("# mgpu-check: INTERRUPTED on 2 SIMULATED GPUs\n")
    assert cells(sections(page)["Passed"]) == [["`test_it.py::test_a`", "2", "1"]]


def test_a_run_that_does_not_end_leaves_no_summary_of_another(run, pytester):
    pytester.path.joinpath("summary.md").write_text("# mgpu-check: passed\n")
    pytester.makepyfile(test_it="def test_a(): __import__('os')._exit(0)")
    run("--gpu-report=summary.md")
    assert pytester.path.joinpath("summary.md").read_text().startswith("# mgpu-check: the run has not ended\n")


def test_it_stays_below_what_github_shows():
    page = Page()
    page.rows("Failed", ("test", "what"), [("a", "é" * 250)] * 700)
    page.sections("more failures are shown in the log only", [fenced("x" * 20_000)] * 60)
    page.rows("Skipped", ("test", "why"), [("b", "y" * 500)] * 3000)
    content = page.content()
    assert LARGEST * 0.9 < len(content.encode()) < 2**20
    assert re.search(r"… \d+ more failures are shown in the log only: the summary would be too large", content)
    assert re.search(r"… \d+ more rows are left out: the summary would be too large for GitHub\.", content)


def test_a_file_that_cannot_be_written_is_a_usage_error(run, pytester):
    pytester.path.joinpath("file").write_text("")
    pytester.mkdir("directory.md")
    pytester.makepyfile(test_it="raise SystemExit('tests were collected')")
    for path in ("file/out.md", "directory.md"):
        result = run(f"--gpu-report={path}")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(
            [f"ERROR: mgpu-check: --gpu-report: '{path}' cannot be written (*); choose a file*"]
        )


def test_markup():
    assert text("a_b *c* | <d>\n@e #1 `f` [g](h) \\") == (
        "a&#95;b &#42;c&#42; &#124; &#60;d&#62; &#64;e &#35;1 &#96;f&#96; &#91;g&#93;(h) &#92;"
    )
    assert code("a|b") == "`a\\|b`"
    assert code("`a``b") == "``` `a``b ```"
    assert fenced("x\n```\ny") == ["````text", "x", "```", "y", "````"]
    assert fenced("\x1b[1mbold\x1b[0m \x07 \udc80") == ["```text", "bold \\x07 \\udc80", "```"]
