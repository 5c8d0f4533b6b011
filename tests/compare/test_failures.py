"""`mgpu-check compare` where a run does not come to its end; and where it is called wrongly."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile

import pytest

from mgpu_check.__main__ import main as command
from mgpu_check.cli.compare import _parser
from mgpu_check.cli.run_options import script_command

STEP = "    optimizer.step()\n"
START = ("-m", "mgpu_check", "compare", "--gpus=2", "--", "train.py")


DIES = (
    "import atexit, os, signal\nif os.environ['RANK'] == '1': atexit.register(os.kill, os.getpid(), signal.SIGABRT)\n"
)
"""As interpreters are that end with a process group, now and then."""


def test_a_script_that_raises_on_a_rank(compare, by_hand, changed):
    script = changed(by_hand, (STEP, STEP + "    if rank == 1 and start == 8: raise RuntimeError('out of paper')\n"))
    outcome = compare(DIES + script, code=1)
    assert "differs: on 2 ranks the script failed: rank 1 ended with signal SIGABRT after step 2" in outcome.text
    assert "RuntimeError: out of paper" in outcome.text
    assert (outcome.json["step"], outcome.json["ranks"]) == (3, [1])


def test_a_rank_that_fails_before_it_makes_its_group(compare, by_hand):
    """It is no script of one process, as one of DataParallel is, which would agree with itself."""
    fails = "import os\nif os.environ['WORLD_SIZE'] != '1': raise RuntimeError('out of paper')\n"
    outcome = compare(fails + by_hand, code=1)
    assert "differs: on 2 ranks the script failed" in outcome.text
    assert [run["label"] for run in outcome.json["runs"]] == ["one device", "2 ranks"]


@pytest.mark.slow
def test_all_ranks_on_one_device(compare, tutorial, changed):
    outcome = compare(
        changed(tutorial, ('torch.device("cuda", int(os.environ["LOCAL_RANK"]))', 'torch.device("cuda", 0)')),
        "--simulate",
        code=1,
    )
    assert "differs: on 2 ranks the script failed" in outcome.text
    assert "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 0" in outcome.text


@pytest.mark.slow
def test_a_rank_that_is_killed_when_the_script_is_over(compare, by_hand):
    outcome = compare(DIES + by_hand, code=0)
    assert outcome.json["headline"].startswith("equal: 3 steps on 2 ranks")
    assert "rank 1 of the run “2 ranks” ended with signal SIGABRT after the script had ended" in outcome.text
    ends = [(rank["end"], rank["exit_code"]) for rank in outcome.json["runs"][1]["ranks"]]
    assert ends == [("finished", 0), ("finished", -signal.SIGABRT)]


def test_a_script_that_raises_on_one_device(compare):
    outcome = compare("import torch\nraise SystemExit('not today')\n", code=2)
    assert "not comparable: on one device the script failed: rank 0 ended with exit code 1" in outcome.text
    assert "not today" in outcome.text
    assert "torch sees no GPU here; do: pass --simulate" in outcome.text
    assert len(outcome.json["runs"]) == 1


@pytest.mark.cold  # a process that stands for another computes nothing
def test_a_script_that_computes_for_too_long(compare):
    outcome = compare("import torch\nwhile True: torch.ones(9).sum()\n", "--timeout=5", code=2)
    assert "on one device the script was too slow: rank 0 was still computing before its first" in outcome.text
    assert "do: pass a larger --timeout, or arguments that make it fast" in outcome.text


@pytest.mark.cold
@pytest.mark.slow  # beside one device
def test_ranks_that_compute_for_too_long(compare, by_hand, changed):
    long = "    while rank == 1 and start == 8: pass\n    optimizer.zero_grad()\n"
    outcome = compare(changed(by_hand, ("    optimizer.zero_grad()\n", long)), "--timeout=25", code=2)
    assert "not comparable: on 2 ranks the script was too slow: rank 1 was still computing after step 1" in outcome.text


@pytest.mark.slow
def test_a_script_that_hangs_on_a_rank(compare, by_hand, changed):
    wait = "    if rank == 1 and start == 8:\n        import threading; threading.Event().wait()\n"
    outcome = compare(
        changed(by_hand, ("    optimizer.zero_grad()\n", wait + "    optimizer.zero_grad()\n")), "--timeout=10", code=1
    )
    assert "on 2 ranks the script hung: rank 1 made no progress after step 1, in wait (train.py:20)" in outcome.text
    assert "rank 0 made no progress after step 1, in all_reduce (train.py:" in outcome.text
    assert [rank["end"] for rank in outcome.json["runs"][1]["ranks"]] == ["hung", "hung"]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_an_interrupted_command_leaves_nothing(number, begin, tmp_path, by_hand, changed):
    """The script reports through a pipe that a rank is at work, and waits for its end."""
    os.mkfifo(tmp_path / "at-work")
    wait = "open('at-work', 'w').close(); dist.barrier(); import threading; threading.Event().wait()"
    tmp_path.joinpath("train.py").write_text(changed(by_hand, (STEP, f"{STEP}    if world > 1: {wait}\n")))
    with tempfile.TemporaryFile() as output:
        command = begin(START, output, output, processes=3)
        with open(tmp_path / "at-work"):
            os.kill(command.pid, number)
        code = command.wait()
        output.seek(0)
        text = output.read().decode()
    if number == signal.SIGKILL:
        assert code == -number  # its ranks see that it is gone
    else:
        assert code == 130, text
        assert "no verdict: interrupted in run 2; one device and ranks were not compared" in text
        assert "interrupted; all processes are ended" in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("", "no program given"),
        ("--gpus=1 a.py", "'1' is not a number of ranks to compare with one device"),
        ("--gpus=two a.py", "'two' is not a number of ranks"),
        ("--simulate=tpu a.py", "'tpu' is not a backing device"),
        ("--steps=0 a.py", "'0' is not a number of steps"),
        ("--timeout=never a.py", "'never' is not a time"),
        ("--unjudged=head a.py", "'head' lacks a pattern or a reason; give PATTERN=reason"),
        ("--html=/no/such/folder/o.html a.py", "there is no directory /no/such/folder"),
        ("-- -m", "-m needs the name of a module"),
        ("nowhere.py", "no such script: nowhere.py"),
        ("-- torchrun --nnodes=2", "torchrun --nnodes=2 names no Python script: compare starts the ranks"),
        ("-- sh train.sh", "sh is a program, but compare runs Python scripts only: give the script that it starts"),
        ("-- horovodrun -np 2 python a.py", "in place of horovodrun: Horovod's ranks find each other"),
        ("-- srun -l env LR=1 python a.py", "set the variables before mgpu-check"),
        ("-- srun numactl --cpunodebind=0 a.py", "numactl before the script would have no effect"),
        ("-- python -m torch.distributed.launch a.py", "add --use-env"),
        ("--gpus=3 -- a.py --b={64/W}",
         "{64/W} is not an integer for W = 3; choose a number of ranks that divides it, or write {64//W}"),
        ("--gpus=3 -- a.py {W/0}", "{W/0} is not a valid expression for W = 1"),
        ("--gpus=3 -- a.py {W(2)}", "{W(2)} is not a valid expression for W = 1"),
        ("a.trace b.trace --such", "unrecognized arguments: --such"),
        ("a.trace", "1 traces given: a.trace; give two: compare A.trace B.trace"),
        ("--golden=g a.trace b.trace", "two traces are compared without running a script; only"),
        ("--golden=g --against=HEAD a.py", "--against and --golden say what to compare with"),
        ("--a= a.py", "argument --a: --a and --b are the arguments of two runs; give both"),
        ("--a=--tp=2 a.py", "--a and --b are the arguments of two runs; give both"),
        ("""--a="'" --b=1 a.py""", "--a=': No closing quotation; give the arguments as in a shell"),
        ("--a={3/W} --b=1 a.py", "{3/W} is not an integer for W = 2"),
        ("--update-golden a.py", "--update-golden writes the file of --golden; give --golden=FILE"),
        ("--golden=g.trace a.py", "--golden=g.trace: there is no such file; write it with"),
        ("--against=HEAD a.py", "is in no git repository; run this in the repository of the script"),
    ],
)  # fmt: skip
def test_wrong_usage(argv, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("a.py").touch()
    assert command(["compare", *shlex.split(argv)]) == 4
    assert words in capsys.readouterr().err


def test_the_python_of_a_script_may_be_named(tmp_path, monkeypatch):
    """As in a line that is copied from elsewhere: each rank is that Python."""
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("train.py").touch()
    found, *words = script_command(["python3", "-u", "train.py", "--lr=1"], _parser())
    assert os.path.samefile(found, sys.executable) and words == ["-u", "train.py", "--lr=1"]
    words = ["torchrun", "--nproc-per-node=2", "--module", "pkg.train", "--lr=1"]
    assert script_command(words, _parser()) == [sys.executable, "-m", "pkg.train", "--lr=1"]
    assert script_command(["train.py"], _parser()) == [sys.executable, "train.py"]


def test_a_page_without_the_extra_is_wrong_usage_before_anything_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    tmp_path.joinpath("train.py").write_text("raise SystemExit('it has run')")
    assert command(["compare", f"--html={tmp_path}/o.html", "--", str(tmp_path / "train.py")]) == 4
    stopped = capsys.readouterr()
    assert "a page needs jinja2, not installed here; do: pip install 'mgpu-check[report]'" in stopped.err
    assert "it has run" not in stopped.out + stopped.err and not tmp_path.joinpath("o.html").exists()


def test_an_error_of_the_command_itself_is_no_difference(monkeypatch, tmp_path, capsys):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("of our own")

    monkeypatch.setattr("mgpu_check.compare.comparison.compare", broken)
    tmp_path.joinpath("train.py").touch()
    assert command(["compare", "--", str(tmp_path / "train.py")]) == 3
    errors = capsys.readouterr().err
    assert "ZeroDivisionError: of our own" in errors
    assert "mgpu-check compare: internal error" in errors


def test_a_reader_that_has_left_is_no_error(tmp_path):
    code = "import os, sys; from mgpu_check.__main__ import main; r, w = os.pipe(); os.dup2(w, 1); os.close(w); os.close(r)"
    (tmp_path / "train.py").touch()
    words = [sys.executable, "-c", f"{code}; sys.exit(main(['compare', '--', 'train.py']))"]
    ended = subprocess.run(words, cwd=tmp_path, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")
