"""The `mgpu-check` command, as a user calls it, from a directory that is not the checkout."""

from __future__ import annotations

import os
import re

import pytest

from mgpu_check.cli import accept, selftest, suite
from mgpu_check.cli.selftest import ALONE, CAUGHT, PASSED, PropertyMatrix, Selftest
from mgpu_check.oracles.strategies import examples
from mgpu_check.settings import resolve
from mgpu_check.suite.common.faults.registry import all_faults
from tests.plugin.conftest import wait_for


@pytest.mark.parametrize(
    ("words", "code", "texts"),
    [
        ("--help", 0, ["compare", "devices", "selftest", "simulate", "--gpus=4 --simulate", "-k NAME"]),
        ("selftest --help", 0, ["--quick", "--all-pairs", "--seeds=N", "--gpus=N", "exit codes:"]),
        ("--version", 0, ["mgpu-check 0."]),
        (
            *("device", 4),
            ["'device' is no command; choose one of accept, compare, devices, doctor, init, model, pytest, record, "],
        ),
        ("selftest -n 2", 4, ["plants faults in one process, and cannot use several: leave out -n 2"]),
    ],
)
def test_what_needs_no_run(command, words, code, texts):
    text = command(*words.split(), code=code)
    assert all(each in text for each in texts)


def test_one_property_from_anywhere(command, tmp_path):
    """A pytest.ini of the current directory changes nothing, and arguments go to pytest."""
    tmp_path.joinpath("pytest.ini").write_text("[pytest]\ngpus = nonsense\naddopts = --no-such-option\n")
    junit = tmp_path / "out.xml"
    text = command("--gpus=3", "--simulate", "-k", "scatter and tutorial", f"--junitxml={junit}")
    assert 'name="mgpu_check.property" value="scatter"' in junit.read_text()
    assert "SIMULATED node of 3 GPUs on cpu" in text
    assert re.search(r"^\[1/1\] scatter: 1 passed \(\d+ examples, ", text, re.MULTILINE)
    assert re.search(
        r"^property +checks +examples +seconds +result\nscatter +1 +\d+ +[\d.]+ +1 passed$", text, re.MULTILINE
    )
    assert "1 checks of 1 properties, " in text and "-v shows each check" in text
    assert "1 passed" in text.splitlines()[-1]
    assert "3 SIMULATED GPUs" in text.splitlines()[-1]
    assert {*tmp_path.iterdir()} == {junit, tmp_path / "pytest.ini"}  # a run leaves nothing where it was started
    lines = text.splitlines()
    said = [number for number, line in enumerate(lines) if line.startswith("level quick: ")]
    assert all("--gpu-level=standard draws four times as many" in lines[number] for number in said)
    first = next(number for number, line in enumerate(lines) if line.startswith("[1/1] "))
    assert said[0] < first < said[1], "before the first check, and at the end"
    assert lines[first - 1].startswith("1 checks; ")
    assert said[1] == len(lines) - 2
    assert "a failed check shows" not in text


def test_a_failed_check_is_shown_at_once_and_below_its_property(command, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "breaks.py").write_text(
        "import pytest\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_runtest_call(item):\n"
        "    assert 'gpus_are' not in item.name, 'planted'\n"
    )
    text = command(
        *("--gpus=2", "--simulate", "test_fixtures.py", "test_scatter.py", "test_collectives.py", "-p", "breaks"),
        *("-k", "test_memory_is_counted or test_gpus_are or tutorial or test_functional_collectives"),
        code=1,
    )
    assert re.search(r"^\[1/4\] FAILED       fixtures: .*\n\[2/4\] fixtures: 1 FAILED, 1 passed ", text, re.MULTILINE)
    assert re.search(r"^fixtures +2 +\d+ +[\d.]+ +1 FAILED, 1 passed\n +FAILED: `gpus`", text, re.MULTILINE)
    (advice,) = [line for line in text.splitlines() if "a failed check shows" in line]
    assert "the code or torch is wrong, or the machine below the simulated GPUs" in advice
    assert "run mgpu-check accept" in advice and "second look" not in text
    assert "1 failed, 3 passed" in text.splitlines()[-1]
    assert "warning" not in text, "the suite calls old names of torch, and torch warns of them"


def test_a_killed_run_leaves_no_directory(command, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "killer.py").write_text(
        "import os\n"
        "def pytest_runtest_logreport(report):\n"
        "    if report.when == 'call':\n"
        f"        found = [name for name in os.listdir({str(temporary)!r}) if name.startswith('mgpu-check-')]\n"
        "        assert len(found) == 2, 'of Hypothesis, and of the ranks'\n"
        "        os.kill(os.getpid(), 9)\n"
    )
    command("--gpus=2", "--simulate", "test_scatter.py", "-k", "tutorial", "-p", "killer", code=-9)
    wait_for(lambda: not list(temporary.glob("mgpu-check-*")))


def test_without_gpus_all_that_are_visible_are_meant(command, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    text = command("-k", "tutorial", code=pytest.ExitCode.USAGE_ERROR)
    assert "mgpu-check: counting the GPUs of this machine" in text and "Traceback" not in text
    assert "--gpus=all (default of mgpu-check), but this process sees 0 GPUs: none" in text
    assert "or simulate them: --gpus=4 --simulate" in text


def test_accept_without_arguments_takes_all_gpus(monkeypatch):
    ran: list[list[str]] = []

    def run(arguments, *_):
        ran.append(arguments)
        return 0

    monkeypatch.setattr(accept, "run", run)
    accept.main([])
    assert {"--gpus=all", "--gpu-level=standard"} <= set(ran[0])


def test_what_is_missing_or_unknown_is_named_with_a_remedy(command):
    """`test_arguments.py` has the first of each command."""
    levels = "glance|quick|standard|long"
    for flag, value in (("--gpus", "N|all"), ("--rank-timeout", "SECONDS"), ("--gpu-level", levels)):
        assert suite.misuse([flag]).startswith(f"{flag} needs a value: {flag}={value}")
    for words, name, some in (((), "", "test_scatter.py"), (("accept",), "test_nowhere.py", "test_memory.py")):
        text = command(*words, "--gpus=2", "--simulate", name, code=4)
        assert re.search(
            rf"'{name}' is neither a file nor a module; choose one of .*{some}.* or checks by -k NAME", text
        )


def test_devices_says_what_there_is(command, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    text = command("devices")
    assert text.startswith("torch 2.")
    assert "CUDA_VISIBLE_DEVICES=''" in text
    assert "no GPU is visible" in text


@pytest.mark.slow
def test_selftest_of_one_check_by_seeds_asks_for_its_own_faults_only(command):
    text = command("selftest", "--seeds=3", "test_mismatch.py::test_gpu_scalars_are_no_numbers")
    assert re.search(r"^  gpu-scalars-taken-for-numbers +3 ", text, re.MULTILINE), text
    assert "3 of 3 pairs are caught by 19 of 20 of the seeds 0 to 2" in text
    assert "NOT PROVEN" not in text and " 1 checks: every fault is caught, every check catches one" in text


@pytest.mark.slow
def test_selftest_plants_what_strikes_in_larger_worlds_where_there_are_as_many_gpus(command):
    few = command("selftest", "test_scatter.py::test_shards_cover_the_batch")
    assert "left out, because they occur in larger worlds only: last-shards-swapped" in few
    assert "last-shards-swapped  " not in few
    enough = command("selftest", "--gpus=5", "--simulate", "test_scatter.py::test_shards_cover_the_batch")
    assert re.search(r"^  last-shards-swapped +x ", enough, re.MULTILINE), enough
    assert "left out" not in enough


@pytest.mark.parametrize(("caught", "of", "enough"), [(19, 20, True), (18, 20, False), (5, 5, True), (4, 5, False)])
def test_a_check_must_catch_a_fault_by_19_of_20_seeds(caught, of, enough):
    one = next(iter(all_faults().values()))
    matrix = PropertyMatrix(one.property, [one], list(one.caught_by[:1]))
    for number in range(of):
        matrix.add(one.name, one.caught_by[0], CAUGHT if number < caught else PASSED)
    assert (list(matrix.not_proven()) == []) is enough
    assert any(f"{one.name} " in line and f" {caught} " in line for line in matrix.lines())


def test_nothing_is_asked_of_a_fault_whose_checks_were_deselected():
    first, second = (
        one for one in all_faults().values() if one.name in ("mean-instead-of-sum", "reduce-add-misses-a-device")
    )
    matrix = PropertyMatrix("allreduce", [first, second], ["test_all_reduce"], complete=False)
    assert list(matrix.not_proven()) == ["no check of allreduce catches the fault mean-instead-of-sum"]
    matrix.add("mean-instead-of-sum", "test_all_reduce", CAUGHT)
    assert list(matrix.not_proven()) == []


@pytest.mark.slow
def test_selftest_asks_nothing_of_pairs_that_were_deselected(command):
    """A word of -k stands for faults and for checks: what it leaves of either is no whole."""
    text = command("selftest", "test_allreduce.py", "-k", "mean-instead-of-sum or test_ring_allreduce")
    assert "NOT PROVEN" not in text
    assert re.search(r"selftest: 2 of \d+ faults, 2 checks: every fault is caught", text), text
    assert "sum-misses-the-last-rank" not in text


@pytest.mark.slow
def test_an_expression_may_be_the_name_of_a_file(command):
    text = command("selftest", "test_mismatch.py", "test_scatter.py", "-k", "test_mismatch.py", "--collect-only")
    assert "test_gpu_scalars_are_no_numbers" in text
    assert "test_scatter" not in text
    assert "NOT PROVEN" not in text, "nothing was to be run"


@pytest.mark.slow
def test_selftest_refuses_a_test_that_is_none_of_the_suite(command, tmp_path):
    (tmp_path / "test_mine.py").write_text("def test_of_mine(): pass")
    text = command("selftest", "test_mine.py", code=4)
    assert "test_mine.py::test_of_mine is not a check of the packaged suite, and no fault is planted for it" in text
    assert "give options only, or one of test_allreduce.py, test_collectives.py" in text


@pytest.mark.slow  # beside `test_selftest_of_no_check_at_all_fails`
def test_selftest_without_a_check_proves_nothing(command):
    text = command("selftest", "test_mismatch.py", "-k", "no_such_check", code=5)
    assert "every fault is caught" not in text


def test_selftest_of_no_check_at_all_fails(capsys):
    """As where another plugin takes all tests away."""
    assert not Selftest(all_faults()).print_verdict()
    assert "NOT PROVEN: no check was run" in capsys.readouterr().out


def test_selftest_fails_where_a_check_misses_what_it_must_catch(capsys):
    """Though another catches it, and it catches others."""
    selftest = Selftest(all_faults())
    scatter = selftest.matrices["scatter"]
    scatter.checks += ["test_shards_cover_the_batch", "test_gather_restores_the_batch"]
    for fault in scatter.faults:
        for check in scatter.checks:
            scatter.add(fault.name, check, CAUGHT)
    assert selftest.print_verdict()
    scatter.cells["shards-swapped", "test_shards_cover_the_batch"] = [PASSED]
    assert not selftest.print_verdict()
    assert (
        "test_shards_cover_the_batch does not catch the fault shards-swapped, which it must" in capsys.readouterr().out
    )


def test_selftest_fails_where_a_check_catches_nothing():
    one = next(one for one in all_faults().values() if one.name == "mean-instead-of-sum")
    matrix = PropertyMatrix("allreduce", [one], ["test_all_reduce", "test_ring_allreduce"])
    matrix.add("mean-instead-of-sum", "test_all_reduce", CAUGHT)
    assert list(matrix.not_proven()) == ["test_ring_allreduce catches no fault of allreduce"]


def test_selftest_of_all_pairs_wants_a_fault_that_each_check_catches_alone():
    faults = all_faults()
    mean, ring = faults["mean-instead-of-sum"], faults["ring-skips-a-chunk"]
    matrix = PropertyMatrix("allreduce", [mean, ring], ["test_all_reduce", "test_ring_allreduce"], all_pairs=True)
    for fault, outcomes in ((mean, CAUGHT + CAUGHT), (ring, PASSED + CAUGHT)):
        for check, outcome in zip(matrix.checks, outcomes, strict=True):
            matrix.add(fault.name, check, outcome)
    missing = "test_all_reduce catches no fault of allreduce that no other check catches"
    assert list(matrix.not_proven()) == [missing]
    rows = [line.split()[:3] for line in matrix.lines()]
    assert ["mean-instead-of-sum", CAUGHT, CAUGHT] in rows
    assert ["ring-skips-a-chunk", PASSED, ALONE] in rows
    matrix.deselected.add((ring.name, "test_tree_allreduce"))
    assert list(matrix.not_proven()) == [], "another check may catch it, and was not tried"
    assert ["ring-skips-a-chunk", PASSED, CAUGHT] in [line.split()[:3] for line in matrix.lines()]


@pytest.mark.parametrize(("level", "of_140", "of_5"), [("quick", 35, 5), ("standard", 140, 5), ("long", 1400, 50)])
def test_a_level_says_how_many_examples_the_suite_draws(monkeypatch, level, of_140, of_5):
    monkeypatch.setattr("mgpu_check.settings.active", lambda: resolve({"gpu_level": level}, {}, {}))
    assert (examples(140).max_examples, examples(5).max_examples) == (of_140, of_5)
    given = examples(140, quick=3).max_examples, examples(2, quick=3).max_examples
    assert given == ((3, 2) if level == "quick" else (of_140, of_140 // 70))


@pytest.mark.slow  # beside `test_a_level_says_how_many_examples_the_suite_draws`
def test_a_level_of_the_suite_that_was_asked_for_and_each_check(command, monkeypatch):
    monkeypatch.setenv("MGPU_CHECK_GPU_LEVEL", "standard")
    text = command("--gpus=2", "--simulate", "test_scatter.py", "-k", "tutorial", "-v")
    assert "[1/1] passed       scatter: The model inside DataParallel" in text
    assert re.search(r"^scatter +The model inside ", text, re.MULTILINE)
    assert "-v shows each check" not in text
    assert "level standard: " in text and "level quick" not in text
    lines = [line for line in text.splitlines() if line]
    assert "--gpu-level=long draws ten times as many" in lines[-2]


@pytest.mark.parametrize("module", [accept, selftest], ids=["accept", "selftest"])
def test_accept_and_selftest_find_what_is_rare_unless_they_are_told_otherwise(module, monkeypatch):
    ran: list[list[str]] = []

    def run(arguments, *_):
        ran.append(arguments)
        return pytest.ExitCode.INTERNAL_ERROR

    monkeypatch.delenv("MGPU_CHECK_GPU_LEVEL", raising=False)
    monkeypatch.setattr(module, "run", run)
    module.main(["--gpus=2", "--simulate"])
    module.main(["--gpus=2", "--simulate", "--gpu-level=quick"])
    monkeypatch.setenv("MGPU_CHECK_GPU_LEVEL", "long")
    module.main(["--gpus=2", "--simulate"])
    levels = [[word for word in words if word.startswith("--gpu-level")] for words in ran]
    assert levels == [["--gpu-level=standard"], ["--gpu-level=quick"], []]


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("arguments", "processors", "memory", "workers"),
    [
        ("--gpus=4 --simulate", 2, 24, "2"),
        ("--gpus=4 --simulate=cpu -x -v", 64, 512, "16"),
        ("--gpus=4 --simulate", 16, 11, "4"),
        ("--gpus=16 --simulate", 16, 24, "2"),
        ("--gpus=16 --simulate", 16, 20, ""),
        ("--gpus=all --simulate", 16, 24, ""),
        ("--gpus=4 --simulate", 16, None, "16"),
        ("--gpus=4 --simulate", 1, 24, ""),
        ("--gpus=4 --simulate", 8, 3, ""),
        ("--gpus=4", 8, 24, ""),
        ("--gpus=4 --simulate=cuda:0", 8, 24, ""),
        *((f"--gpus=4 --simulate {option}", 8, 24, "") for option in ("-n0", "-k scatter", "test_scatter.py", "-s")),
        *((f"--gpus=4 --simulate {option}", 8, 24, "") for option in ("--numprocesses=3", "-pno:xdist", "--pdb")),
    ],
)
def test_the_whole_simulated_suite_has_a_worker_for_each_processor(monkeypatch, arguments, processors, memory, workers):
    monkeypatch.setattr(suite, "available_processors", lambda: processors)
    monkeypatch.setattr(suite, "available_memory", lambda: memory and memory << 30)
    words = arguments.split()
    assert suite.on_processors(words) == [*(["-n", workers, "--gpu-keep-warm=0"] if workers else []), *words]


@pytest.mark.unmeasured
def test_workers_share_imports_unless_the_user_or_the_machine_is_against_it(monkeypatch, tmp_path):
    monkeypatch.setattr(suite, "available_processors", lambda: 8)
    monkeypatch.setattr(suite, "available_memory", lambda: None)
    words = ["--gpus=4", "--simulate"]
    assert suite.on_processors([*words, "--gpu-keep-warm=no"]) == ["-n", "8", *words, "--gpu-keep-warm=no"]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / f"mgpu-check-{os.geteuid()}").touch()
    assert suite.on_processors(words) == ["-n", "8", *words]


@pytest.mark.slow
def test_workers_of_the_simulated_suite_wait_for_no_devices_of_each_other(command):
    text = command("--gpus=2", "--simulate", "-n2", "test_scatter.py", "test_mismatch.py")
    assert "passed" in text and "waited" not in text
