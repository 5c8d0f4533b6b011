"""Other launchers: srun, and all that set the classic variables; and launches that cannot work."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.remote.conftest import KEY_FILE, LaunchedBy, free_port

TESTS = """
import os, time

import pytest, torch, torch.distributed as dist


def place(rank):
    x = torch.ones(2, device=rank.device)
    dist.all_reduce(x)
    return rank.index, rank.local_index, rank.node_index, os.environ["SLOT_OF_AGENT"], x[0].item()


def test_places(ranks):
    assert ranks.run(place) == EXPECTED


@pytest.mark.ranks(timeout=1)
def test_hangs(rank):
    if rank.index == 1:
        time.sleep(60)
"""


def of_srun(port: int) -> list[Mapping[str, str]]:
    common = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "gpu[1-2]",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    places = [("0", "0"), ("0", "1"), ("1", "0")]
    return [
        {**common, "SLURM_PROCID": str(rank), "SLURM_NODEID": node, "SLURM_LOCALID": local, "SLOT_OF_AGENT": local}
        for rank, (node, local) in enumerate(places)
    ]


def of_classic_variables(port: int, size: int = 2) -> list[Mapping[str, str]]:
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**common, "RANK": str(rank), "SLOT_OF_AGENT": str(rank)} for rank in range(size)]


@pytest.mark.parametrize(
    ("variables", "options", "expected"),
    [
        (of_srun, [], [(0, 0, 0, "0", 3.0), (1, 1, 0, "1", 3.0), (2, 0, 1, "0", 3.0)]),
        # Of one host, by its name.
        pytest.param(
            *(of_classic_variables, ["--trust-network"], [(0, 0, 0, "0", 2.0), (1, 1, 0, "1", 2.0)]),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(of_classic_variables, [], [(i, i, 0, str(i % 2), 4.0) for i in range(4)]), marks=pytest.mark.slow
        ),
    ],
    ids=["srun", "classic variables", "several ranks in each process"],
)
def test_ranks_are_where_the_launcher_put_them(
    variables, options: Sequence[str], expected: Sequence[object], tmp_path: Path, launched_by: LaunchedBy
):
    own = {KEY_FILE: ""} if options else {}
    port = free_port()
    processes = [{**each, **own} for each in variables(port)]
    launch = launched_by(
        processes, TESTS.replace("EXPECTED", repr(expected)), tmp_path, f"--gpus={len(expected)}", *options
    )
    run = launch.wait()
    # The top of the run, and the line that repeats a failure, say whether the run has a key that only its user can read.
    trusting = f"NETWORK TRUSTED: anyone who can reach 127.0.0.1:{port} can run code in this run (--trust-network)"
    assert (trusting in run.output) is bool(options)
    assert bool(re.search(r"mgpu_check pytest .*--trust-network", run.output)) is bool(options)
    assert (tmp_path / "agent-key").exists() is not bool(options)
    assert run.verdicts == {"test_places": "passed", "test_hangs": "failed"}, run.output
    assert run.codes == [1, *[0] * (len(processes) - 1)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus=3"], ["--gpus=3 (--gpus), but 2 ranks were launched", "use --gpus=2 or a multiple of it"]),
        (["--gpus=2", "-n2"], ["-n is for one machine"]),
    ],
)
def test_what_cannot_work_is_a_usage_error(options, said, tmp_path: Path, launched_by: LaunchedBy):
    run = launched_by(of_classic_variables(free_port()), TESTS, tmp_path, *options).wait()
    assert all(words in run.output for words in said), run.output
    assert run.codes == [4, 0]


def test_without_a_driver_all_end(tmp_path: Path, launched_by: LaunchedBy):
    source = "import os, signal\ndef test_it(ranks):\n    ranks.run(print)\n    os.kill(os.getpid(), signal.SIGKILL)"
    run = launched_by(of_classic_variables(free_port()), source, tmp_path, "--gpus=2").wait()
    assert "the driver ended without a result, by signal SIGKILL" in run.output
    assert run.codes == [70, 70]


def test_the_closing_table_says_of_which_node_a_check_is(tmp_path: Path, launched_by: LaunchedBy):
    suite = ("-v", "--pyargs", "mgpu_check.suite.fixtures.test_fixtures", "-k", "test_gpus_are_those_asked_for")
    run = launched_by(of_srun(free_port()), "", tmp_path, "--gpus=3", *suite).wait()
    assert run.codes == [0, 0, 0], run.output
    table = re.sub(r"\s+", " ", run.output.partition(" checks -")[2])  # its texts are wrapped
    assert [table.count(f"(node {node})") for node in (0, 1, 2)] == [1, 1, 0], run.output
