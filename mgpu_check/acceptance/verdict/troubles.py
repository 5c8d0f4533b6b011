"""Turn the error of a call without results into observations: failed if a GPU is at fault, else unknown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mgpu_check.acceptance.checklist import CHECKLIST
from mgpu_check.devices.observations import Observation, Outcome, Subject
from mgpu_check.engine.failures import NODE, Account, Who
from mgpu_check.errors import RankFailure, RankHang, StartupFailure
from mgpu_check.processes.signals import FROM_OUTSIDE

_OF_GROUPS = "DistBackendError"
_OF_DEVICES = ("AcceleratorError", _OF_GROUPS, "DeferredCudaCallError")
"""Errors of torch that report a failed device, or failed communication between devices."""

_REFUSALS = ("DeviceRefused", *_OF_DEVICES)
"""Causes of a failed start of a rank that put its device at fault."""


@dataclass
class ErrorObservations:
    """The observations that follow from an error.

    Attributes:
        lost: GPUs that no longer answer.
    """

    observations: list[Observation] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)


def observations_of(error: BaseException, check: str, what: str, gpus: Sequence[int]) -> ErrorObservations | None:
    """Return the observations for an error of a call on ranks or in the node process; None for any other error.

    Args:
        what: name of the function that was called.
        gpus: GPUs of the ranks in their order, or all GPUs that the node process sees.
    """
    trouble = ErrorObservations()
    if isinstance(error, StartupFailure):
        _refused(trouble, check, error, gpus)
        return trouble
    account = getattr(error, "account", None)
    if not isinstance(error, (RankFailure, RankHang)) or not isinstance(account, Account):
        return None
    what = what.strip("_").replace("_", " ")
    # A rank may have waited for others, or died of their data, so a group is accused; the caller then probes each GPU
    # alone.
    alone = len(gpus) == 1 or CHECKLIST[check].alone
    for rank, died in account.died.items():
        whose = "its process" if alone else Who(len(gpus))([rank])
        if died.exit_code is not None and -died.exit_code in FROM_OUTSIDE:
            seen = f"{whose} was ended from outside in {what}: {died.cause}"
            _add(trouble, check, rank, gpus, seen, "ended", outcome="unknown")
            continue
        seen = f"{whose} died in {what}: {died.cause}"
        _add(trouble, check, rank if alone else NODE, gpus, seen, "died", lost=alone)
    for rank, raised in account.raised.items():
        failure = raised.failure
        kind = failure.type.rpartition(".")[2]
        if kind in _OF_DEVICES:
            mine = alone or kind != _OF_GROUPS
            seen = f"{what} raised {failure.headline}"
            _add(trouble, check, rank if mine else NODE, gpus, seen, "raised", lost=kind == "AcceleratorError")
        else:
            _add(trouble, check, rank, gpus, f"{what} could not run: {failure.headline}", "raised", outcome="unknown")
    if account.hung is not None:
        late = f"{what} did not end within {account.hung:g} s"
        if (
            alone and len(gpus) > 1 and not account.finished
        ):  # no GPU shows that the time suffices: the host may be busy
            _add(trouble, check, NODE, gpus, f"{late} on any GPU", "hung", outcome="unknown")
        else:
            for rank in account.interrupted if alone else [NODE]:
                _add(trouble, check, rank, gpus, late, "hung", lost=alone)
    if not trouble.observations:
        seen = f"{what} could not run: {str(error).splitlines()[0]}"
        _add(trouble, check, NODE, gpus, seen, "raised", outcome="unknown")
    return trouble


def _refused(trouble: ErrorObservations, check: str, error: StartupFailure, gpus: Sequence[int]) -> None:
    """Add observations for ranks that did not start: only a device that refuses every process is at fault."""
    seen = str(error).splitlines()[0]
    for rank in error.ranks or [NODE]:
        wrong = error.cause in _REFUSALS and rank != NODE
        _add(trouble, check, rank, gpus, seen, "refused", outcome="failed" if wrong else "unknown", lost=wrong)


def _add(
    trouble: ErrorObservations,
    check: str,
    rank: int,
    gpus: Sequence[int],
    seen: str,
    ended: str,
    *,
    outcome: Outcome = "failed",
    lost: bool = False,
) -> None:
    if rank != NODE:
        subjects = [Subject("gpu", (gpus[rank],))]
        trouble.lost |= {gpus[rank]} if lost else set()
    elif outcome == "failed":
        subjects = [Subject("group", tuple(gpus))]
    else:
        subjects = [Subject("gpu", (number,)) for number in gpus]
    for subject in subjects:
        trouble.observations.append(Observation(check, subject, outcome, seen, evidence={"ended": ended}))
