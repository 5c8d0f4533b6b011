"""The meaning of launchers' variables."""

from __future__ import annotations

import pytest

from mgpu_check.engine.remote.launched_process import LaunchedProcess, first_host, launched_process_of

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "alpha",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "1001",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
CLASSIC = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


def test_of_torchrun():
    launched = LaunchedProcess("torchrun", 5, 8, 1, 4, 1, "alpha", 29500, has_store=True, final=False, run="none")
    assert launched_process_of(TORCHRUN) == launched and not launched.alone
    assert launched_process_of({**TORCHRUN, "RANK": "1", "WORLD_SIZE": "4"}).alone


def test_torchrun_may_keep_its_store_for_itself_and_is_final_without_restarts():
    launched = launched_process_of({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert launched is not None and not launched.has_store and not launched.final
    launched = launched_process_of({**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "0"})
    assert launched is not None and launched.has_store and launched.final


def test_runs_of_one_user_are_told_apart():
    """A proof made with the user's key for one run is invalid in another."""
    others = [{**TORCHRUN, "TORCHELASTIC_RUN_ID": "other"}, {**TORCHRUN, "MASTER_PORT": "29501"}, SLURM, CLASSIC]
    others += [{**SLURM, "SLURM_STEP_ID": "3", "MASTER_PORT": "29500"}, {**SLURM, "MASTER_PORT": "29500"}]
    runs = [launched_process_of(variables) for variables in (TORCHRUN, *others)]
    assert len({run.identity for run in runs if run is not None}) == len(runs)


def test_of_srun():
    launched = launched_process_of(SLURM)
    assert launched is not None
    assert (launched.launcher, launched.rank, launched.size, launched.local_rank, launched.node) == ("srun", 3, 4, 1, 1)
    assert launched.address == "gpu07"  # where rank 0 is, and not where srun was called
    assert launched.final
    found = [launched_process_of({**SLURM, "SLURM_PROCID": str(rank)}) for rank in range(4)]
    assert {one and one.port for one in found} == {launched.port}
    assert 15_000 <= launched.port < 31_000


def test_of_the_classic_variables():
    assert launched_process_of(CLASSIC) == LaunchedProcess("variables", 1, 2, None, None, None, "job-master-0", 23456)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**CLASSIC, "WORLD_SIZE": "1", "RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "2"},  # what some tests set, with nowhere to meet
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1001"},  # the script of sbatch is no step
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --pty bash
    ],
)
def test_alone(environment):
    assert launched_process_of(environment) is None


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({**CLASSIC, "RANK": "2"}, "rank 2 of 2"),
        ({**CLASSIC, "MASTER_PORT": "http"}, "MASTER_PORT: 'http'"),
        ({name: value for name, value in TORCHRUN.items() if name != "RANK"}, "RANK is not set"),
    ],
)
def test_variables_that_cannot_be(environment, text):
    with pytest.raises(ValueError, match=text):
        launched_process_of(environment)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node[01-03,07],gpu5", "node01"),
        ("gpu[7,9]", "gpu7"),
        ("a,b", "a"),
        ("rack[2-3]-gpu", "rack2-gpu"),
        ("10.0.0.4", "10.0.0.4"),
    ],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first
