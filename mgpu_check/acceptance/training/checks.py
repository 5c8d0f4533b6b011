"""Train the same case on all GPUs, and find GPUs that train differently by a vote among the GPUs of one model.

One or two GPUs of a model have no majority. Each of them then trains a second time, and once more in comparison with
the host. A departure names the first step and parameter that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mgpu_check.acceptance.comparison import models, vote
from mgpu_check.acceptance.node import Node
from mgpu_check.acceptance.training.cases import Trained, TransformerCase
from mgpu_check.devices.observations import EXCHANGED, Observation, Subject, Work
from mgpu_check.engine.named_function import NamedFunction

Bits = Callable[[int, int, str], bytes | None]
"""Function of GPU, step and name: train once more and return the bytes of `name` after `step`; None without an
answer."""

_LISTED = 8


@dataclass(frozen=True)
class Departure:
    """The point where a GPU leaves the majority.

    Attributes:
        step: optimizer step, from 1.
        names: the values that are wrong in that step, in order; the loss comes before the parameters.
        right: number of a GPU of the majority.
    """

    step: int
    names: tuple[str, ...]
    right: int


@dataclass(frozen=True)
class Divided:
    step: int
    names: tuple[str, ...]
    gpus: tuple[int, ...]


def departures(trained: Mapping[int, Trained]) -> tuple[dict[int, Departure], Divided | None]:
    """Let the GPUs vote step by step. A GPU that has left the majority does not vote in later steps.

    Returns:
        The GPUs that left the majority, and the GPUs that disagree in the first step without a majority, or None.
        The vote ends with that step.
    """
    gone: dict[int, Departure] = {}
    for step in range(max(len(one.digests) for one in trained.values())):
        voting = {gpu: _says(one, step) for gpu, one in trained.items() if gpu not in gone}
        votes = vote(voting, dict.fromkeys(voting, ""))  # all are of one model
        if not votes:
            continue
        usual = votes[0].usual
        if usual is None:
            return gone, Divided(step + 1, _different(trained, step, list(voting)), tuple(voting))
        right = next(gpu for gpu, says in voting.items() if says == usual)
        for gpu in votes[0].odd:
            gone[gpu] = Departure(step + 1, _different(trained, step, [right, gpu]), right)
    return gone, None


def _says(one: Trained, step: int) -> Hashable:
    return one.digests[step] if step < len(one.digests) else ()


def _different(trained: Mapping[int, Trained], step: int, gpus: Sequence[int]) -> tuple[str, ...]:
    rows = [trained[gpu].digests[step] for gpu in gpus if step < len(trained[gpu].digests)]
    names = trained[gpus[0]].names
    if len(rows) < len(gpus):
        return ("number of steps",)
    return tuple(name for name, *values in zip(names, *rows, strict=True) if len(set(values)) > 1)


def judge(trained: Mapping[int, Trained], bits: Bits) -> tuple[list[Observation], Divided | None]:
    """Return observations of GPUs of one model that trained one case, and the GPUs that disagree without a majority.

    The GPUs without a majority have no observation yet.

    Args:
        bits: called for the GPUs that depart, to count the elements that differ and to see whether it happens again.
    """
    gone, divided = departures(trained)
    undecided = set(divided.gpus) if divided else set()
    found = []
    for gpu, one in trained.items():
        if gpu in gone:
            found.append(_departed(gpu, one, gone[gpu], len(trained), bits))
        elif gpu not in undecided:
            found.append(passed(gpu, one))
    return found, divided


def passed(gpu: int, one: Trained) -> Observation:
    """Return the observation of a GPU that trained like the others: failed if a step changed no parameter."""
    subject, rows = Subject("gpu", (gpu,)), one.digests
    still = [step for step in range(1, len(rows)) if rows[step][1:] == rows[step - 1][1:]]
    if still:
        return Observation(
            "training", subject, "failed", f"step {still[0] + 1} has changed no parameter", str(one.case)
        )
    return Observation("training", subject, "passed", case=str(one.case), work=work_of(one))


def work_of(one: Trained) -> Work:
    """Return the work of a training; each step counts as one operation."""
    return Work(operations=len(one.digests), seconds=one.seconds)


def _departed(gpu: int, one: Trained, where: Departure, voters: int, bits: Bits) -> Observation:
    first = where.names[0]
    more = f" and {len(where.names) - 1} more" if where.names[1:] else ""
    evidence: dict[str, Any] = {
        "step": where.step,
        "names": list(where.names[:_LISTED]),
        "right": where.right,
        "voters": voters,
    }
    looked_at = next((name for name in where.names if name in one.names[1:]), first)
    mine, right = bits(gpu, where.step, looked_at), bits(where.right, where.step, looked_at)
    seen = f"departs from the other GPUs in step {where.step}, in {first}{more}"
    if mine is not None and right is not None:
        differ = elements_that_differ(right, mine, _size_of(one))
        count = differ["elements"]
        evidence |= {"again": bool(count), "looked at": looked_at, **differ}
        again = f"{count} of {differ['of']} elements of {looked_at} are wrong" if count else "it does not"
        seen += f"; trained again, {again}"
    return Observation("training", Subject("gpu", (gpu,)), "failed", seen, str(one.case), work_of(one), evidence)


def _size_of(one: Trained) -> int:
    return 2 if one.case.precision == "bfloat16" else 4


def elements_that_differ(right: bytes, wrong: bytes, size: int) -> dict[str, Any]:
    """Return how many elements of `size` bytes differ, with the positions and the differing bits of the first ones.

    Compare byte by byte if the lengths differ or are not a multiple of `size`.
    """
    if len(right) != len(wrong) or len(right) % size:
        size = 1
    places: list[int] = []
    masks: list[str] = []
    count = 0
    for place in range(0, min(len(right), len(wrong)), size):
        if right[place : place + size] != wrong[place : place + size]:
            count += 1
            if len(places) < _LISTED:
                one, other = (int.from_bytes(data[place : place + size], "little") for data in (right, wrong))
                places.append(place // size)
                masks.append(f"{one ^ other:#0{2 + 2 * size}x}")
    count += abs(len(right) - len(wrong))
    return {"elements": count, "of": max(len(right), len(wrong)) // size, "at": places, "bits": masks}


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
