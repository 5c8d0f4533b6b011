"""Turn the results of DCGM's diagnostic into observations of the GPUs of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mgpu_check.acceptance.dcgm.diagnostic import Diagnostic, DiagnosticResult
from mgpu_check.acceptance.run_report import Gpu
from mgpu_check.devices.observations import Observation, Outcome, Subject, Work

_CHECK = "dcgm"
_OUTCOMES: Mapping[str, Outcome] = {"Pass": "passed", "Fail": "failed", "Warn": "failed", "Skip": "skipped"}


def examine_diagnostic(diagnostic: Diagnostic, gpus: Sequence[Gpu], visible: Mapping[int, int]) -> list[Observation]:
    """Return an observation for each result: of its GPU, or of the host.

    A GPU is found by its serial number. Without serial numbers, its index in DCGM is its place by PCI bus id, if the
    run is on one host with all of its GPUs.

    Args:
        visible: number of GPUs of each host, including those outside the run.
    """
    case = f"DCGM {diagnostic.version}".rstrip()
    if diagnostic.error:
        return [_of_host(0, "unknown", f"the diagnostic did not run: {diagnostic.error}", case)]
    serials = {gpu.serial: gpu for gpu in gpus if gpu.serial}
    known = {result.serial for result in diagnostic.results if result.serial}
    if known and not known & serials.keys():
        text = f"{diagnostic.file} is about other GPUs, with serial numbers {', '.join(sorted(known))}"
        return [_of_host(0, "unknown", f"{text}; give the file of this node", case)]
    whole = len({gpu.host for gpu in gpus}) == 1 and len(gpus) == visible.get(gpus[0].host) and all(g.pci for g in gpus)
    places = dict(enumerate(sorted(gpus, key=lambda gpu: gpu.pci))) if whole else {}
    host = next((gpu.host for serial, gpu in serials.items() if serial in known), gpus[0].host)
    found = []
    for result in diagnostic.results:
        if result.gpu is None:
            found.append(_observation(Subject("host", (host,)), result, case))
            continue
        gpu = serials.get(result.serial) if result.serial else places.get(result.gpu)
        if gpu is not None:
            found.append(_observation(Subject("gpu", (gpu.number,)), result, case))
        elif result.serial:
            text = (
                f"GPU {result.gpu} of DCGM (serial {result.serial}) is not in this run: {result.test}: {result.state}"
            )
            found.append(_of_host(host, "skipped", text, case))
        else:
            text = (
                f"{result.test} of GPU {result.gpu} of DCGM: {result.state}; the file has no serial numbers, so it can "
            )
            text += "name a GPU only in a run of all GPUs of one host"
            found.append(_of_host(host, "unknown", text, case))
    return found


def _observation(subject: Subject, result: DiagnosticResult, case: str) -> Observation:
    outcome = _OUTCOMES[result.state]
    seen = (
        "" if outcome == "passed" else f"{result.test}: {result.state}{f': {result.message}' if result.message else ''}"
    )
    evidence = {"kind": f"dcgm {result.state}", "test": result.test, "category": result.category}
    if result.errors:
        evidence["errors"] = ", ".join(map(str, result.errors))
    work = Work(operations=outcome != "skipped")
    return Observation(_CHECK, subject, outcome, seen, f"{case}: {result.test}", work, evidence)


def _of_host(host: int, outcome: Outcome, seen: str, case: str) -> Observation:
    return Observation(_CHECK, Subject("host", (host,)), outcome, seen, case)
