"""`mgpu-check accept`, as a user calls it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mgpu_check.acceptance.plan import Plan, Selection
from mgpu_check.acceptance.run import Run
from mgpu_check.cli import accept
from mgpu_check.devices.inventory import Slot
from mgpu_check.plugin.report.replay import CommandLine
from mgpu_check.settings import resolve

Command = Callable[..., str]

DO_NOTHING = """
from mgpu_check.acceptance.node import Node
def nothing(*_):
    return []
for name in ("on_ranks", "in_node_process"):
    call = lambda self, check, fn, *args, real=getattr(Node, name), **more: real(self, check, nothing, **more)
    setattr(Node, name, call)
"""
NODE = ("accept", "--gpus=2", "--simulate", "--gpu-level=quick")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"accept_for": "2x"}, "--for: '2x' is not valid; choose a time above 0 with its unit"),
        ({"gpu_level": "fast"}, "choose one of glance, quick, standard, long"),
        ({"accept_memory": "1"}, "choose a share of the free memory, above 0 and below 1"),
        ({"accept_report": ["a.pdf"]}, "choose a file whose name ends in .html, .json or .prom"),
        ({"accept_report": ["/no/such/a.json"]}, "--report: there is no directory /no/such"),
        ({"accept_plant": ["x"], "simulate": None}, "a defect is planted in a simulated node only; add --simulate"),
        ({"accept_plant": ["memory-stuck"]},
         "--plant: 'memory-stuck' is not a hardware fault; did you mean memory-stuck"),
        ({"accept_plant": ["slow-gpu:device=2"]}, "device=2 is not a GPU of this run; choose one of 0 to 1"),
        ({"accept_plant": ["copy-zeros:device=1,peer=1"]}, "device and peer are the same GPU; choose two"),
        ({"accept_plant": ["slow-gpu"], "simulate": "cuda:0"}, "hardware is simulated on the CPU only, not on cuda:0"),
        ({"accept_baseline": "/none.json"}, "--baseline: /none.json cannot be read"),
        ({"accept_policy": "/none.toml"}, "--policy: /none.toml cannot be read"),
        ({"accept_record_baseline": "/no/such/b.json"}, "--record-baseline: there is no directory /no/such"),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_value_is_refused_by_the_name_that_was_typed(given: dict[str, Any], told: str) -> None:
    typed = CommandLine(("accept",), (), "--accept-").origin_of
    with pytest.raises(ValueError, match=re.escape(told)):
        Plan.of(resolve({"gpus": "2", "simulate": "cpu", **given}, {}, {}, typed))


def test_nothing_is_planted_on_several_hosts() -> None:
    plan = Plan.of(resolve({"gpus": "2", "simulate": "cpu", "accept_plant": ["slow-gpu"]}, {}, {}))
    session: Any = SimpleNamespace(pool=SimpleNamespace(slots=(Slot(0, 0), Slot(1, 0))))
    with pytest.raises(ValueError, match=r"--plant: slow-gpu.* is planted in the simulated GPUs of one host.* has 2;"):
        Run(session, plan, "mgpu-check accept", None)


def test_a_wrong_call_is_exit_code_4(command: Command) -> None:
    text = command(*NODE, "-k", "nosuchcheck", code=4)
    assert "no check was selected; checks are inventory, memory," in text and "Traceback" not in text


def test_workers_of_xdist_are_refused() -> None:
    config: Any = SimpleNamespace(getoption=lambda name, default: {"dist": "load", "numprocesses": 2}[name])
    with pytest.raises(pytest.UsageError, match="uses all GPUs at once, and runs in one process: leave out -n 2"):
        accept._Ending().pytest_configure(config)


@pytest.mark.slow
def test_a_glance_finds_a_wrong_link_and_says_what_it_left_out(command: Command) -> None:
    text = command(*NODE[:3], "--gpu-level=glance", "--plant=copy-zeros:device=0,peer=1", code=1)
    assert text.splitlines()[-1] == (
        "REJECTED on 2 SIMULATED cpu GPUs: link GPU 0 -> GPU 1; only compute, health, inventory, links ran"
    )
    assert "at the level glance" in text
    assert [resolve({"gpu_level": level}, {}, {}).depth for level in ("glance", "long")] == ["quick", "long"]


def test_a_counter_that_grows_is_found_and_its_gpu_accused(command: Command) -> None:
    """A weekly run plants all faults."""
    text = command(*NODE, "--plant=ecc-uncorrected-grows:device=1", "-k", "health", code=1)
    assert text.splitlines()[-1] == "REJECTED on 2 SIMULATED cpu GPUs: GPU 1; only health ran"
    assert "  finding: MGPU-ECC-UNCORRECTED; severity reset, action reset-gpu" in text


def test_the_pytest_process_plans_an_acceptance_without_torch() -> None:
    code = (
        "import sys, mgpu_check.acceptance.run; from mgpu_check.acceptance.faults import all_hardware_faults as faults; "
        "from mgpu_check.acceptance.links import test_links; sys.exit(not faults() or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow  # most of it is the collection, as of a wrong call
def test_collecting_gives_no_verdict(command: Command) -> None:
    text = command(*NODE, "--collect-only")
    assert "test_memory.py" in text
    assert "ACCEPTED" not in text


def test_what_can_be_planted_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert accept.main(["--plant=list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    place = lines.index("copy-zeros:device=0,peer=2,above=0")
    assert lines[place + 1] == "    copies over a link deliver zeros"


@pytest.fixture
def spoiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have runs begin with this code, as a plugin of pytest."""

    def spoiled(code: str) -> None:
        (tmp_path / "spoiling.py").write_text(code)
        monkeypatch.setenv("PYTEST_ADDOPTS", "-p spoiling")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    return spoiled


@pytest.mark.slow
def test_a_check_that_returns_at_once_leaves_the_node_undecided(
    command: Command, spoiled: Callable[[str], None]
) -> None:
    """Every check of memory is called, and does nothing: that is no pass."""
    spoiled(DO_NOTHING)
    text = command(*NODE, "-k", "memory", code=2)
    assert "memory did less than its least work on GPU 0, GPU 1: 0 of " in text
    assert "INCONCLUSIVE" in text


@pytest.mark.slow
def test_an_error_of_a_check_itself_leaves_the_node_undecided(command: Command, spoiled: Callable[[str], None]) -> None:
    spoiled(
        "from mgpu_check.acceptance.node import Node\n\n"
        "real = Node.on_ranks\n\n"
        "def on_ranks(self, check, fn, *args, **more):\n"
        "    found = real(self, check, fn, *args, **more)\n"
        "    return found if check != 'memory' else found[0][7**7]\n\n"
        "Node.on_ranks = on_ranks\n"
    )
    text = command(*NODE, "-k", "memory and random", "-x", code=2)
    assert (
        "test_memory_holds_what_is_written[random] could not run: the check itself raised an error, shown above" in text
    )
    assert "interrupted" not in text  # by -x it is not
    assert "IndexError" in text


@pytest.mark.slow
def test_where_no_gpu_answers_any_more_the_rest_is_skipped_and_unknown(command: Command) -> None:
    text = command("accept", "--gpus=1", "--simulate", "--gpu-level=quick", "--plant=lost:device=0", code=1)
    assert "the check itself" not in text and "firmware" not in text
    assert "compute did less than its least work on GPU 0: 0 of 40 operations" in text
    assert "  do: drain the node, reset this GPU and run again; if it fails again, send it back" in text


@pytest.mark.slow
def test_a_gpu_whose_driver_hangs_from_the_start_is_named_with_its_finding_in_all_outputs(
    command: Command, tmp_path: Path
) -> None:
    files = "--verdict-file=verdict.txt", "--report=node.json"
    text = command(*NODE, "--plant=driver-hangs:device=1", "-k", "health", *files, code=1)
    last = text.rstrip().splitlines()[-1]
    assert last.startswith("REJECTED on 2 SIMULATED cpu GPUs: GPU 1")
    assert "serial SIMULATED-1; PCI 00000000:01:00.0" in text
    assert "  finding: MGPU-DRIVER-HANG; severity isolate, action restart-node" in text
    word, code, headline, host = (tmp_path / "verdict.txt").read_text().splitlines()
    assert (word, code, headline) == ("REJECTED", "exit code: 1", last)
    assert host.endswith(": REJECTED")
    (accusation,) = json.loads((tmp_path / "node.json").read_text())["verdict"]["accusations"]
    assert accusation["findings"] == ["MGPU-DRIVER-HANG"]
    assert (accusation["severity"], accusation["action"]) == ("isolate", "restart-node")


@pytest.mark.slow
def test_the_line_that_repeats_a_run_selects_the_same_checks(command: Command) -> None:
    given = [*NODE, "--memory=0.5", "--plant=memory-stuck-at-one", "--hypothesis-seed=7", "-p", "no:randomly"]
    given += ["-k", "memory and random", "--deselect=test_links.py", "test_memory.py"]
    lines = [line.strip() for line in command(*given, "--report=a.json", "-x", code=1).splitlines()]
    (again,) = (line.removeprefix("look again: ") for line in lines if line.startswith("look again: "))
    (repeat,) = (line.removeprefix("repeat: ") for line in lines if line.startswith("repeat: "))
    node = "--gpus=2 --simulate --gpu-level=quick --memory=0.5 --plant=memory-stuck-at-one -p no:randomly"
    selected = "--deselect=test_links.py test_memory.py --hypothesis-seed=7"
    assert repeat.partition(" accept ")[2] == f"{node} -k 'memory and random' {selected}"
    assert again.partition(" accept ")[2] == f"{node} -k '(memory and random) and (memory)' {selected}"


def test_a_selection_is_narrowed_and_quoted() -> None:
    assert Selection().added_to("mgpu-check accept") == "mgpu-check accept"
    assert Selection().narrowed(["links", "memory"]).added_to("x") == "x -k 'links or memory'"
    assert Selection("links").narrowed(["links"]) == Selection("links")
    assert Selection(mark="a b", files=("test_x.py::t[1]",)).added_to("x") == "x -m 'a b' 'test_x.py::t[1]'"


@pytest.mark.parametrize("spelling", ["--verdict-file=verdict.txt", "--accept-verdict-file=verdict.txt"])
@pytest.mark.parametrize("wrong", ["--for=2x", "--for=", "--plant=slow"])
def test_a_run_that_cannot_start_leaves_no_verdict_of_an_earlier_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spelling: str, wrong: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(accept, "run", lambda *_: 4)
    Path("verdict.txt").write_text("ACCEPTED\n")
    accept.main([*NODE[1:], spelling, wrong])
    assert not Path("verdict.txt").exists()
