"""An error of a call: whose fault it is, as far as that can be known."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from mgpu_check.acceptance.verdict.troubles import ErrorObservations, observations_of
from mgpu_check.devices.observations import Subject
from mgpu_check.engine.failures import NODE, Account, Died, Finished, Interrupted, Raised, Who
from mgpu_check.errors import RankDied, RankFailure, RankHang, StartupFailure
from mgpu_check.processes.protocol import RaisedInRank

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


@pytest.mark.parametrize(
    ("ending", "deadline"),
    [(Died("signal 9", ""), None), (Interrupted(20.0, ""), 20.0), (raised("torch.AcceleratorError"), None)],
)
@pytest.mark.parametrize("check", ["memory", "performance"])
def test_a_gpu_that_fails_by_itself_is_lost(ending: Any, deadline: float | None, check: str) -> None:
    trouble = failed({0: Finished(), 1: ending, 2: Finished()}, deadline, check)
    assert seen(trouble) == [("failed", ONE)]
    assert trouble.lost == {5}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("check", ["memory", "collectives"])
def test_a_rank_that_was_ended_from_outside_accuses_nobody(number: signal.Signals, check: str) -> None:
    ended = Died(f"signal {number.name}", "", exit_code=-number)
    trouble = failed({0: Finished(), 1: ended, 2: Finished()}, check=check)
    assert seen(trouble) == [("unknown", ONE)]
    assert f"was ended from outside in examine it: signal {number.name}" in trouble.observations[0].seen
    assert not trouble.lost


@pytest.mark.parametrize(("ending", "deadline"), [(Died("signal 6", ""), None), (Interrupted(20.0, ""), 20.0)])
@pytest.mark.parametrize("check", ["collectives", "training", "soak", "links"])
def test_who_waits_for_others_or_dies_of_what_they_sent_is_not_accused(
    ending: Any, deadline: float | None, check: str
) -> None:
    trouble = failed({0: Finished(), 1: ending, 2: Finished()}, deadline, check)
    assert seen(trouble) == [("failed", ALL)]
    assert not trouble.lost


def test_an_error_of_communication_is_of_the_group_and_one_of_a_device_is_not() -> None:
    assert seen(failed({1: raised("torch.distributed.DistBackendError")}, check="training")) == [("failed", ALL)]
    assert seen(failed({1: raised("torch.AcceleratorError")}, check="training")) == [("failed", ONE)]


def test_an_error_of_the_check_leaves_its_gpu_unknown() -> None:
    assert seen(failed({1: raised("ZeroDivisionError")})) == [("unknown", ONE)]


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
