"""`assert_script_scales`: the verdict of a comparison is the result of a test."""

from __future__ import annotations

import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest

from mgpu_check import NotCompared, ScalingMismatch, assert_script_scales
from mgpu_check.compare import comparison
from mgpu_check.compare.verdict import ComparisonVerdict, refused
from mgpu_check.diagnosis.report import Finding, Report
from mgpu_check.processes.environments import FLOAT32
from tests.warm import COMPARED_ON_ONE_DEVICE

FOUND = Finding("world-size-factor", "2 times", site="train.py:24")


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """Return a function that calls the gate, where the comparison ends with `verdict`; and the plan and remarks."""
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("train.py").touch()
    seen = SimpleNamespace(remarks=[])
    ranks: Any = SimpleNamespace(
        size=4,
        _simulated="SIMULATED cpu",
        _script_environment=lambda size: {"GPUS": str(size)},
        _remark=seen.remarks.append,
    )

    def judged(verdict, *arguments, script="train.py", **options):
        def compare(plan, tell):
            seen.plan = plan
            return SimpleNamespace(verdict=verdict)

        monkeypatch.setattr(comparison, "compare", compare)
        assert_script_scales(ranks, script, *arguments, **options)
        return seen

    return judged


@pytest.mark.slow
def test_a_wrong_script_fails_a_test(python, tmp_path, by_hand, changed):
    wrong = changed(
        by_hand, ("            p.grad /= world\n", ""), ("    nn.utils.clip_grad_norm_(net.parameters(), 0.5)\n", "")
    )
    tmp_path.joinpath("wrong.py").write_text(wrong)
    tmp_path.joinpath("test_scripts.py").write_text(
        textwrap.dedent("""
        import pytest
        from mgpu_check import ScalingMismatch, assert_script_scales

        def test_wrong(ranks):
            with pytest.raises(ScalingMismatch, match="differs: step 1: the gradient of") as caught:
                assert_script_scales(ranks, "wrong.py", size=2, steps=1)
            assert caught.value.mistakes == ("world-size-factor",)
            assert caught.value.site.startswith("wrong.py:")
            assert caught.value.ranks == (0, 1)
        """)
    )
    words = ("-p", "no:cacheprovider", "--gpus=2", "--simulate", "test_scripts.py")
    code, stdout, stderr = python("-m", "pytest", *words, processes=2 + COMPARED_ON_ONE_DEVICE)
    assert code == 0, (stdout + stderr).decode()
    assert b"1 passed, 2 SIMULATED GPUs" in stdout


def test_all_arguments_reach_the_comparison(judged):
    equal = ComparisonVerdict("equal", Report("equal", remarks=["not compared, accepted by --unjudged: head: frozen"]))
    seen = judged(equal, "--batch={8/W}", steps=2, timeout=5, unjudged={"head.*": "frozen"}, fresh_directory=False)
    plan = seen.plan
    assert plan.command[1:] == ["train.py", "--batch={8/W}"] and plan.shown == "train.py '--batch={8/W}'"
    assert (plan.world, plan.steps, plan.timeout, plan.fresh) == (4, 2, 5, False)
    assert (plan.single, plan.several) == ({"GPUS": "1"}, {"GPUS": "4"})
    assert seen.remarks == ["train.py '--batch={8/W}': not compared, accepted by --unjudged: head: frozen"]
    plan = judged(equal, script="-m package.train", size=2, float32=True).plan
    assert plan.command[1:] == ["-m", "package.train"] and plan.single[FLOAT32] == plan.several[FLOAT32] == "1"


def test_an_installed_program_is_a_script(judged, tmp_path, monkeypatch):
    program = tmp_path / "bin" / "project-train"
    program.parent.mkdir()
    program.touch()
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    tmp_path.joinpath("project-train").mkdir()  # as of a package whose program has its name
    equal = ComparisonVerdict("equal", Report("equal"))
    assert judged(equal, "--epochs=1", script="project-train").plan.command[1:] == [str(program), "--epochs=1"]
    with pytest.raises(ScalingMismatch) as wrong:
        judged(ComparisonVerdict("differs", Report("differs: step 1")), script="project-train")
    assert wrong.value.site == ""


def test_a_verdict_that_is_none_fails(judged):
    with pytest.raises(ScalingMismatch) as wrong:
        judged(ComparisonVerdict("differs", Report("differs: step 1", findings=[FOUND]), ranks=(1,)))
    assert (wrong.value.mistakes, wrong.value.site, wrong.value.ranks) == (("world-size-factor",), "train.py:24", (1,))
    with pytest.raises(NotCompared, match="not comparable: no step"):
        judged(refused("no step was seen"))
    with pytest.raises(NotCompared) as open_:
        judged(ComparisonVerdict("undecided", Report("undecided"), not_compared={"head.weight": "no gradient"}))
    assert open_.value.names == ("head.weight",)


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        ("missing.py", {}, "there is no script 'missing.py'"),
        ("train.py", {"size": 1}, "size is 1; give a number of ranks from 2 to 4"),
        ("train.py", {"size": 5}, "size is 5; give a number of ranks from 2 to 4"),
        ("train.py", {"steps": 0}, "steps is 0; give an integer of at least 1"),
        ("train.py", {"timeout": 0}, "timeout is 0; give a number of seconds above 0"),
    ],
)
def test_a_wrong_argument_is_an_error(judged, script, options, words):
    with pytest.raises(ValueError, match=words):
        judged(None, script=script, **options)
    with pytest.raises(ValueError, match="choose a number of ranks that divides it"):
        judged(None, "--batch={6/W}")
