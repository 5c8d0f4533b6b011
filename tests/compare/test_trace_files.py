"""Trace files that are right, damaged, or newer, and verdicts on runs that are made here."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from functools import partial

import pytest
import torch

from mgpu_check.__main__ import main
from mgpu_check.compare.traces.files import RecordedRun, described, read_run, write_run
from mgpu_check.compare.traces.run_comparison import compare_runs
from tests.compare.training import Training, gradients, having, other, times


def run(name="a.trace", world=2, change=lambda training: None, moved=4e-7, **fields) -> RecordedRun:
    ranks, others = [], []
    for rank in range(world):
        training = Training(rank, world)
        change(training)
        ranks.append(training.trace())
        training.gradient = partial(_moved, training.gradient, moved)
        others.append(training.trace())
    return RecordedRun(name, "train.py", ranks, {"torch": "2.13.0"}, others if moved else [], **fields)


def _moved(gradient, size, number):
    return [g * (1 + size) for g in gradient(number)]


rounded = times(1 + 1e-7)


def by_rank(training: Training) -> None:
    training.gradient = lambda number: [g * (1 + training.rank) for g in gradients(number)]


def test_a_run_is_read_as_it_was_written(tmp_path):
    def options(made):
        for number, step in enumerate(made.steps):
            step.options = {name: {"lr": 0.1 if number else 0.2} for name in step.gradients}
            step.gradients["net.bias"] = None if made.rank else step.gradients["net.bias"]

    change = having(change=options, events=[{"event": "seed", "after": 0}])
    made = run(change=change, holders={"net.bias": [(0,), (0, 1)]}, shard_keys={"net.bias": {0: 0, 1: 1}}, limit=3)
    write_run(tmp_path / "a.trace", made)
    assert read_run(tmp_path / "a.trace") == made
    assert [path.name for path in tmp_path.iterdir()] == ["a.trace"]


@pytest.mark.parametrize(
    ("one", "second", "kind", "words"),
    [
        (run(), run(world=4), "equal", "equal: 3 steps on 4 ranks train the same 2 parameters as in a.trace, bit by"),
        (run(), run(change=rounded), "equal", "as in a.trace, within rounding"),
        (run(moved=0), run(change=rounded), "equal", "within rounding"),
        (run(moved=0), run(change=rounded, moved=0), "undecided", "the effect of rounding was measured in neither"),
        (run(moved=0), run(change=other, moved=0), "differs", "differs: step 1: the gradient of net."),
        (run(), run(change=other), "differs", "differs: step 1: the gradient of net."),
        (run(change=by_rank), run(change=by_rank), "equal", "the same 4 parameters as in a.trace, bit by bit"),
        (run(), run(change=by_rank), "differs", "on rank 1"),
        (run(change=by_rank), run(world=1), "not comparable", "the ranks of a.trace hold different values of it"),
        (run(), run(change=having(steps=2)), "differs", "a.trace makes 3 optimizer steps"),
    ],
)
def test_verdicts_on_two_runs(one, second, kind, words):
    found = compare_runs(one, replace(second, name="b.trace")).verdict
    assert (found.kind, words in str(found.report)) == (kind, True), found.report
    assert "one device" not in found.report.headline


@pytest.mark.parametrize(
    ("one", "second", "words"),
    [
        (run(), run(change=rounded), "is not equal bit by bit, though all is within rounding"),
        (
            run(moved=0),
            run(change=rounded, moved=0),
            "differs: step 1: the gradient of net.weight is not equal bit by bit",
        ),
        (run(), run(change=other), "differs: step 1: the gradient of net."),
        (run(), run(world=4), ""),
    ],
)
def test_bitwise_takes_rounding_for_a_difference(one, second, words):
    verdict = compare_runs(one, replace(second, name="b.trace"), bitwise=True).verdict
    assert (verdict.kind == "differs", words in str(verdict.report)) == (bool(words), True), verdict.report


def test_bits_that_no_summary_shows_are_not_equal_bit_by_bit():
    def flip(made):
        step = made.steps[1]
        step.gradients["net.weight"] = replace(step.gradients["net.weight"], bits=1)

    flipped = having(change=flip)
    found = compare_runs(run(), run(change=flipped)).verdict
    assert "equal bit by bit: the gradient of net.weight, at step 2" in str(found.report)
    assert compare_runs(run(moved=0), run(change=flipped, moved=0)).verdict.kind == "undecided"


def test_another_environment_is_named():
    second = run(change=other)
    second.environment = {"torch": "2.14.0", "NCCL_ALGO": "Ring"}
    report = str(compare_runs(run(), second).verdict.report)
    assert (
        "a possible cause: the environments differ: torch is 2.14.0, and was 2.13.0 in a.trace; NCCL_ALGO is" in report
    )


def test_the_elements_that_differ():
    save = pytest.importorskip("safetensors.torch").save
    one = torch.arange(1.0, 25).reshape(6, 4)
    second = one.clone()
    second[2:4, 1] *= 3
    data = save({"1/gradient/w": one}), save({"1/gradient/w": second})
    found = described(data, ("1/gradient/w",) * 2, 1e-6)
    assert found.startswith("2 of 24 elements differ (dim 0: 2 to 3 of 6, dim 1: 1 of 4), the largest difference is")
    assert found.endswith("at [3, 1]: 42 instead of 14")
    assert described((data[0], None), ("1/gradient/w",) * 2, 1e-6) is None


def test_two_traces_are_compared_without_torch_if_their_bits_are_equal(tmp_path):
    for name in ("a.trace", "b.trace"):
        write_run(tmp_path / name, run())
    code = "import sys; from mgpu_check.__main__ import main; print(main(), 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, "compare", *(str(tmp_path / name) for name in ("a.trace", "b.trace"))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "bit by bit" in done and done.splitlines()[-1] == "0 False"


def head_alone(path, **other):
    """A trace without its steps."""
    write_run(path, run())
    with zipfile.ZipFile(path) as file:
        head = json.loads(file.read("trace.json"))
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("trace.json", json.dumps(head | other))


def of_version(number, path):
    head_alone(path, version=number, mgpu_check="9.0")


def truncated(path):
    write_run(path, run())
    path.write_bytes(path.read_bytes()[:-100])


def spoiled(path):
    write_run(path, run())
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def other_zip(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.txt", "a")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "there is no file b.trace; make one with mgpu-check record --out=b.trace"),
        (lambda path: path.mkdir(), "there is no file b.trace"),
        (lambda path: path.write_text("hello"), "b.trace is no trace of a run, or is truncated; give a file that"),
        (truncated, "b.trace is no trace of a run, or is truncated; give a file that mgpu-check record has written"),
        (spoiled, "b.trace is "),
        (head_alone, "b.trace is a damaged trace (KeyError"),
        (other_zip, "b.trace has no trace.json: it is no trace of a run"),
        (partial(of_version, 3), "b.trace has version 3 of the format, written by mgpu-check 9.0; mgpu-check"),
        (partial(of_version, 1), "reads version 2: record it again, with mgpu-check record or compare --update"),
    ],
)
def test_a_file_that_is_no_trace_is_wrong_usage(make, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a.trace", run())
    make(tmp_path / "b.trace")
    assert main(["compare", "a.trace", "b.trace"]) == 4
    assert words in capsys.readouterr().err
    assert main(["compare", "--golden=b.trace", "--gpus=1", "--", "a.py"]) == 4


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "no program given"),
        (["a.py"], "--out is missing: give the trace to write, as in --out=a.trace"),
        (["--out=/no/such/folder/a.trace", "a.py"], "there is no directory /no/such/folder"),
        (["--values=many", "a.py"], "'many' is not a size; give bytes, or a number with KB, MB or GB"),
        (["--out=a.trace", "--gpus=0", "a.py"], "'0' is not a number of ranks"),
        (["--out=a.trace", "nowhere.py"], "no such script: nowhere.py"),
    ],
)
def test_wrong_usage_of_record(argv, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("a.py").touch()
    assert main(["record", *argv]) == 4
    assert words in capsys.readouterr().err


def test_a_commit_that_is_not_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("a.py").touch()
    for words in (
        ["init", "--quiet"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm1", "--allow-empty"],
    ):
        subprocess.run(["git", *words], check=True)
    assert main(["compare", "--against=nowhere", "--gpus=1", "a.py"]) == 4
    assert "has no commit 'nowhere'; give a branch, a tag, or a commit of git log" in capsys.readouterr().err
    assert main(["compare", "--against=HEAD", "--gpus=1", "a.py"]) == 4
    assert "there is no a.py in HEAD (" in capsys.readouterr().err
