"""The GPUs of an acceptance run: call checks on them, within the limits of the level, and record the observations.

The error of a call without results becomes observations, too: failed if a GPU is at fault, else unknown.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from mgpu_check.acceptance.plan import CHECKLIST, Plan
from mgpu_check.acceptance.run_report import Gpu, Host, RepeatableCall, RunLog
from mgpu_check.devices.observations import (
    MeasuredKind,
    Measurement,
    Observation,
    Outcome,
    Subject,
    SubjectResult,
    Work,
)
from mgpu_check.devices.telemetry.sampler import Snapshot
from mgpu_check.engine.failures import NODE, Account, Who
from mgpu_check.errors import RankFailure, RankHang, StartupFailure
from mgpu_check.option_values import Depth, depth_of
from mgpu_check.processes.child_processes import FROM_OUTSIDE
from mgpu_check.processes.rank_lists import grouped
from mgpu_check.settings import active
from mgpu_check.torch_hooks.patches import replaced

if TYPE_CHECKING:
    from mgpu_check.acceptance.machine.checks import KernelFacts
    from mgpu_check.acceptance.telemetry import Watch
    from mgpu_check.engine.pool import RankPool
    from mgpu_check.engine.rank_side.rank import Rank


SEEDS = st.integers(0, 2**16).filter(bool)
"""Seeds of data, except 0.

Hypothesis tries the simplest value first, so a property with one example would always draw 0
(hypothesis/internal/conjecture/engine.py, generate_new_examples, Hypothesis 6.170).
"""

_SECONDS = {"quick": 20.0, "standard": 120.0, "long": 600.0}


def drawn(*, quick: int, standard: int, long: int) -> settings:
    """Make Hypothesis settings for a property, with the given number of examples at each level.

    Examples are not shrunk: each covers all GPUs and records its failures, and second looks find the GPU at fault.
    There is no deadline, because ranks have their own; and no example database, because a run leaves no files in its
    directory.
    """
    return settings(
        max_examples={"quick": quick, "standard": standard, "long": long}[active().depth],
        phases=(Phase.explicit, Phase.generate),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def slowdown(most: float = math.inf) -> float:
    """Return how many processes share a core here, from 1 to `most`: ranks that wait for a core answer later."""
    return min(most, max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0))))


def seconds_for_a_call() -> float:
    """Return the seconds that a call on all GPUs may take: more on a busy host, at most ``--rank-timeout`` if given."""
    own = _SECONDS[active().depth] * slowdown(3.0)
    return min(own, active().rank_timeout) if active().given("rank_timeout") else own


_OF_GROUPS = "DistBackendError"
_OF_DEVICES = ("AcceleratorError", _OF_GROUPS, "DeferredCudaCallError")
"""Errors of torch that report a failed device, or failed communication between devices."""

_REFUSALS = ("DeviceRefused", *_OF_DEVICES)  # causes of a failed start of a rank that put its device at fault


@dataclass
class ErrorObservations:
    """The observations that follow from an error of a check on some GPUs."""

    check: str
    gpus: Sequence[int]
    observations: list[Observation] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)  # GPUs that no longer answer

    def add(self, rank: int, message: str, ended: str, outcome: Outcome = "failed", lost: bool = False) -> None:
        """Add the observation of a rank; for `NODE` that of the group, or of each GPU if it is unknown."""
        if rank != NODE:
            subjects = [Subject("gpu", (self.gpus[rank],))]
            self.lost |= {self.gpus[rank]} if lost else set()
        elif outcome == "failed":
            subjects = [Subject("group", tuple(self.gpus))]
        else:
            subjects = [Subject("gpu", (number,)) for number in self.gpus]
        for subject in subjects:
            self.observations.append(Observation(self.check, subject, outcome, message, evidence={"ended": ended}))


def observations_of(error: BaseException, check: str, call_name: str, gpus: Sequence[int]) -> ErrorObservations | None:
    """Return the observations for an error of a call of `call_name` on ranks or in the node process; None for any other
    error. `gpus` are those of the ranks in their order, or all that the node process sees."""
    trouble = ErrorObservations(check, gpus)
    if isinstance(error, StartupFailure):
        for rank in error.ranks or [NODE]:
            at_fault = error.cause in _REFUSALS and rank != NODE  # only a device that refuses every process
            outcome: Outcome = "failed" if at_fault else "unknown"
            trouble.add(rank, str(error).splitlines()[0], "refused", outcome, lost=at_fault)
        return trouble
    account = getattr(error, "account", None)
    if not isinstance(error, (RankFailure, RankHang)) or not isinstance(account, Account):
        return None
    call_name = call_name.strip("_").replace("_", " ")
    # A rank may have waited for others, or died of their data, so a group is accused; the caller then probes each GPU
    # alone.
    alone = len(gpus) == 1 or CHECKLIST[check].alone
    for rank, died in account.died.items():
        whose = "its process" if alone else Who(len(gpus))([rank])
        if died.exit_code is not None and -died.exit_code in FROM_OUTSIDE:
            message = f"{whose} was ended from outside in {call_name}: {died.cause}"
            trouble.add(rank, message, "ended", "unknown")
            continue
        message = f"{whose} died in {call_name}: {died.cause}"
        trouble.add(rank if alone else NODE, message, "died", lost=alone)
    for rank, raised in account.raised.items():
        failure = raised.failure
        error_type = failure.type.rpartition(".")[2]
        if error_type in _OF_DEVICES:
            mine = alone or error_type != _OF_GROUPS
            message = f"{call_name} raised {failure.headline}"
            trouble.add(rank if mine else NODE, message, "raised", lost=error_type == "AcceleratorError")
        else:
            trouble.add(rank, f"{call_name} could not run: {failure.headline}", "raised", "unknown")
    if account.hung is not None:
        late = f"{call_name} did not end within {account.hung:g} s"
        # No GPU shows that the time suffices: the host may be busy.
        if alone and len(gpus) > 1 and not account.finished:
            trouble.add(NODE, f"{late} on any GPU", "hung", "unknown")
        else:
            for rank in account.interrupted if alone else [NODE]:
                trouble.add(rank, late, "hung", lost=alone)
    if not trouble.observations:
        trouble.add(NODE, f"{call_name} could not run: {str(error).splitlines()[0]}", "raised", "unknown")
    return trouble


_HURRY = 4

_PROBE = 10.0  # time limit in seconds for one addition on a GPU, on an idle host. A GPU that exceeds it counts as lost.


@dataclass(frozen=True)
class Boundary:
    """A telemetry snapshot between two tests."""

    # check, test: the test that had just ended; empty before the first test
    check: str
    test: str
    snapshot: Snapshot


class Node:
    """The fixture `node`: all GPUs of a run, with the methods that run checks on them.

    `Run.start` makes it after a first look at the GPUs. Tests call checks by it, and second looks do after the last
    test. The processes belong to the pool of the session, which ends them. The number of a GPU is its index in `gpus`.
    """

    def __init__(
        self,
        pool: RankPool,
        log: RunLog,
        gpus: Sequence[Gpu],
        plan: Plan,
        hosts: Sequence[Host] = (),
        telemetry: Watch | None = None,
    ) -> None:
        self.gpus, self.plan, self.hosts_of_run, self.telemetry = tuple(gpus), plan, tuple(hosts), telemetry
        self.visible: dict[int, int] = {}  # number of GPUs of each host, including those outside the run
        self.slots: dict[int, str] = {}  # PCI bus id of each GPU, from torch; empty where torch does not report it
        # Xid -> times in the kernel log before the run, by GPU; without GPUs whose log could not be read
        self.past_xids: dict[int, dict[int, int]] = {}
        # what the kernel of each host said before the run, by name and boot id of the host
        self.kernel_before: dict[tuple[str, str], KernelFacts] = {}
        self.lost: set[int] = set()  # GPUs that no longer answer; no check is called on them
        self.boundaries: list[Boundary] = []  # a snapshot before the first test, and one after each test
        self._pool, self._log = pool, log
        self._hung: set[str] = set()
        self._fresh = 0
        self._probing = self._controlling = False
        # called with a call that has returned failed observations, and with these
        self.on_failed: Callable[[RepeatableCall, Sequence[Observation]], None] = lambda call, failed: None
        self._measuring: dict[MeasuredKind, Callable[[], object]] = {}

    @property
    def depth(self) -> Depth:
        return depth_of(self.plan.level)

    @property
    def simulated(self) -> bool:
        return self.plan.simulate is not None

    @property
    def numbers(self) -> list[int]:
        """Numbers of the GPUs that checks are called on."""
        return [gpu.number for gpu in self.gpus if gpu.number not in self.lost]

    @property
    def fabric(self) -> dict[int, str]:
        """Number of each host with an active InfiniBand port -> the name of the port."""
        ports: dict[int, str] = {}
        for host in self.hosts_of_run:
            for component in self.kernel_before.get((host.name, host.boot), {}).values():
                if component.kind == "infiniband" and component.is_up:
                    ports.setdefault(host.number, component.name)
        return ports

    @property
    def hosts(self) -> dict[int, list[int]]:
        """Number of each host -> numbers of its GPUs that checks are called on."""
        return dict(grouped((self.gpus[number].host, number) for number in self.numbers))

    def on_ranks(
        self,
        check: str,
        fn: Callable[..., Any],
        *args: Any,
        gpus: Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call ``fn(rank, *args)`` on one rank per GPU at the same time, and record the results that the ranks return.

        Rank i has GPU ``gpus[i]``; default all. The `SubjectResult` that `fn` returns name ranks. `timeout` is seconds
        for all ranks; default by level. Return what each rank returned, with numbers of GPUs in each `SubjectResult`.
        The result is empty if a rank did not return; the failure is recorded.
        """
        chosen = self.numbers if gpus is None else [number for number in gpus if number not in self.lost]
        if not chosen:
            return []

        def call() -> list[Any]:
            # The time limit is shorter once a call of this check has hung.
            patience = timeout or seconds_for_a_call() / (_HURRY if check in self._hung else 1)
            return self._pool.run(fn, *args, devices=chosen, environment=environment, timeout=patience)

        repeatable = RepeatableCall(check, fn, args, tuple(chosen), timeout, environment or {})
        return self._looked(repeatable, call, lambda: self.repeat(repeatable, chosen[::-1]))

    def repeat(
        self, call: RepeatableCall, gpus: Sequence[int], environment: Mapping[str, str] | None = None
    ) -> list[Observation]:
        """Repeat a call on `gpus`, with `environment` added to its variables, and return the new observations."""
        variables = {**call.environment, **(environment or {})}
        before = len(self._log.sections[-1].observations)
        if call.host is None:
            self.on_ranks(call.check, call.fn, *call.args, gpus=gpus, environment=variables, timeout=call.timeout)
        else:
            repeatable = replace(call, gpus=tuple(gpus), environment=variables)
            self._on_host(repeatable, lambda: self.repeat(call, gpus[::-1]))
        return self._log.sections[-1].observations[before:]

    def repeat_in_fresh_processes(self, call: RepeatableCall) -> list[Observation]:
        """Repeat a call on the same GPUs in processes that have not run anything."""
        self._fresh += 1  # a world with an environment of its own has processes of its own
        return self.repeat(call, call.gpus, {"MGPU_CHECK_CONTROL": str(self._fresh)})

    def in_node_process(
        self, check: str, fn: Callable[..., Any], *args: Any, timeout: float | None = None, backwards: bool = False
    ) -> None:
        """Call ``fn(devices, *args)`` in one process per host, with all GPUs of the host, and record the results.

        With `backwards` the last GPU of each host is the first of `devices`. The failure of a host that does not return
        is recorded.
        """

        def measure() -> None:
            self.in_node_process(check, fn, *args, timeout=timeout, backwards=not backwards)

        for host, numbers in self.hosts.items():
            gpus = tuple(numbers[::-1] if backwards else numbers)
            self._on_host(RepeatableCall(check, fn, args, gpus, timeout, host=host), measure)

    def _on_host(self, repeatable: RepeatableCall, measure: Callable[[], object]) -> None:
        host, indices = repeatable.host or 0, [self.gpus[number].index for number in repeatable.gpus]

        def call() -> list[Any]:
            return self._pool.call(
                self._pool.function(_with_devices),
                (repeatable.fn, indices, repeatable.args),
                {},
                size=0,
                timeout=repeatable.timeout or seconds_for_a_call(),
                host=host,
                environment=repeatable.environment,
            )

        self._looked(repeatable, call, measure)

    def measurements(self) -> list[Measurement]:
        return list(self._log.measurements())

    def measure_again(self, slow: Iterable[Measurement], until: Callable[[], bool]) -> list[Measurement]:
        """Repeat the calls that made these measurements, with the GPUs in reverse order, until `until` returns that the
        time is over. Return the new measurements, which are in the log, too."""
        calls = dict.fromkeys(self._measuring[speed.kind] for speed in slow if speed.kind in self._measuring)
        before = len(self.measurements())
        for call in calls:
            if not until():
                call()
        return self.measurements()[before:]

    def mark(self, check: str = "", test: str = "") -> None:
        if self.telemetry is not None:
            self.boundaries.append(Boundary(check, test, self.telemetry.snapshot(full=not self.boundaries)))

    def record(self, results: Iterable[SubjectResult]) -> None:
        """Record results that already have numbers of GPUs."""
        self._log.add(results)

    def _looked(
        self, repeatable: RepeatableCall, call: Callable[[], list[Any]], measure: Callable[[], object]
    ) -> list[Any]:
        """Make a call and record its results. `measure` measures the same again: of several calls that measure a
        quantity, the last one is kept."""
        check, fn, gpus = repeatable.check, repeatable.fn, repeatable.gpus
        try:
            results = call()
        except BaseException as error:
            trouble = observations_of(error, check, getattr(fn, "__name__", str(fn)), gpus)
            if trouble is None:
                raise
            self._log.add(trouble.observations)
            self.lost |= trouble.lost
            if isinstance(error, RankHang):
                self._hung.add(check)
            has_failed = any(entry.outcome == "failed" for entry in trouble.observations)
            if (has_failed or isinstance(error, StartupFailure | RankHang)) and not self._probing:
                # An error in a group does not name the GPU at fault, so ask the GPUs one at a time.
                limit = min(_PROBE * slowdown(), seconds_for_a_call())
                with replaced(self, "_probing", True):
                    for number in self.numbers:
                        self.on_ranks(check, answers, check, gpus=[number], timeout=limit)
            return []
        alone = repeatable.host is not None
        hosts = [repeatable.host or 0] * len(results) if alone else [self.gpus[number].host for number in gpus]
        translated = [_translated(result, gpus, host) for result, host in zip(results, hosts, strict=False)]
        failed: list[Observation] = []
        for result in translated:
            items = result if isinstance(result, (list, tuple)) else [result]
            new = [item for item in items if isinstance(item, SubjectResult)]
            self._log.add(new, repeatable)
            self._measuring |= {speed.kind: measure for speed in new if isinstance(speed, Measurement)}
            failed += [entry for entry in new if isinstance(entry, Observation) and entry.outcome == "failed"]
        if failed and not self._controlling:
            with replaced(self, "_controlling", True):
                self.on_failed(repeatable, failed)
        return translated


def _translated(result: Any, gpus: Sequence[int], host: int) -> Any:
    """Return a result with numbers of GPUs in place of positions."""
    if isinstance(result, SubjectResult):
        return result.on(gpus, host)
    if isinstance(result, (list, tuple)) and any(isinstance(item, SubjectResult) for item in result):
        return [_translated(item, gpus, host) for item in result]
    return result


T = TypeVar("T")


def of_type(wanted: type[T], gpus: Sequence[int], results: Sequence[Iterable[Any] | None]) -> dict[int, T]:
    """Return the value of a type among the results of each GPU, without GPUs that have none."""
    each = zip(gpus, results, strict=False)
    return {gpu: value for gpu, values in each for value in values or () if isinstance(value, wanted)}


def _with_devices(fn: Callable[..., Any], indices: Sequence[int], args: Sequence[Any]) -> Any:
    import torch

    return fn([torch.device("cuda", index) for index in indices], *args)


def answers(rank: Rank, check: str) -> list[Observation]:
    """Sum numbers on the device of a rank and check the result; a lost device raises, or never returns."""
    import torch

    total = int(torch.arange(1024, device=rank.device).sum().item())
    subject = Subject("gpu", (rank.index,))
    if total == 1024 * 1023 // 2:
        return [Observation(check, subject, "passed", case="sum of 0 to 1023", work=Work(operations=1))]
    return [Observation(check, subject, "failed", f"the sum of 0 to 1023 is {total}", "sum of 0 to 1023")]
