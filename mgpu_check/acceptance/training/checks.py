"""Train the same case on all GPUs, and find GPUs that train differently by a vote among the GPUs of one model.

One or two GPUs of a model have no majority. Each of them then trains a second time, and once more in comparison with
the host. A departure names the first step and parameter that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mgpu_check.acceptance.cases import Trained, TransformerCase
from mgpu_check.acceptance.comparison import models, vote
from mgpu_check.acceptance.node import Node, of_type
from mgpu_check.devices.observations import EXCHANGED, Observation, Subject, Work
from mgpu_check.engine.rank_side.rank import NamedFunction

Bits = Callable[[int, int, str], bytes | None]
"""Function of GPU, step and name: train once more and return the bytes of `name` after `step`; None without an
answer."""

_LISTED = 8


@dataclass(frozen=True)
class Departure:
    step: int  # optimizer step, from 1
    # the values that are wrong in that step, in order; the loss comes before the parameters
    value_names: tuple[str, ...]
    majority_gpu: int  # number of a GPU of the majority


@dataclass(frozen=True)
class Divided:
    step: int
    value_names: tuple[str, ...]
    gpus: tuple[int, ...]


def departures(trained: Mapping[int, Trained]) -> tuple[dict[int, Departure], Divided | None]:
    """Let the GPUs vote step by step. A GPU that has left the majority does not vote in later steps.

    Return the GPUs that left the majority, and the GPUs that disagree in the first step without a majority, or None.
    The vote ends with that step.
    """
    gone: dict[int, Departure] = {}
    for step in range(max(len(training.digests) for training in trained.values())):
        voting: dict[int, Hashable] = {  # a training that has ended says nothing
            gpu: training.digests[step : step + 1] for gpu, training in trained.items() if gpu not in gone
        }
        votes = vote(voting, dict.fromkeys(voting, ""))  # all are of one model
        if not votes:
            continue
        usual = votes[0].usual
        if usual is None:
            return gone, Divided(step + 1, _different(trained, step, list(voting)), tuple(voting))
        majority_gpu = next(gpu for gpu, says in voting.items() if says == usual)
        for gpu in votes[0].odd:
            gone[gpu] = Departure(step + 1, _different(trained, step, [majority_gpu, gpu]), majority_gpu)
    return gone, None


def _different(trained: Mapping[int, Trained], step: int, gpus: Sequence[int]) -> tuple[str, ...]:
    rows = [trained[gpu].digests[step] for gpu in gpus if step < len(trained[gpu].digests)]
    value_names = trained[gpus[0]].value_names
    if len(rows) < len(gpus):
        return ("number of steps",)
    return tuple(name for name, *values in zip(value_names, *rows, strict=True) if len(set(values)) > 1)


def judge(trained: Mapping[int, Trained], bits: Bits) -> tuple[list[Observation], Divided | None]:
    """Return observations of GPUs of one model that trained one case, and the GPUs that disagree without a majority.

    The GPUs without a majority have no observation yet. `bits` is called for the GPUs that depart, to count the
    elements that differ and to see whether it happens again.
    """
    gone, divided = departures(trained)
    undecided = set(divided.gpus) if divided else set()
    observations = []
    for gpu, training in trained.items():
        if gpu in gone:
            observations.append(_departed(gpu, training, gone[gpu], len(trained), bits))
        elif gpu not in undecided:
            observations.append(passed(gpu, training))
    return observations, divided


def passed(gpu: int, training: Trained) -> Observation:
    """Return the observation of a GPU that trained like the others: failed if a step changed no parameter."""
    subject, rows = Subject("gpu", (gpu,)), training.digests
    still = [step for step in range(1, len(rows)) if rows[step][1:] == rows[step - 1][1:]]
    if still:
        return _failed(subject, f"step {still[0] + 1} has changed no parameter", training.case, {})
    return Observation("training", subject, "passed", case=str(training.case), work=work_of(training))


def work_of(training: Trained) -> Work:
    """Return the work of a training; each step counts as one operation."""
    return Work(operations=len(training.digests), seconds=training.seconds)


def _departed(gpu: int, training: Trained, departure: Departure, voters: int, bits: Bits) -> Observation:
    value_name = departure.value_names[0]
    suffix = f" and {len(departure.value_names) - 1} more" if departure.value_names[1:] else ""
    evidence: dict[str, Any] = {"step": departure.step, "names": list(departure.value_names[:_LISTED])}
    evidence |= {"right": departure.majority_gpu, "voters": voters}
    looked_at = next((name for name in departure.value_names if name in training.value_names[1:]), value_name)
    mine, expected = bits(gpu, departure.step, looked_at), bits(departure.majority_gpu, departure.step, looked_at)
    message = f"departs from the other GPUs in step {departure.step}, in {value_name}{suffix}"
    if mine is not None and expected is not None:
        differ = elements_that_differ(expected, mine, 2 if training.case.precision == "bfloat16" else 4)
        count = differ["elements"]
        evidence |= {"again": bool(count), "looked at": looked_at, **differ}
        repetition = f"{count} of {differ['of']} elements of {looked_at} are wrong" if count else "it does not"
        message += f"; trained again, {repetition}"
    return replace(_failed(Subject("gpu", (gpu,)), message, training.case, evidence), work=work_of(training))


def elements_that_differ(expected: bytes, actual: bytes, size: int) -> dict[str, Any]:
    """Return how many elements of `size` bytes differ, with the positions and the differing bits of the first ones.
    Compare byte by byte if the lengths differ or are not a multiple of `size`."""
    if len(expected) != len(actual) or len(expected) % size:
        size = 1
    places: list[int] = []
    masks: list[str] = []
    count = 0
    for offset in range(0, min(len(expected), len(actual)), size):
        wanted, got = (data[offset : offset + size] for data in (expected, actual))
        if wanted != got:
            count += 1
            if len(places) < _LISTED:
                bits = int.from_bytes(wanted, "little") ^ int.from_bytes(got, "little")
                places.append(offset // size)
                masks.append(f"{bits:#0{2 + 2 * size}x}")
    count += abs(len(expected) - len(actual))
    return {"elements": count, "of": max(len(expected), len(actual)) // size, "at": places, "bits": masks}


DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""cuBLAS gives the same bits each time only if this variable is set before its first call."""

_TRAINING, _BYTES = (
    NamedFunction(f"mgpu_check.acceptance.training.transformer:{name}") for name in ("examine_training", "bytes_after")
)
_BESIDE_REFERENCE = NamedFunction("mgpu_check.acceptance.training.transformer:examine_by_reference")

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
        outputs = node.on_ranks("training", _BYTES, case, step, name, gpus=[gpu], environment=DETERMINISTIC)
        return outputs[0] if outputs else None

    model = models(node.gpus)
    for gpu_model in dict.fromkeys(model[gpu] for gpu in trained):
        alike = {gpu: training for gpu, training in trained.items() if model[gpu] == gpu_model}
        if len(alike) == 1:
            _decide(node, alike, None)
            continue
        observations, divided = judge(alike, bits)
        node.record(observations)
        if divided is not None:
            _decide(node, {gpu: alike[gpu] for gpu in divided.gpus}, divided)


def _trained(node: Node, case: TransformerCase, gpus: Sequence[int]) -> dict[int, Trained]:
    return of_type(Trained, gpus, node.on_ranks("training", _TRAINING, case, gpus=gpus, environment=DETERMINISTIC))


def _decide(node: Node, trained: dict[int, Trained], divided: Divided | None) -> None:
    """Find the GPUs at fault without a majority: by a second training, and by a training that the host repeats."""
    case = next(iter(trained.values())).case
    accused = set()
    for gpu, second in _trained(node, case, list(trained)).items():
        _, departure = departures({0: trained[gpu], 1: second})
        if departure is not None:
            accused.add(gpu)
            message = f"does not train to the same bits twice: step {departure.step}, {departure.value_names[0]}"
            evidence = {"step": departure.step, "names": list(departure.value_names)}
            node.record([_failed(Subject("gpu", (gpu,)), message, case, evidence)])
    accused |= _wrong_beside_the_host(node, case, [gpu for gpu in trained if gpu not in accused])
    undecided = {gpu: training for gpu, training in trained.items() if gpu not in accused}
    if divided is None or (accused and len({training.digests for training in undecided.values()}) <= 1):
        node.record(passed(gpu, training) for gpu, training in undecided.items())
        return
    value_names = ", ".join(divided.value_names[:3])
    message = f"do not train alike, without a majority: step {divided.step}, {value_names}"
    evidence = {"step": divided.step, "names": list(divided.value_names), EXCHANGED: False}
    node.record([_failed(Subject("group", tuple(undecided)), message, case, evidence)])


def _wrong_beside_the_host(node: Node, case: TransformerCase, gpus: Sequence[int]) -> set[int]:
    small = replace(case, optimizer="sgd", dropout=False, **_BESIDE_THE_HOST)
    results = node.on_ranks("training", _BESIDE_REFERENCE, small, gpus=gpus, environment=DETERMINISTIC)
    entries = (entry for result in results for entry in result or () if isinstance(entry, Observation))
    return {entry.subject.members[0] for entry in entries if (entry.outcome, entry.subject.kind) == ("failed", "gpu")}


def _failed(subject: Subject, message: str, case: TransformerCase, evidence: dict[str, Any]) -> Observation:
    return Observation("training", subject, "failed", message, str(case), evidence=evidence)
