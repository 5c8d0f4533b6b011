"""Traces of runs, and comparisons of a run with a run."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from mgpu_check.compare.traces.files import RecordedRun, read_run
from mgpu_check.compare.traces.run_comparison import compare_runs
from tests.compare.conftest import script

CHANGES = {
    "": ("equal", None, None, None),
    "renamed": ("equal", None, None, None),
    "micro-batches": ("equal", None, None, None),
    "foreach": ("equal", None, None, None),
    "validated": ("equal", None, None, None),
    "seed": ("differs", 1, "before", "first.bias"),
    "not-divided": ("differs", 1, "gradient", "first.weight"),
    "summed": ("differs", 1, "gradient", "first.weight"),
    "scaled-activation": ("differs", 1, "gradient", "first.weight"),
    "other-batch": ("differs", 2, "gradient", "second.weight"),
    "frozen": ("differs", 2, "gradient", "second.bias"),
    "momentum-lost": ("differs", 2, "parameter", "second.bias"),
    "other-optimizer": ("differs", 1, "parameter", "second.bias"),
    "learning-rate": ("differs", 3, "parameter", "second.weight"),
}
SLOW = (
    *("micro-batches", "foreach", "validated", "seed", "not-divided"),
    *("other-batch", "frozen", "other-optimizer", "learning-rate"),
)
_recorded: dict[str, RecordedRun] = {}


@pytest.fixture
def recorded(python, tmp_path):
    """Record the script with a change, once for all tests."""

    def recorded(change: str) -> RecordedRun:
        if change not in _recorded:
            tmp_path.joinpath("train.py").write_text(script("changes"))
            gpus = 2 if change in ("", "summed") else 1
            words = [f"--gpus={gpus}", "--out=a.trace", *["--no-rounding"] * bool(change), "--", "train.py", change]
            code, stdout, stderr = python("-m", "mgpu_check", "record", *words, processes=4 if not change else gpus + 1)
            assert code == 0, stdout + stderr
            _recorded[change] = read_run(tmp_path / "a.trace")
        return _recorded[change]

    return recorded


@pytest.mark.parametrize(
    "change", [pytest.param(change, marks=[pytest.mark.slow] if change in SLOW else []) for change in CHANGES]
)
def test_a_change_is_right_or_parts_at_its_step(change, recorded):
    verdict = compare_runs(recorded(""), recorded(change)).verdict
    assert (verdict.kind, verdict.step, verdict.tensor, verdict.parameter) == CHANGES[change]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("scaled-activation", "the first output that differs is that of second, on rank 0 (norm: "),
        ("summed", "the outputs of 3 modules are right, so the error is in the loss, the backward pass or a reduction"),
    ],
)
def test_the_outputs_of_a_wrong_gradient(change, said, recorded):
    """The samples are divided among the ranks of one run; with values, also the elements that differ are known."""
    said, known = f"forward: {said}", compare_runs(recorded(""), recorded(change)).verdict.report.known
    assert [line for line in known if line.startswith(said)], known


@pytest.fixture
def command(python):
    """Run ``mgpu-check WORDS...``, which starts `processes` of a script, and return what it has written."""

    def command(*words: str, code: int, processes: int) -> str:
        exited, stdout, stderr = python("-m", "mgpu_check", *words, processes=processes)
        assert exited == code, (stdout + stderr).decode()
        return (stdout + stderr).decode()

    return command


@pytest.mark.slow
def test_the_run_of_a_commit(command, tmp_path, monkeypatch):
    """It finds the module of the commit, and shares the data that git ignores."""
    here = tmp_path / "train.py"
    here.write_text("import size\n" + script("changes").replace("lr=0.05", "lr=size.RATE"))
    tmp_path.joinpath("size.py").write_text("RATE = 0.05\n")
    tmp_path.joinpath(".gitignore").write_text("data\n__pycache__\n")
    tmp_path.joinpath("data").mkdir()
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message=first")
    tmp_path.joinpath("size.py").write_text("RATE = 0.04\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    text = command("compare", "--against=HEAD", "--gpus=1", "--steps=2", "--", "train.py", code=1, processes=3)
    assert "uncommitted changes are part of the run of the working tree: size.py" in text
    assert "both runs share what git ignores: data" in text
    assert "differs: step 1: second.bias after the update is" in text
    assert re.search(r"the learning rate of .* is 0.04 on rank 0, and 0.05 in HEAD \([0-9a-f]{9}\)", text)
    assert len(git(tmp_path, "worktree", "list").splitlines()) == 1
    here.write_text(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n" + here.read_text())
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--all", "--message=second")
    text = command("compare", "--against=HEAD", "--gpus=1", "--steps=1", "--", "train.py", code=2, processes=1)
    assert "the working tree equals the commit: both runs are of the same files" in text
    assert "size.py from the working tree, so it did not run the commit" in text


def git(directory, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=directory, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.slow
def test_a_golden_trace(command, tmp_path, monkeypatch):
    tmp_path.joinpath("train.py").write_text(script("changes"))
    words = ("compare", "--golden=golden.trace", "--gpus=1")
    text = command(*words, "--update-golden", "--steps=2", "--", "train.py", code=0, processes=2)
    assert "recorded: train.py: 1 rank, 2 steps: golden.trace" in text
    text = command(*words, "--steps=all", "--", "train.py", code=4, processes=1)
    assert "--steps=all: the golden trace golden.trace ends after 2 steps, as recorded; leave --steps out" in text
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    text = command(*words, "--", "train.py", code=0, processes=1)
    assert "equal: 2 steps on 1 rank train the same 4 parameters as in golden.trace, bit by bit" in text
    text = command(*words, "--json=out.json", "--", "train.py", "frozen", code=1, processes=1)
    assert "differs: step 2: the gradient of second.bias is different on 1 rank" in text
    assert "a possible cause: the environments differ: NCCL_ALGO is Ring, and was not set in golden.trace" in text
    found = json.loads(tmp_path.joinpath("out.json").read_text())
    assert (found["verdict"], found["step"], found["parameter"]) == ("differs", 2, "second.bias")


@pytest.mark.slow
def test_two_sets_of_arguments(command, tmp_path):
    """And a script without seeds, whose run is not repeatable."""
    tmp_path.joinpath("train.py").write_text(script("changes"))
    words = ("--gpus=1", "--steps=2")
    text = command("compare", *words, "--a=", "--b=micro-batches", "--", "train.py", code=0, processes=3)
    assert "equal: 2 steps on 1 rank train the same 4 parameters as in --a, within rounding" in text
    words_of_both = ("--a=foreach", "--b=micro-batches", "--bitwise", "--", "train.py")
    text = command("compare", *words, *words_of_both, code=1, processes=3)
    assert "is not equal bit by bit, though all is within rounding" in text
    text = command("compare", "--gpus=2", "--bitwise", "--", "train.py", code=4, processes=0)
    assert "--bitwise is for two runs" in text
    tmp_path.joinpath("train.py").write_text(script("changes").replace("torch.manual_seed(", "torch.seed() or ("))
    text = command("record", *words, "--out=a.trace", "--", "train.py", code=2, processes=2)
    assert "not recorded: not repeatable: run twice on one device, first.weight had different values before" in text
    tmp_path.joinpath("train.py").write_text("import torch\nraise OSError('no data')")
    text = command("record", *words, "--out=a.trace", "--", "train.py", code=1, processes=1)
    assert "not recorded: on one device the script failed: rank 0 ended" in text and "OSError: no data" in text
    assert not tmp_path.joinpath("a.trace").exists()


def test_a_space_of_arguments(command, tmp_path):
    """Two options that are wrong together only. Then nothing is left of them, and last the file is no space."""
    both = '"summed" if {"--a", "--b"} <= {*sys.argv} else ""'
    tmp_path.joinpath("train.py").write_text(script("changes").replace('(sys.argv[1:] or [""])[0]', both))
    space = '[space]\n"--a" = [false, true]\n"--b" = [false, true]\n'
    words = ("compare", "--gpus=2", "--steps=1", "--space=space.toml", "--json=space.json", "--", "train.py")
    tmp_path.joinpath("space.toml").write_text(space)
    text = command(*words, code=1, processes=10)
    assert "--a --b: differs: step 1: the gradient of" in text
    assert "train.py: 2 equal, 1 differs; differs with: --a --b" in text
    assert json.loads(tmp_path.joinpath("space.json").read_text())["differs_with"] == ["--a --b"]
    tmp_path.joinpath("space.toml").write_text(f'{space}[[refused]]\n"--a" = true\n[[refused]]\n"--b" = true\n')
    assert "[[refused]] leaves nothing to compare" in command(*words, code=4, processes=0)
    tmp_path.joinpath("space.toml").write_text('"--a" = 1')
    assert "is no space of options; give a table [space]" in command(*words, code=4, processes=0)


EQUAL = "equal: 2 steps on 4 ranks train the same {} parameters as in --a"
WRONG = "differs: step 1: the gradient of"
MESHES = {
    ("fsdp1", "fsdp2"): EQUAL.format(6),
    ("dtensor", "by-hand"): EQUAL.format(8),
    ("by-hand", "dtensor scaled"): "it is wrong where the index along dp is 1",
    ("pipeline", "pipeline wrong-group"): WRONG,
    # dp4, tp4 and dp2 x tp2
    ("by-hand:1", "by-hand:4"): EQUAL.format(8),
    ("by-hand:1", "dtensor:4"): EQUAL.format(8),
    ("by-hand:1", "by-hand"): EQUAL.format(8),
    ("by-hand:4", "dtensor"): EQUAL.format(8),
    ("by-hand:1", "by-hand:4 no-reduction"): WRONG,
    ("by-hand:1", "by-hand no-average"): WRONG,
    ("by-hand:4", "by-hand wrong-group"): WRONG,
    # dp4 and pp2 x dp2
    ("pipeline:1", "pipeline"): EQUAL.format(16),
    ("pipeline:1", "pipeline no-average"): WRONG,
    ("pipeline:1", "pipeline scaled"): WRONG,
    # dp4, ep4 and ep2 x dp2
    ("experts:1", "experts-alone"): EQUAL.format(12),
    ("experts:4", "experts-alone"): EQUAL.format(12),
    ("experts:1", "experts-alone:4"): EQUAL.format(12),
    ("experts:1", "experts-alone no-average"): WRONG,
    ("experts:1", "experts-alone wrong-group"): WRONG,
}


@pytest.mark.slow
@pytest.mark.parametrize(("a", "b"), MESHES)
def test_two_meshes(a, b, command, tmp_path):
    """Tensor parallelism by hand and by DTensor, FSDP of both kinds, and a pipeline: right, and with a mistake."""
    tmp_path.joinpath("train.py").write_text(script("divided"))
    words = "--gpus=4", "--simulate", "--steps=2"
    code = 0 if MESHES[a, b].startswith("equal") else 1
    text = command("compare", *words, f"--a={a}", f"--b={b}", "--", "train.py", code=code, processes=17)
    assert MESHES[a, b] in text


@pytest.mark.slow
def test_slices_that_no_run_shows_are_compared_rank_by_rank(command, tmp_path):
    tmp_path.joinpath("train.py").write_text("import os\nassert os.environ['WORLD_SIZE'] == '2'\n" + script("divided"))
    words = "--gpus=2", "--simulate", "--steps=2", "--a=by-hand", "--b=by-hand scaled"
    text = command("compare", *words, "--", "train.py", code=1, processes=12)
    assert "differs: step 1: the gradient of 1.up.weight (rank 1) is 2 times as large on rank 1" in text
    assert text.count("no run with whole parameters shows which slices they are") == 2
