"""Train the same case on all GPUs, and find GPUs that train differently by a vote among the GPUs of one model.

One or two GPUs of a model have no majority. Each of them then trains a second time, and once more in comparison with
the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mgpu_check.acceptance.comparison import models
from mgpu_check.acceptance.node import Node
from mgpu_check.acceptance.training.cases import Trained, TransformerCase
from mgpu_check.acceptance.training.departures import Divided, departures, judge, passed
from mgpu_check.devices.observations import EXCHANGED, Observation, Subject
from mgpu_check.engine.named_function import NamedFunction

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""cuBLAS gives the same bits each time only if this variable is set before its first call."""

_TRAINING, _BYTES = (
    NamedFunction(f"mgpu_check.acceptance.training.identical:{name}") for name in ("examine_training", "bytes_after")
)
_BESIDE_REFERENCE = NamedFunction("mgpu_check.acceptance.training.reference:examine_by_reference")

_SIMULATED: dict[str, Any] = {"layers": 1, "heads": 2, "width": 16, "vocabulary": 32, "length": 8, "batch": 4}
_QUICK: dict[str, Any] = {"layers": 4, "heads": 8, "width": 512, "vocabulary": 1024, "length": 128, "batch": 8}
_LARGE: dict[str, Any] = {"layers": 4, "heads": 16, "width": 1024, "vocabulary": 4096, "length": 256, "batch": 16}
_BESIDE_THE_HOST: dict[str, Any] = _SIMULATED | {"steps": 2}
_STEPS = {"quick": 3, "standard": 10, "long": 50}
_LEAST_MEMORY = {"quick": 2 << 30, "standard": 8 << 30, "long": 8 << 30}


def sized(node: Node, case: TransformerCase) -> TransformerCase:
    memory = min(gpu.memory for gpu in node.gpus)
    size = _SIMULATED if memory < _LEAST_MEMORY["quick"] else _QUICK
    if node.depth != "quick" and memory >= _LEAST_MEMORY[node.depth]:
        size = _LARGE
    return replace(case, **size, steps=_STEPS[node.depth])


def largest(node: Node) -> tuple[bool, dict[str, Any]]:
    """Return whether all GPUs of `node` have at least 2 GiB of memory, and the sizes of the largest case that fits."""
    memory = min(gpu.memory for gpu in node.gpus)
    if memory >= _LEAST_MEMORY["long"]:
        return True, _LARGE | {"length": 512}
    return (True, _QUICK) if memory >= _LEAST_MEMORY["quick"] else (False, _SIMULATED)


def train_alike(node: Node, case: TransformerCase) -> None:
    """Train `case` on all GPUs at once, and record the GPUs that train differently from others of their model."""
    trained = _trained(node, case, node.numbers)

    def bits(gpu: int, step: int, name: str) -> bytes | None:
        found = node.on_ranks("training", _BYTES, case, step, name, gpus=[gpu], environment=DETERMINISTIC)
        return found[0] if found else None

    model = models(node.gpus)
    for kind in dict.fromkeys(model[gpu] for gpu in trained):
        alike = {gpu: one for gpu, one in trained.items() if model[gpu] == kind}
        if len(alike) == 1:
            _decide(node, alike, None)
            continue
        found, divided = judge(alike, bits)
        node.record(found)
        if divided is not None:
            _decide(node, {gpu: alike[gpu] for gpu in divided.gpus}, divided)


def _trained(node: Node, case: TransformerCase, gpus: Sequence[int]) -> dict[int, Trained]:
    results = node.on_ranks("training", _TRAINING, case, gpus=gpus, environment=DETERMINISTIC)
    return {
        gpu: one for gpu, result in zip(gpus, results, strict=False) for one in result or () if isinstance(one, Trained)
    }


def _decide(node: Node, trained: dict[int, Trained], divided: Divided | None) -> None:
    """Find the GPUs at fault without a majority: by a second training, and by a training that the host repeats."""
    case = next(iter(trained.values())).case
    accused = set()
    for gpu, second in _trained(node, case, list(trained)).items():
        _, apart = departures({0: trained[gpu], 1: second})
        if apart is not None:
            accused.add(gpu)
            seen = f"does not train to the same bits twice: step {apart.step}, {apart.names[0]}"
            evidence = {"step": apart.step, "names": list(apart.names)}
            node.record([_failed(Subject("gpu", (gpu,)), seen, case, evidence)])
    accused |= _wrong_beside_the_host(node, case, [gpu for gpu in trained if gpu not in accused])
    left = {gpu: one for gpu, one in trained.items() if gpu not in accused}
    if divided is None or (accused and len({one.digests for one in left.values()}) <= 1):
        node.record(passed(gpu, one) for gpu, one in left.items())
        return
    names = ", ".join(divided.names[:3])
    seen = f"do not train alike, without a majority: step {divided.step}, {names}"
    evidence = {"step": divided.step, "names": list(divided.names), EXCHANGED: False}
    node.record([_failed(Subject("group", tuple(left)), seen, case, evidence)])


def _wrong_beside_the_host(node: Node, case: TransformerCase, gpus: Sequence[int]) -> set[int]:
    small = replace(case, optimizer="sgd", dropout=False, **_BESIDE_THE_HOST)
    results = node.on_ranks("training", _BESIDE_REFERENCE, small, gpus=gpus, environment=DETERMINISTIC)
    found = (entry for result in results for entry in result or () if isinstance(entry, Observation))
    return {one.subject.members[0] for one in found if one.outcome == "failed" and one.subject.kind == "gpu"}


def _failed(subject: Subject, seen: str, case: TransformerCase, evidence: dict[str, Any]) -> Observation:
    return Observation("training", subject, "failed", seen, str(case), evidence=evidence)
