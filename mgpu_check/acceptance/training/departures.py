"""Find the GPUs that depart from identical training, with the first step and parameter that differ."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgpu_check.acceptance.training.cases import Trained
from mgpu_check.acceptance.verdict.voting import vote
from mgpu_check.devices.observations import Observation, Subject, Work

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
