"""Read what ``dcgmi diag -j`` prints, and turn its results into observations of the GPUs of a run.

The source of DCGM defines the layouts of DCGM 2, 3 and 4 (``dcgmi/Diag.cpp``): up to DCGM 3, ``gpu_ids`` or ``gpu_id``
name the GPU of a result, and ``GPU Device Serials`` its serial number, since 3.3; in DCGM 4 a result names an entity,
and ``entity_groups`` has the serial numbers. No layout has UUIDs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu_check.acceptance.documents import read_document
from mgpu_check.acceptance.run_report import Gpu
from mgpu_check.devices.observations import Observation, Outcome, Subject, Work

_NAMES = ("DCGM Diagnostic", "DCGM GPU Diagnostic")
_STATES = ("Pass", "Fail", "Warn", "Skip")
_GPU = 1  # `DCGM_FE_GPU`: the id of the group of GPUs
_ORIGIN = "`dcgmi diag -r 3 -j > FILE.json` writes such a file"


@dataclass(frozen=True)
class DiagnosticResult:
    """One result of a test."""

    test: str
    category: str
    gpu: int | None  # index of the GPU for DCGM; None for the host
    serial: str  # serial number of the GPU; "" if the file lacks it
    state: str  # "Pass", "Fail", "Warn" or "Skip"
    message: str = ""  # the messages, in one line
    errors: tuple[int, ...] = ()  # DCGM's numbers of the errors


@dataclass(frozen=True)
class Diagnostic:
    """A run of the diagnostic."""

    file: str
    version: str  # of DCGM; "" if the file does not have it
    results: tuple[DiagnosticResult, ...]
    error: str | None = None  # why the diagnostic did not run


def read_diagnostic(path: Path) -> Diagnostic:
    """Read a file. A run of several iterations has the results of all of them."""
    document = read_document(path)
    try:
        runs = _of(document, "the file", dict).get("iterations", [document])
        parsed_runs = [_run(_of(run, "an iteration", dict)) for run in _of(runs, "iterations", list)]
    except (ValueError, KeyError, TypeError, AttributeError) as wrong:
        text = str(wrong) if isinstance(wrong, ValueError) else f"it is in no layout of DCGM ({wrong!r})"
        raise ValueError(f"{path}: {text}. {_ORIGIN}") from wrong
    results = tuple(result for _, run_results, _ in parsed_runs for result in run_results)
    error = "; ".join(dict.fromkeys(text for _, _, text in parsed_runs if text)) or None
    if not results and error is None:
        raise ValueError(f"{path}: it has no result of a test. {_ORIGIN}")
    return Diagnostic(str(path), next((version for version, _, _ in parsed_runs if version), ""), results, error)


def _run(document: Mapping[str, Any]) -> tuple[str, list[DiagnosticResult], str | None]:
    name = next((name for name in _NAMES if name in document), None)
    if name is None:
        raise ValueError(f"there is no {' or '.join(map(repr, _NAMES))} in {sorted(document)[:8]}")
    body = _of(document[name], name, dict)
    metadata = document.get("metadata", {})
    version = str(document.get("version") or metadata.get("version") or body.get("version") or "")
    if error := body.get("runtime_error"):
        return version, [], str(error)
    serials = {int(key): str(value) for key, value in document.get("GPU Device Serials", {}).items()}
    for group in document.get("entity_groups", ()):
        if group.get("entity_group_id") == _GPU:
            serials |= {entity["entity_id"]: str(entity.get("serial_num", "")) for entity in group["entities"]}
    results: list[DiagnosticResult] = []
    for category in _of(body.get("test_categories"), "test_categories", list):
        for test in _of(_of(category, "a category", dict).get("tests", []), "tests", list):
            if test is not None:  # a test that did not run leaves a gap
                results += _test(_of(test, "a test", dict), str(category.get("category", "")), serials)
    return version, results, None


def _test(test: Mapping[str, Any], category: str, serials: Mapping[int, str]) -> list[DiagnosticResult]:
    name = str(test.get("name", "a test"))
    results = [
        result
        for entry in _of(test.get("results", []), f"results of {name}", list)
        if entry is not None  # a GPU that did not run the test
        for result in _results(name, category, _of(entry, f"a result of {name}", dict), serials)
    ]
    summary = test.get("test_summary")
    if summary is not None and not any(result.state == summary.get("status") for result in results):
        results += _results(name, category, _of(summary, f"test_summary of {name}", dict), {})
    return results


def _results(
    test: str, category: str, entry: Mapping[str, Any], serials: Mapping[int, str]
) -> Iterator[DiagnosticResult]:
    """Yield the results of an entry: one for each GPU that it names, or one for the host."""
    state = str(entry.get("status"))
    if state not in _STATES:
        raise ValueError(f"status of {test} is {state!r}; DCGM has {', '.join(_STATES)}")
    warnings = entry.get("warnings") or []
    texts, errors = [], [entry["error_id"]] if "error_id" in entry else []
    for warning in [warnings] if isinstance(warnings, str) else warnings:
        if isinstance(warning, Mapping):
            texts.append(str(warning.get("warning") or warning.get("warnings") or ""))
            errors += [warning["error_id"]] if "error_id" in warning else []
        elif warning is not None:
            texts.append(str(warning))
    gpus: list[int | None] = [None]
    if "entity_group_id" in entry:
        if entry["entity_group_id"] == _GPU:
            gpus = [int(entry["entity_id"])]
        else:
            texts.insert(0, f"{entry.get('entity_group')} {entry.get('entity_id')}")
    elif (named := str(entry.get("gpu_id", entry.get("gpu_ids", "")))) not in ("", "-1"):
        gpus = [int(word) for word in named.split(",")]
    message = "; ".join(" ".join(text.split()) for text in dict.fromkeys(texts) if text)
    for gpu in gpus:
        serial = "" if gpu is None else serials.get(gpu, "")
        yield DiagnosticResult(test, category, gpu, serial, state, message, tuple(int(error) for error in errors))


def _of(value: Any, label: str, json_type: type) -> Any:
    if not isinstance(value, json_type):
        raise ValueError(f"{label} is {str(value)[:60]!r}, not {'an object' if json_type is dict else 'a list'}")
    return value


_CHECK = "dcgm"
_OUTCOMES: Mapping[str, Outcome] = {"Pass": "passed", "Fail": "failed", "Warn": "failed", "Skip": "skipped"}


def examine_diagnostic(diagnostic: Diagnostic, gpus: Sequence[Gpu], visible: Mapping[int, int]) -> list[Observation]:
    """Return an observation for each result: of its GPU, or of the host.

    A GPU is found by its serial number. Without serial numbers, its index in DCGM is its place by PCI bus id, if the
    run is on one host with all of its GPUs: `visible` counts the GPUs of each host, including those outside the run.
    """
    case = f"DCGM {diagnostic.version}".rstrip()
    if diagnostic.error:
        return [_of_host(0, "unknown", f"the diagnostic did not run: {diagnostic.error}", case)]
    serials = {gpu.serial: gpu for gpu in gpus if gpu.serial}
    dcgm_serials = {result.serial for result in diagnostic.results if result.serial}
    if dcgm_serials and not dcgm_serials & serials.keys():
        text = f"{diagnostic.file} is about other GPUs, with serial numbers {', '.join(sorted(dcgm_serials))}"
        return [_of_host(0, "unknown", f"{text}; give the file of this node", case)]
    one_host = len({gpu.host for gpu in gpus}) == 1 and len(gpus) == visible.get(gpus[0].host)
    covers_host = one_host and all(gpu.pci for gpu in gpus)
    places = dict(enumerate(sorted(gpus, key=lambda gpu: gpu.pci))) if covers_host else {}
    host = next((gpu.host for serial, gpu in serials.items() if serial in dcgm_serials), gpus[0].host)
    observations = []
    for result in diagnostic.results:
        if result.gpu is None:
            observations.append(_observation(Subject("host", (host,)), result, case))
            continue
        gpu = serials.get(result.serial) if result.serial else places.get(result.gpu)
        name = f"GPU {result.gpu} of DCGM"
        if gpu is not None:
            observations.append(_observation(Subject("gpu", (gpu.number,)), result, case))
        elif result.serial:
            text = f"{name} (serial {result.serial}) is not in this run: {result.test}: {result.state}"
            observations.append(_of_host(host, "skipped", text, case))
        else:
            text = f"{result.test} of {name}: {result.state}; the file has no serial numbers"
            text += ", so it can name a GPU only in a run of all GPUs of one host"
            observations.append(_of_host(host, "unknown", text, case))
    return observations


def _observation(subject: Subject, result: DiagnosticResult, case: str) -> Observation:
    outcome = _OUTCOMES[result.state]
    message = f"{result.test}: {result.state}{f': {result.message}' if result.message else ''}"
    message = "" if outcome == "passed" else message
    evidence = {"kind": f"dcgm {result.state}", "test": result.test, "category": result.category}
    if result.errors:
        evidence["errors"] = ", ".join(map(str, result.errors))
    work = Work(operations=outcome != "skipped")
    return Observation(_CHECK, subject, outcome, message, f"{case}: {result.test}", work, evidence)


def _of_host(host: int, outcome: Outcome, message: str, case: str) -> Observation:
    return Observation(_CHECK, Subject("host", (host,)), outcome, message, case)
