"""Launch a script on the devices, by torchrun or by its own spawning, and check the reports of its ranks.

Run as a program, this module acts as torchrun, but imports torch only once, because its ranks are forks.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import GradientMismatch, RankDied, ReplicaMismatch, ShardError
from mgpu_check.processes.environments import simulating, without_launcher
from mgpu_check.processes.heap import importing
from mgpu_check.simulated import simulated_device_count

SCRIPT = str(Path(__file__).absolute().parents[1] / "recipes" / "distributed_script.py")

_TOLERANCE = 1e-9
"""Relative tolerance of the losses in float64: about 10^5 operations round by 2^-53 each; an extra sample changes
10^-3."""
_OF_A_RANK, _OF_A_RANK_FOR_SPEED, _STEPS = 16, 256, 8
"""Samples per batch and rank for the check of results, the same for the timing, and batches per epoch."""


@dataclass(frozen=True)
class Launched:
    """The reports of the ranks of a run, in rank order."""

    reports: tuple[Mapping[str, Any], ...]

    @property
    def seconds(self) -> float:
        """The time of an epoch on the slowest rank: the median over epochs, without the slowest epoch."""
        epochs = sorted(max(times) for times in zip(*(report["seconds"] for report in self.reports), strict=True))[:-1]
        return float(epochs[len(epochs) // 2])


def arguments_for(count: int, *, speed: bool = False) -> list[str]:
    """Return arguments of the script that give `count` ranks together the same batches as a single rank.

    With `speed`, for a timing, the GPU needs longer for a batch than its collation takes: a batch needs about 10^11
    operations. In each rank, the samples of an epoch take 16 MiB per rank of the world.
    """
    batch = count * (_OF_A_RANK_FOR_SPEED if speed else _OF_A_RANK)
    others = ["--width=2048", "--layers=16"] if speed else ["--dtype=float64"]
    return [f"--batch-size={batch}", f"--samples={_STEPS * batch}", *others]


def launched(way: str, worlds: Sequence[int], arguments: Sequence[str], *, simulated: bool) -> list[Launched]:
    """Run the script in worlds of the given sizes, one after the other, each on the first of the visible devices.

    Args:
        way: "torchrun", or "spawn", where the script starts one rank per visible GPU.

    Raises:
        RankDied: a run failed, with its output, or a rank wrote no report.
    """
    runs = []
    with tempfile.TemporaryDirectory(prefix="mgpu-check-") as directory:
        reports = [Path(directory) / str(world) for world in worlds]
        for report in reports:
            report.mkdir()
        if way == "torchrun":
            tasks = [[world, [*arguments, f"--report={report}"]] for world, report in zip(worlds, reports, strict=True)]
            _run([sys.executable, "-m", __name__, json.dumps(tasks)], seeing(max(worlds), simulated), directory)
        else:
            for world, report in zip(worlds, reports, strict=True):
                command = [sys.executable, SCRIPT, *arguments, "--spawn", f"--report={report}"]
                _run(command, seeing(world, simulated), directory)
        for world, report in zip(worlds, reports, strict=True):
            files = [report / f"rank{rank}.json" for rank in range(world)]
            silent = [rank for rank, file in enumerate(files) if not file.exists()]
            if silent or len(list(report.iterdir())) > world:
                trained_ranks = ", ".join(sorted(file.stem for file in report.iterdir())) or "none"
                raise RankDied(f"{way}: of {world} ranks these have trained to the end: {trained_ranks}", ranks=silent)
            runs.append(Launched(tuple(json.loads(file.read_text()) for file in files)))
    return runs


def seeing(count: int, simulated: bool) -> dict[str, str]:
    """Return the environment of a program that sees the first `count` devices and was not started by a launcher."""
    environment = simulating(without_launcher(os.environ), count if simulated else None)
    environment.setdefault("OMP_NUM_THREADS", "1")
    # The agent counts GPUs by NVML, because a process that has used the CUDA driver cannot fork ranks.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if not simulated:
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        entries = [str(index) for index in range(count)] if listed is None else listed.split(",")[:count]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(entries)
    return environment


def _run(command: Sequence[str], environment: Mapping[str, str], temporary: str) -> None:
    """Run a program with `temporary` as its directory for temporary files, such as the logs of torchrun's agent."""
    root = str(Path(__file__).parents[3])
    own = {"PYTHONPATH": os.pathsep.join([*filter(None, [environment.get("PYTHONPATH")]), root]), "TMPDIR": temporary}
    done = subprocess.run(list(command), env={**environment, **own}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RankDied(f"the script ended with exit code {done.returncode}:\n{done.stdout[-500:]}{done.stderr[-4000:]}")


def assert_trained(way: str, runs: Sequence[Launched]) -> None:
    """Assert that the ranks of each run had the right places, and trained as one device does.

    Each rank must have its RANK, LOCAL_RANK and WORLD_SIZE, the common MASTER_ADDR and MASTER_PORT, and its model on
    its own device. All ranks must end with the same parameters, bit for bit. The loss must fall to less than half, and
    must be the same in runs of all sizes.
    """
    for run in runs:
        _assert_places(way, run)
        reference, label = run.reports[0], f"{way}, {len(run.reports)} ranks"
        for rank, report in enumerate(run.reports):
            for key in ("parameters", "losses"):
                if report[key] != reference[key]:
                    text = f"rank {rank} ended with different {key} than rank 0: {report[key]}, rank 0 {reference[key]}"
                    raise ReplicaMismatch(f"{label}: {text}", ranks=(rank,))
        losses = reference["losses"]
        if not losses[-1] < losses[0] / 2:
            raise GradientMismatch(f"{label}: the loss does not fall below half its start: {losses}")
        alone = runs[0].reports[0]["losses"]
        for epoch, (loss, expected) in enumerate(zip(losses, alone, strict=True)):
            if not math.isclose(loss, expected, rel_tol=_TOLERANCE):
                raise GradientMismatch(
                    f"{way}: the loss of epoch {epoch} is {loss!r} on {len(run.reports)} ranks, but {expected!r} on "
                    f"{len(runs[0].reports)}, with batches of the same samples"
                )


def speed_of(runs: Sequence[Launched], simulated: bool) -> str:
    """Return a line with the time of an epoch on one device and on several; on real devices also the speedup."""
    counts = [len(run.reports) for run in runs]
    durations = ", ".join(
        f"{run.seconds:.3f} s on {count} device{'s' * (count > 1)}" for run, count in zip(runs, counts, strict=True)
    )
    if simulated:
        return f"an epoch takes {durations}; simulated, so that says nothing about speed"
    times = runs[0].seconds / runs[-1].seconds
    return f"an epoch takes {durations}: {times:.2f} times as fast, efficiency {times / counts[-1]:.0%}"


def assert_rank_is_told(rank: Rank) -> None:
    """Assert that this process has the environment variables of its rank, as under torchrun, and that torch agrees."""
    import torch.distributed as dist

    of_host: list[Any] = [None] * rank.size
    dist.all_gather_object(of_host, (rank.node_index, os.environ.get("LOCAL_RANK")))
    beside = [local for node, local in of_host if node == rank.node_index]
    expected = {
        "RANK": rank.index,
        "LOCAL_RANK": rank.local_index,
        "WORLD_SIZE": rank.size,
        "LOCAL_WORLD_SIZE": len(beside),
        "GROUP_RANK": rank.node_index,
    }
    texts = [
        f"{name} is {os.environ.get(name)!r}, expected '{wanted}'"
        for name, wanted in expected.items()
        if os.environ.get(name) != str(wanted)
    ]
    if len(set(beside)) < len(beside):
        texts.append(f"ranks of its host have LOCAL_RANK {beside}")
    index, size, local = identity = (dist.get_rank(), dist.get_world_size(), dist.get_node_local_rank())
    if identity != (rank.index, rank.size, rank.local_index):
        taken = f"rank {index} of {size}, with local rank {local}, expected {rank.local_index}"
        texts.append(f"torch.distributed takes it for {taken}")
    if texts:
        raise RankDied(f"rank {rank.index} of {rank.size}: {texts[0]}", ranks=(rank.index,))


def assert_samplers_cover(rank: Rank) -> None:
    """Assert that a `DistributedSampler` gives each replica as many samples, and all of them each sample, for data sets
    larger and smaller than the number of replicas; with `drop_last` no sample twice."""
    from torch.utils.data import DistributedSampler  # the program imports torch later

    for samples, replicas, drop_last in itertools.product((1, 2, 3, 5, 8, 13), (1, 2, 3, 5, 8), (False, True)):
        data: Any = range(samples)
        every = range(replicas)
        samplers: list[Any] = [DistributedSampler(data, replicas, index, True, 7, drop_last) for index in every]
        indices = [list(sampler) for sampler in samplers]
        shared_out = [index for own in indices for index in own]
        is_right = len(set(map(len, indices))) == 1 and len(shared_out) - samples in range(1 - replicas, replicas)
        is_right &= len(set(shared_out)) == (len(shared_out) if drop_last else samples)
        if not is_right or [len(sampler) for sampler in samplers] != list(map(len, indices)):
            case = f"DistributedSampler of {samples} samples for {replicas} replicas, drop_last={drop_last}"
            raise ShardError(f"{case} gives {indices}", ranks=[rank.index])


def assert_trains_under_torchrun(rank: Rank, count: int) -> str:
    """Assert that the script trains on `count` devices like on one under torchrun's agent; see `assert_trained`. Return
    the time of an epoch on one device and on all, in words."""
    simulated, worlds = simulated_device_count() is not None, sorted({1, count})
    runs = launched("torchrun", worlds, arguments_for(count), simulated=simulated)
    assert_trained("torchrun", runs)
    if not simulated:
        # The model of the tutorials is too small to measure the speed of real devices.
        runs = launched("torchrun", worlds, arguments_for(count, speed=True), simulated=False)
    return speed_of(runs, simulated)


def assert_trains_when_spawned(rank: Rank, count: int) -> None:
    """Assert that the script trains if it spawns a rank for each of `count` visible devices; see `assert_trained`."""
    simulated = simulated_device_count() is not None
    assert_trained("spawn", launched("spawn", [count], arguments_for(count), simulated=simulated))


def _assert_places(way: str, run: Launched) -> None:
    world = len(run.reports)
    for rank, report in enumerate(run.reports):
        environment = report["environment"]
        expected = {"rank": rank, "world_size": world, "device": f"cuda:{rank}", "current_device": rank}
        if way == "torchrun":
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            # One host, one role, and the first start, because scripts that resume read the number of restarts.
            numbers |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": world}
            numbers |= {"TORCHELASTIC_RESTART_COUNT": 0}
            expected |= {name: str(value) for name, value in numbers.items()}
        for name, wanted in expected.items():
            got = report.get(name, environment.get(name))
            if got != wanted:
                raise RankDied(f"{way}: rank {rank} of {world}: {name} is {got!r}, expected {wanted!r}", ranks=(rank,))
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            of_first = run.reports[0]["environment"][name]
            if not environment[name] or environment[name] != of_first:
                text = f"{name} is {environment[name]!r}, on rank 0 {of_first!r}"
                raise RankDied(f"{way}: rank {rank} of {world}: {text}", ranks=(rank,))


def _rank(arguments: Sequence[str]) -> None:
    """Run the script in a rank that torchrun's agent has started."""
    sys.argv = [SCRIPT, *arguments]
    runpy.run_path(SCRIPT, run_name="__main__")


def _fail(index: int, culprit: int, how: str) -> None:
    """Fail in the process with the index `culprit`: raise, exit, or kill the process."""
    if index != culprit:
        return
    if how == "raises":
        raise LookupError("planted")
    if how == "exits":
        os._exit(7)
    os.kill(os.getpid(), signal.SIGKILL)


def _require_failures_told() -> None:
    """Require that the caller of `start_processes`, which `mp.spawn` uses, learns which process has failed, and how."""
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

    expected = {"raises": "LookupError: planted", "exits": "exit code 7", "is killed": "signal SIGKILL"}
    for culprit, (how, wanted) in itertools.product((0, 1), expected.items()):
        report = "nothing"
        try:
            start_processes(_fail, (culprit, how), nprocs=2, start_method="fork")
        except ProcessRaisedException as error:
            report = f"rank {error.error_index}: {str(error).strip().splitlines()[-1]}"
        except ProcessExitedException as error:
            end = f"signal {error.signal_name}" if error.signal_name else f"exit code {error.exit_code}"
            report = f"rank {error.error_index}: {end}"
        if report != f"rank {culprit}: {wanted}":
            subject = f"start_processes of two processes, where rank {culprit} {how}"
            raise RankDied(f"{subject}: it reports {report}, expected {wanted}", ranks=(culprit,))


def main(tasks: Sequence[tuple[int, list[str]]]) -> None:
    """Launch the script for each task (number of processes, arguments), one by one; then processes that fail."""
    with importing():
        import torch._dynamo  # noqa: F401  # or DistributedDataParallel would import it in each rank
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for world, arguments in tasks:
        meeting = {"run_id": f"mgpu-check-{os.getpid()}", "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
        options: dict[str, Any] = {"start_method": "fork", "max_restarts": 0, "monitor_interval": 0.02, **meeting}
        elastic_launch(LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=world, **options), _rank)(arguments)
    _require_failures_told()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # skips torch's slow shutdown, because the check waits for the end of this process
