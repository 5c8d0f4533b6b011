"""One acceptance run, from its first look at the GPUs to its report."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_check.acceptance.documents import write_whole
from mgpu_check.acceptance.faults import PLANTER, hardware_text
from mgpu_check.acceptance.findings import judged, listed
from mgpu_check.acceptance.machine.checks import Component, KernelFacts, read_kernel
from mgpu_check.acceptance.node import Node
from mgpu_check.acceptance.plan import CHECKS, Plan, Selection, check_runs, floors
from mgpu_check.acceptance.references import entries_of, record
from mgpu_check.acceptance.report import files
from mgpu_check.acceptance.report.summary import verdict_lines
from mgpu_check.acceptance.run_report import (
    Accusation,
    CheckRun,
    Gpu,
    Host,
    Kind,
    RepeatableCall,
    RunLog,
    RunReport,
    Verdict,
)
from mgpu_check.acceptance.telemetry import Watch
from mgpu_check.acceptance.verdict import (
    LOCALISATION_CASES,
    Explanation,
    Look,
    control,
    evidence_lines,
    explain,
    found_about,
    look_again,
    of_symptoms,
    remedy_for,
)
from mgpu_check.devices.inventory import Inventory, take_inventory
from mgpu_check.devices.observations import Observation, Part, Subject
from mgpu_check.devices.telemetry.nvml import past_xids
from mgpu_check.devices.telemetry.sampler import Snapshot
from mgpu_check.devices.telemetry.sources import SimulatedTelemetry
from mgpu_check.plugin.serialization import Planting
from mgpu_check.processes.machine import boot_id
from mgpu_check.version import version

if TYPE_CHECKING:
    from mgpu_check.plugin.session import GpuSession

_FirstLook = tuple[Inventory, str, str, dict[str, str], dict[tuple[str, int], int] | None, dict[str, Component]]

_INTERVAL, _INTERVAL_SIMULATED = 1.0, 0.1
"""Seconds between two telemetry samples of a GPU. Simulated runs are short, so they sample more often."""


class Run:
    """One acceptance run.

    `pytest_runtestloop` of `conftest.py` makes it and starts it before the first test, lets it look again after the
    last one, and ends it, which closes the telemetry. `pytest_sessionfinish` asks it for the report. `command` is that
    of the user, without the options that select checks; `seed` is that of Hypothesis, None if it is not a number.
    """

    def __init__(
        self, session: GpuSession, plan: Plan, command: str, seed: int | None, selection: Selection | None = None
    ) -> None:
        hosts = {slot.host for slot in session.pool.slots}
        if plan.planted and len(hosts) > 1:
            raise ValueError(
                f"--plant: {plan.planted[0].text} is planted in the simulated GPUs of one host, and this run has "
                f"{len(hosts)}; leave it out, or run on one host"
            )
        self.session, self.plan, self.command, self.seed = session, plan, command, seed
        self.selection = selection or Selection()
        self.log = RunLog()
        self.log.judge = lambda entry: judged(entry, plan.policy)
        self.selected: set[str] = set()
        self.interrupted = False
        self.ended_by: str | None = None  # the signal that interrupted the run; None for Ctrl-C
        self.broken: list[str] = []  # names of tests that ended with an error of their own
        self.node: Node | None = None
        self.looks: list[Look] = []
        self._of_history: set[tuple[str, Subject]] = set()
        self._controlled: set[tuple[str, Subject]] = set()
        self.hosts: tuple[Host, ...] = ()
        self._visible: dict[int, int] = {}
        self._slots: dict[int, str] = {}
        self._logs: dict[int, Mapping[tuple[str, int], int]] = {}
        self._kernel: dict[tuple[str, str], KernelFacts] = {}
        self._started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

    def start(self) -> None:
        plan = self.plan
        files.clear([*plan.reports, *([plan.verdict_file] if plan.verdict_file else [])])
        if plan.simulate == "cpu" or plan.planted:
            self.session.fault = Planting(PLANTER, hardware_text(plan.planted))
        with self.leased("acceptance: first look at the GPUs"):
            gpus = self._gpus()
        self.node = Node(self.session.pool, self.log, gpus, plan, self.hosts, telemetry=self._watch(gpus))
        self.node.on_failed = self._control
        with self.leased("acceptance: first look at telemetry"):
            self.node.mark()
        self.node.gpus = tuple(self._identified(gpu) for gpu in gpus)
        self.hosts = tuple(self._with_driver(host) for host in self.hosts)
        self.node.hosts_of_run = self.hosts
        self.node.visible = self._visible
        self.node.kernel_before = self._kernel
        # Simulated telemetry numbers slots over all hosts, and simulated torch on each.
        self.node.slots = self._slots if not plan.simulate or len(self.hosts) == 1 else {}
        for gpu in self.node.gpus if not plan.simulate else ():
            logged = self._logs.get(gpu.host, {}).items()
            if xids := {xid: times for (pci, xid), times in logged if gpu.pci and pci == gpu.pci.upper()}:
                self.node.past_xids[gpu.number] = xids

    def _watch(self, gpus: Sequence[Gpu]) -> Watch:
        simulated = None
        if self.plan.simulate:
            planted = self.plan.planted
            overrides = [override for each in planted for override in each.fault.telemetry(each.parameters)]
            simulated = SimulatedTelemetry({"memory": gpus[0].memory, "name": gpus[0].name}, overrides)
        interval = _INTERVAL_SIMULATED if simulated else _INTERVAL
        return Watch(gpus, self.session.pool, simulated, interval, self.log.zero)

    def _look(self, host: int) -> _FirstLook:
        """Return the GPUs of a host, its name, boot id, software, past Xids, and what its kernel says.
        GPUs that refuse a context are included."""
        pool = self.session.pool
        if not self.plan.simulate:
            first_look: _FirstLook = pool.in_fresh_process(_look, host)
        else:
            (first_look,) = pool.run_in_node_process(_look, host=host)
        return first_look

    def _identified(self, gpu: Gpu) -> Gpu:
        """Return `gpu` with the serial number, PCI bus id and facts that the driver gives."""
        assert self.node is not None
        snapshot = self.node.boundaries[0].snapshot if self.node.boundaries else Snapshot()
        facts = dict(snapshot.facts.get(gpu.number, {}))
        driver_values = {**facts, **snapshot.identity.get(gpu.number, {})}
        facts = {name: value for name, value in facts.items() if name not in ("serial", "pci")}
        serial, pci, uuid = (str(driver_values.get(name) or "") for name in ("serial", "pci", "uuid"))
        return dataclasses.replace(gpu, uuid=gpu.uuid or uuid, serial=serial, pci=pci or gpu.pci, facts=facts)

    def _with_driver(self, host: Host) -> Host:
        assert self.node is not None
        driver = next((gpu.facts.get("driver") for gpu in self.node.gpus if gpu.host == host.number), None)
        return dataclasses.replace(host, software={**host.software, "driver": str(driver)}) if driver else host

    def end(self) -> None:
        if self.node is not None and self.node.telemetry is not None:
            self.node.telemetry.close()

    def write(self, report: RunReport) -> list[str]:
        """Write the reports, and the baseline unless a check failed. Return a line per file: written, or why not."""
        lines = []
        if self.plan.verdict_file is not None:
            try:
                write_whole(self.plan.verdict_file, "\n".join(verdict_lines(report, self.interrupted)) + "\n")
            except OSError as error:
                lines.append(f"NOT written: {self.plan.verdict_file}: {error}")
        for path in self.plan.reports:
            try:
                files.write(path, report if self.plan.evidence else files.shortened(path, report))
                lines.append(f"written: {path}")
            except OSError as error:
                lines.append(f"NOT written: {path}: {error}")
        return lines + ([self._recorded(report, self.plan.record)] if self.plan.record else [])

    def _recorded(self, report: RunReport, path: Path) -> str:
        if self.interrupted:
            return f"NOT recorded: {path}: the run was interrupted"
        if report.verdict.accusations or report.verdict.unexplained:
            return f"NOT recorded: {path}: a check failed, and a baseline is recorded on healthy GPUs only"
        try:
            software = self.hosts[0].software if self.hosts else {}
            entries = entries_of(report.measurements, report.gpus, software, report.started, self._visible)
            record(path, entries)
        except (OSError, ValueError) as error:
            return f"NOT recorded: {path}: {error}"
        if without := [entry.name for entry in entries if not entry.measurements]:
            return (
                f"recorded: {path}, without speeds of {', '.join(without)}: this run has measured none, so no speed is "
                "compared with it; record it with all checks, at --gpu-level=quick or above"
            )
        return f"recorded: {path}"

    @contextlib.contextmanager
    def leased(self, name: str) -> Iterator[None]:
        self.session.begin_test(name, 0)
        try:
            yield
        finally:
            self.session.end_test(failed=False)

    def _gpus(self) -> list[Gpu]:
        gpus: list[Gpu] = []
        hosts: list[Host] = []
        for host in sorted({slot.host for slot in self.session.pool.slots}):
            indices = [slot.index for slot in self.session.pool.slots if slot.host == host]
            inventory, name, boot, software, xids, kernel = self._look(host)
            hosts.append(Host(host, name, software, boot))
            self._visible[host] = len(inventory.devices)
            self._logs[host] = xids or {}
            self._kernel[name, boot] = kernel
            for index in indices:
                device = inventory.devices[index]
                self._slots[len(gpus)] = device.pci
                gpus.append(Gpu(len(gpus), host, index, device.name, device.uuid, device.memory, pci=device.pci))
        self.hosts = tuple(hosts)
        return gpus

    def look_again(self) -> None:
        assert self.node is not None
        with self.leased("acceptance: second looks"):
            for look in look_again(self.node, self.log):
                self.looks.append(look)  # each when it is done, so that an interrupted run keeps it

    def _control(self, call: RepeatableCall, failed: Sequence[Observation]) -> None:
        """Control a call that has just failed, while its processes are still there.
        After several failures of a check that need a history, its further ones count as such, unless a control has
        shown otherwise."""
        assert self.node is not None
        subjects = {(entry.check, entry.subject) for entry in failed}
        if subjects <= self._controlled:
            return
        of_check = sum(look.needs_history and look.check == call.check for look in self.looks)
        look = control(self.node, call) if of_check < LOCALISATION_CASES[self.node.depth] else None
        if look is None or look.needs_history:
            self.looks += [look] if look else []
            self._of_history |= subjects
        else:
            self._controlled |= subjects

    def report(self) -> RunReport:
        plan = self.plan
        observations = tuple(self.log.observations())
        gpus = self.node.gpus if self.node else ()
        needed = floors(gpus, plan.level, plan.memory_share, plan.soak)
        wanted = {check: subjects for check, subjects in needed.items() if check in self.selected}
        done = check_runs(observations, wanted, self.log.times)
        partial = tuple(sorted(self.selected)) if set(needed) - self.selected else ()
        verdict = self._verdict(observations, done, partial)
        return RunReport(
            started=self._started,
            seconds=self.log.now(),
            command=self.selection.added_to(self.command),
            level=plan.level,
            verdict=verdict,
            verdicts={host.number: self._of_host(verdict, host, gpus) for host in self.hosts},
            hosts=self.hosts,
            gpus=gpus,
            checks=tuple(done[check] for check in CHECKS if check in done),
            observations=observations,
            measurements=tuple(self.log.measurements()),
            samples=tuple(self.node.telemetry.samples()) if self.node and self.node.telemetry else (),
            simulated=plan.simulate,
            planted=tuple(planted.text for planted in plan.planted),
            seed=self.seed,
            versions={"mgpu-check": version()},
            findings=tuple(of_symptoms(listed(observations), observations, verdict.accusations)),
            policy=plan.policy,
        )

    def _verdict(
        self, observations: Sequence[Observation], done: Mapping[str, CheckRun], partial: tuple[str, ...]
    ) -> Verdict:
        explanation = self._explained(observations)
        unknown = [work.why for work in done.values() if work.outcome == "unknown"]
        unknown += dict.fromkeys(f"{look.check}: {look.seen[0]}" for look in self.looks if look.needs_history)
        unknown += [f"{test} could not run: the check itself raised an error, shown above" for test in self.broken]
        if self.interrupted:
            unknown.insert(0, f"the run was interrupted{f' by {self.ended_by}' if self.ended_by else ''}")
        if not done:
            unknown.append("no check ran")
        accusations = tuple(
            self._accusation(component, numbers, explanation.others(component), observations)
            for component, numbers in explanation.parts.items()
        )
        verdict_kind: Kind = "ACCEPTED"
        if accusations or explanation.unexplained:
            verdict_kind = "REJECTED"
        elif unknown:
            verdict_kind = "INCONCLUSIVE"
        rivals = (explanation.rivals,) if explanation.rivals else ()
        return Verdict(verdict_kind, accusations, tuple(unknown), explanation.unexplained, partial, rivals)

    def _explained(self, observations: Sequence[Observation]) -> Explanation:
        software = {(look.check, look.case) for look in self.looks if look.follows_rank}
        of_ranks = {id(entry) for entry, call in self.log.failed_calls() if (call.check, call.case) in software}
        of_history = self._of_history - self._controlled
        return explain(
            observations,
            [gpu.host for gpu in self.node.gpus] if self.node else [],
            [number for number, entry in enumerate(observations) if id(entry) in of_ranks],
            [number for number, entry in enumerate(observations) if (entry.check, entry.subject) in of_history],
        )

    def _accusation(
        self,
        component: Part,
        numbers: tuple[int, ...],
        others: Mapping[int, Sequence[Part]],
        observations: Sequence[Observation],
    ) -> Accusation:
        failed = [observations[number] for number in numbers]
        mine = {id(entry) for entry in failed}
        calls = [call for entry, call in self.log.failed_calls() if id(entry) in mine]
        remedy = remedy_for(component, failed)
        return Accusation(
            component,
            tuple(evidence_lines(observations, numbers, others)),
            numbers,
            arm=found_about(component, calls, self.looks),
            advice=remedy.advice,
            repeat=self._repeat(failed),
            findings=tuple(dict.fromkeys(finding.id for finding in listed(failed))),
            severity=remedy.severity,
            action=remedy.action,
            shared=tuple(others),
        )

    def _repeat(self, failed: Sequence[Observation]) -> str:
        # The check of performance judges measurements that other checks made, so repeat those as well.
        both = ((entry.evidence.get("measured_by", entry.check), entry.check) for entry in failed)
        checks = dict.fromkeys(itertools.chain.from_iterable(both))
        seed = "" if self.seed is None else f" --hypothesis-seed={self.seed}"
        return self.selection.narrowed(checks).added_to(self.command) + seed

    def _of_host(self, verdict: Verdict, host: Host, gpus: Sequence[Gpu]) -> Verdict:
        mine = {gpu.number for gpu in gpus if gpu.host == host.number}
        part_of_host = {"host": {host.number}}
        accusations = tuple(
            accusation
            for accusation in verdict.accusations
            if part_of_host.get(accusation.part.kind, mine) & set(accusation.part.members)
        )
        open_ = verdict.unknown or verdict.unexplained
        verdict_kind: Kind = "REJECTED" if accusations else "INCONCLUSIVE" if open_ else "ACCEPTED"
        return dataclasses.replace(verdict, kind=verdict_kind, accusations=accusations)


def _look() -> _FirstLook:
    import torch

    software = {"torch": str(torch.__version__), "python": platform.python_version(), "mgpu-check": version()}
    if torch.version.cuda:
        software["cuda"] = torch.version.cuda
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        # It asks the loaded library, which may be missing (torch/cuda/nccl.py, version, torch 2.13).
        with contextlib.suppress(Exception):
            software["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return take_inventory(), socket.gethostname(), boot_id(), software, past_xids(), read_kernel()
