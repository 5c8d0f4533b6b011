"""An error of a call: whose fault it is, as far as that can be known."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from mgpu_check.acceptance import node
from mgpu_check.acceptance.node import ErrorObservations, observations_of
from mgpu_check.acceptance.plan import Plan
from mgpu_check.acceptance.run_report import Gpu, RunLog
from mgpu_check.devices.observations import Observation, Subject
from mgpu_check.engine.failures import NODE, Account, Died, Finished, Interrupted, Raised, Who
from mgpu_check.errors import RankDied, RankFailure, RankHang, StartupFailure
from mgpu_check.option_values import Level
from mgpu_check.processes.channel import RaisedInRank
from mgpu_check.settings import Settings

GPUS = (4, 5, 6)


def failed(endings: dict[int, Any], deadline: float | None = None, check: str = "memory") -> ErrorObservations:
    error: BaseException = RankHang("late") if deadline else RankFailure("wrong")
    error.account = Account(endings, Who(len(GPUS)), deadline=deadline)  # type: ignore[attr-defined]
    found = observations_of(error, check, "_examine_it", GPUS)
    assert found is not None
    return found


def raised(kind: str) -> Raised:
    return Raised(RaisedInRank("error", kind, "said", "", "", 0, None))


def seen(trouble: ErrorObservations) -> list[tuple[str, Subject]]:
    return [(entry.outcome, entry.subject) for entry in trouble.observations]


ONE = Subject("gpu", (5,))
ALL = Subject("group", GPUS)


KILLED, LATE, CRASHED = (Died("signal 9", ""), None), (Interrupted(20.0, ""), 20.0), (Died("signal 6", ""), None)
OF_COMMUNICATION = (raised("torch.distributed.DistBackendError"), None)
OF_A_DEVICE, OF_THE_CHECK = (raised("torch.AcceleratorError"), None), (raised("ZeroDivisionError"), None)


@pytest.mark.parametrize(
    ("checks", "endings", "outcome", "subject"),
    [
        # A GPU that fails by itself is lost.
        ("memory performance", (KILLED, LATE, OF_A_DEVICE), "failed", ONE),
        # Who waits for others, or dies of what they sent, is not accused.
        ("collectives training soak links", (CRASHED, LATE), "failed", ALL),
        ("training", (OF_COMMUNICATION,), "failed", ALL),
        ("training", (OF_A_DEVICE,), "failed", ONE),
        ("memory", (OF_THE_CHECK,), "unknown", ONE),
    ],
    ids=["alone", "in a group", "communication", "device", "check"],
)
def test_the_end_of_a_rank_is_of_its_gpu_or_of_the_group(
    checks: str, endings: Any, outcome: str, subject: Subject
) -> None:
    for check, (ending, deadline) in itertools.product(checks.split(), endings):
        trouble = failed({0: Finished(), 1: ending, 2: Finished()}, deadline, check)
        assert seen(trouble) == [(outcome, subject)], (check, ending)
        assert trouble.lost == ({5} if (outcome, subject) == ("failed", ONE) else set())


def test_a_call_that_ends_in_time_on_no_gpu_accuses_none() -> None:
    """Only a GPU that has ended in time shows that the time suffices on this host."""
    late = Interrupted(20.0, "")
    trouble = failed(dict.fromkeys(range(3), late), 20.0)
    assert seen(trouble) == [("unknown", Subject("gpu", (gpu,))) for gpu in GPUS] and not trouble.lost
    assert trouble.observations[0].seen == "examine it did not end within 20 s on any GPU"
    assert failed({0: Finished(), 1: late, 2: late}, 20.0).lost == {5, 6}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("check", ["memory", "collectives"])
def test_a_rank_that_was_ended_from_outside_accuses_nobody(number: signal.Signals, check: str) -> None:
    ended = Died(f"signal {number.name}", "", exit_code=-number)
    trouble = failed({0: Finished(), 1: ended, 2: Finished()}, check=check)
    assert seen(trouble) == [("unknown", ONE)]
    assert f"was ended from outside in examine it: signal {number.name}" in trouble.observations[0].seen
    assert not trouble.lost


def test_a_node_process_that_dies_says_nothing_of_one_gpu() -> None:
    assert seen(failed({NODE: Died("signal 11", "")}, check="links")) == [("failed", ALL)]


@pytest.mark.parametrize(
    ("cause", "outcome"), [("DeviceRefused", "failed"), ("DeviceBusy", "unknown"), ("", "unknown")]
)
def test_a_device_that_refuses_a_process_is_at_fault_unless_others_use_it(cause: str, outcome: str) -> None:
    error = StartupFailure("rank 1 of 3 could not start", ranks=[1])
    error.cause = cause
    trouble = observations_of(error, "memory", "examine", GPUS)
    assert trouble is not None
    assert seen(trouble) == [(outcome, ONE)]
    assert trouble.lost == ({5} if outcome == "failed" else set())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x"), RankDied("without an account")])
def test_other_errors_are_not_noted(error: BaseException) -> None:
    assert observations_of(error, "memory", "examine", GPUS) is None


class LatePool:
    """The part of a pool that a node uses: a call on several GPUs is late on all, and a probe on some."""

    def __init__(self, *silent: int) -> None:
        self.silent = silent
        self.probed: list[int] = []
        self.limits: list[float] = []

    def run(self, fn: Any, *args: Any, devices: Sequence[int], timeout: float, **more: Any) -> list[Any]:
        if len(devices) == 1:
            self.probed += devices
            self.limits.append(timeout)
        if len(devices) == 1 and devices[0] not in self.silent:
            return [[Observation("memory", Subject("gpu", (0,)), "passed")]]
        hang, late = RankHang("late"), dict.fromkeys(range(len(devices)), Interrupted(20.0, ""))
        hang.account = Account(late, Who(len(devices)), deadline=20.0)
        raise hang


@pytest.mark.parametrize(
    ("level", "load", "given", "limit"),
    [
        ("quick", 1.0, None, 20.0),
        ("quick", 4.0, None, 40.0),
        ("quick", 80.0, None, 60.0),
        ("quick", 4.0, 5.0, 5.0),
        ("standard", 1.0, None, 120.0),
        ("standard", 1.0, 60.0, 60.0),
    ],
)
def test_calls_get_more_time_on_a_busy_host(
    monkeypatch: pytest.MonkeyPatch, level: Level, load: float, given: float | None, limit: float
) -> None:
    origins = {} if given is None else {"rank_timeout": "command line"}
    settings = Settings(gpu_level=level, rank_timeout=given or 60.0, origins=origins)
    monkeypatch.setattr(node, "active", lambda: settings)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert node.seconds_for_a_call() == limit


def test_after_a_call_that_was_late_on_all_gpus_each_is_asked_whether_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node, "seconds_for_a_call", lambda: 60.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for silent, load, limit in (((), 1.0, 10.0), ((1,), 5.0, 25.0), ((), 80.0, 60.0)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        pool, log = LatePool(*silent), RunLog()
        gpus = [Gpu(number, 0, number, "GPU", f"uuid-{number}") for number in range(3)]
        here = node.Node(pool, log, gpus, Plan("quick", 0.9, None, "cpu"))  # type: ignore[arg-type]
        assert here.on_ranks("memory", print) == []
        assert pool.probed == [0, 1, 2] and pool.limits == [limit] * 3, "longer on a busy host"
        failed = [entry.subject for entry in log.observations() if entry.outcome == "failed"]
        assert failed == [Subject("gpu", (gpu,)) for gpu in silent] and here.lost == set(silent)
        assert sum(entry.outcome == "unknown" for entry in log.observations()) == 3
