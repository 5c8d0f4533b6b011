"""Options: their three spellings, and what is said of a wrong one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.plugin.test_markdown import cells, sections


def test_a_usage_error_names_option_value_and_remedy(run, pytester):
    """`test_settings.py` has all of them."""
    pytester.makeini("[pytest]\ngpus = many\n")
    result = run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: mgpu-check: gpus in the ini file: 'many' is not valid*"])


def test_an_unknown_variable_is_a_warning_with_the_likely_name(run, monkeypatch, pytester):
    monkeypatch.setenv("MGPU_CHECK_GPU", "4")
    pytester.makepyfile("def test_nothing(): pass")
    result = run()
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*MGPU_CHECK_GPU is unknown and has no effect; did you mean MGPU_CHECK_GPUS?*"])


def test_command_line_over_environment_over_ini(run, pytester, monkeypatch):
    pytester.makeini("[pytest]\ngpus = 1\nsimulate = true\nrank_timeout = 11\n")
    monkeypatch.setenv("MGPU_CHECK_RANK_TIMEOUT", "22")
    pytester.makepyfile("def test_size(ranks): assert ranks.size == 2")
    result = run("--gpus=2")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["mgpu-check *; SIMULATED node of 2 GPUs on cpu*; torch 2.*rank timeout 22 s"])
    result.stdout.fnmatch_lines(["*1 passed*2 SIMULATED GPUs*"])


def test_more_gpus_than_there_are_ends_with_what_to_do(run, pytester, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pytester.makepyfile("def test_nothing(): pass")
    result = run("--gpus=4")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in result.errlines if line]
    assert line == (
        "ERROR: mgpu-check: --gpus=4 (--gpus), but this process sees 0 GPUs: none; CUDA_VISIBLE_DEVICES='' restricts what "
        "is visible: change it if that is not intended; or simulate them: --gpus=4 --simulate, which tests the code and "
        "says nothing about this hardware"
    )


def test_conftests_above_the_root_stay_unread(run, pytester):
    pytester.makeconftest("raise SystemExit('the conftest above was read')")
    repo = pytester.mkdir("repo")
    repo.joinpath("pytest.ini").write_text("[pytest]\n")
    repo.joinpath("sub").mkdir()
    repo.joinpath("sub", "test_x.py").write_text("def test_x(): pass")
    result = run("--rootdir=repo", "-c", "repo/pytest.ini", "--gpus=2", "--simulate", "repo/sub")
    result.assert_outcomes(passed=1)


def test_output_of_ranks_on_a_terminal_of_another_encoding(run, pytester):
    pytester.makeconftest("import sys\nsys.stdout.reconfigure(encoding='ascii')")  # as by PYTHONIOENCODING
    pytester.makepyfile("def test_a(ranks): ranks.run(lambda: __import__('os').write(1, 'é\\n'.encode()), size=1)")
    result = run("--gpus=2", "--simulate", "-s")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*rank 0 of 1* \\xe9"])


def test_without_gpus_nothing_is_asked_for(run, pytester):
    """Inert until used: a test that needs GPUs is skipped with the reason, and the header is silent."""
    pytester.makepyfile("def test_a(gpus): pass\ndef test_b(): pass")
    result = run("-rs", "--gpu-report=summary.md")
    result.assert_outcomes(passed=1, skipped=1)
    page = pytester.path.joinpath("summary.md").read_text()
    assert page.startswith("# mgpu-check: passed\n")
    assert "no GPUs were requested" in page and "SIMULATED" not in page
    assert cells(sections(page)["Skipped, or expected to fail"])[0][1].startswith("needs GPUs")
    result.stdout.no_fnmatch_line("mgpu-check 0*")
    result.stdout.fnmatch_lines(
        [
            "mgpu-check: 1 tests were skipped because there are too few GPUs*",
            "SKIPPED*test_*needs GPUs: run with --gpus=N*",
        ]
    )


def test_strict_gpus_fails_what_would_be_skipped(run, pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.gpus(3)
        def test_a(gpus): pass

        @pytest.mark.gpus(least=3)
        def test_b(ranks): pass

        @pytest.mark.gpus(least=2)
        def test_all_of_them(gpus): assert len(gpus) == 2
        """
    )
    result = run("--gpus=2", "--simulate", "--strict-gpus")
    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines(["needs 3 GPUs, --gpus=2 (--strict-gpus)"])


def test_looking_around_imports_no_torch_and_starts_nothing(pytester):
    pytester.makepyfile("import pytest\n@pytest.mark.ranks(2, 4)\ndef test_a(rank): pass\ndef test_b(gpus): pass")
    pytester.makepyfile(
        watch="""
        import subprocess, sys, pytest
        def forbidden(*args, **kwargs):
            raise AssertionError("a process was started")
        subprocess.Popen = forbidden
        for arguments in (["--help"], ["--collect-only", "-q", "--gpu-report=out.md"]):
            assert pytest.main(["--gpus=4", "--simulate", *arguments]) == 0
            assert "torch" not in sys.modules, "torch was imported"
        """
    )
    ran = subprocess.run([sys.executable, "watch.py"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert not pytester.path.joinpath("out.md").exists()
    assert "::test_a[ranks=2]\n" in ran.stdout
