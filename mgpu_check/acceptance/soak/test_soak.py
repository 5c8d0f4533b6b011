"""Check that all GPUs keep right results and their speed under load for the requested time.

All GPUs stay under load in rounds until the time is over. The results of each round are checked, and GPUs that slow
down are found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import pytest

from mgpu_check.acceptance.cases import Loaded, SoakCase, Trained, TransformerCase
from mgpu_check.acceptance.comparison import DEVIATIONS, UNUSABLE, models, noise_of_median
from mgpu_check.acceptance.node import Node, of_type
from mgpu_check.acceptance.training.checks import DETERMINISTIC, departures, largest
from mgpu_check.devices.observations import (
    EXCHANGED,
    Measurement,
    Observation,
    Outcome,
    Subject,
    Work,
    median_and_spread,
)
from mgpu_check.engine.rank_side.rank import NamedFunction

_LOAD = NamedFunction("mgpu_check.acceptance.soak.checks:examine_load")
_ROUNDS = 40
_SHORTEST, _LONGEST = 0.5, 30.0  # limits on the seconds of a round. Within them, a soak has `_ROUNDS` rounds.
_LEAST_TURNS, _MOST_TURNS = 4, 2000
_PATIENCE = 1.3
"""A soak ends after this multiple of the requested time, even if the GPUs were not under load for long enough."""
_PARTS = 10  # measurements of each GPU over the soak
_LEAST_ROUNDS = 6
_LOSS, _LOSS_ALONE = 0.15, 0.25
"""Share of its speed that a GPU may lose beyond the loss of the others, and in total: clocks fall as GPUs warm up."""

_SMALL = {"every": 1, "memory_share": 0.1, "copied": 1 << 12, "collective": 1 << 10}
_LARGE = {"every": 8, "memory_share": 0.5, "copied": 1 << 22, "collective": 1 << 22}


@dataclass(frozen=True)
class Rate:
    """The speed of a GPU in one round."""

    value: float  # median over its steps, in FLOP/s
    spread: float  # median absolute deviation of the steps
    steps: int


@dataclass
class _RoundsDone:
    """The results of one GPU so far; `reference` is the longest training that all later rounds must repeat."""

    reference: Trained | None = None
    seconds: float = 0.0
    rates: list[Rate] = field(default_factory=list)


class Soak:
    """A soak of all GPUs of a node.

    `test_gpus_stay_right_under_load` makes it and runs it once. Each round is a call on all ranks, and the observations
    and speeds go to the log of the node. `clock` returns seconds since a fixed time.
    """

    def __init__(self, node: Node, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.node, self.seconds, self._clock = node, seconds, clock
        self.done = {gpu: _RoundsDone() for gpu in node.numbers}
        self._round = min(_LONGEST, max(_SHORTEST, seconds / _ROUNDS))

    def run(self) -> None:
        began, number, turns = self._clock(), 1, _LEAST_TURNS
        while self._goes_on(self._clock() - began):
            gpus = self.node.numbers
            case = self._case(number, turns, len(gpus))
            timeout = 60 + 10 * self._round
            results = self.node.on_ranks("soak", _LOAD, case, gpus=gpus, environment=DETERMINISTIC, timeout=timeout)
            loaded = of_type(Loaded, gpus, results)
            self.node.record(_of_groups(loaded, case))
            self.node.record(self._of_gpus(loaded, case))
            if set(loaded) != set(self.done):
                break  # a GPU was lost: its failure is recorded, and rejects the node
            longest = max(load.seconds for load in loaded.values())
            turns = max(_LEAST_TURNS, min(_MOST_TURNS, 8 * turns, round(turns * self._round / max(longest, 1e-3))))
            number += 1
        rates = {gpu: progress.rates for gpu, progress in self.done.items()}
        self.node.record(self._measurements(rates))
        self.node.record(slower(rates, models(self.node.gpus)))

    def _goes_on(self, passed: float) -> bool:
        if passed >= _PATIENCE * self.seconds + self._round:
            return False
        return passed < self.seconds or min(progress.seconds for progress in self.done.values()) < 0.95 * self.seconds

    def _case(self, number: int, turns: int, gpus: int) -> SoakCase:
        large, size = largest(self.node)
        sizes: dict[str, Any] = _LARGE if large else _SMALL
        training = replace(TransformerCase("autocast"), **size, steps=turns * sizes["every"])
        elements = sizes["collective"] // gpus * gpus
        return SoakCase(training, number=number, **sizes | {"collective": elements})

    def _of_gpus(self, loaded: Mapping[int, Loaded], case: SoakCase) -> list[Observation]:
        """Compare each GPU with its own earlier rounds, then with the other GPUs of its model."""
        observations, alike = [], {}
        for gpu, load in loaded.items():
            progress = self.done[gpu]
            progress.seconds += load.seconds
            progress.rates += _rate(load)
            departure = departures(_cut({0: progress.reference, 1: load.trained}))[1] if progress.reference else None
            if progress.reference is None or len(load.trained.digests) > len(progress.reference.digests):
                progress.reference = progress.reference if departure else load.trained
            if departure:
                step, value_names = departure.step * case.every, departure.value_names
                message = f"does not train as in earlier rounds: step {step}, {value_names[0]}"
                observations.append(_noted(gpu, load, case, message, {"step": step, "names": list(value_names[:8])}))
            else:
                alike[gpu] = load
        model = models(self.node.gpus)
        for gpu_model in dict.fromkeys(model[gpu] for gpu in alike):
            observations += _voted({gpu: load for gpu, load in alike.items() if model[gpu] == gpu_model}, case)
        return observations

    def _measurements(self, rates: Mapping[int, Sequence[Rate]]) -> list[Measurement]:
        """Return the speed of each GPU in `_PARTS` parts of the soak. The first round is warm-up and does not count."""
        measurements = []
        width = largest(self.node)[1]["width"]
        for gpu, values in rates.items():
            warm = values[1:]
            size = max(1, -(-len(warm) // _PARTS))
            for section in (warm[start : start + size] for start in range(0, len(warm), size)):
                value, spread = median(rate.value for rate in section), median(rate.spread for rate in section)
                repeats, subject = sum(rate.steps for rate in section), Subject("gpu", (gpu,))
                speed = Measurement("soak", subject, "training under load", "FLOP/s", value, repeats, width, spread)
                measurements.append(speed)
        return measurements


def _rate(load: Loaded) -> list[Rate]:
    """Return the speed in a round without its first step, which allocates the optimizer state; empty if unusable."""
    laps = load.steps[1:]
    if not laps or min(laps) <= 0:
        return []
    rates = [load.trained.case.flops / lap for lap in laps]
    return [Rate(*median_and_spread(rates), len(rates))]


def slower(rates: Mapping[int, Sequence[Rate]], model: Mapping[int, Any]) -> list[Observation]:
    """Return an observation for each GPU: failed if it slowed down between its first and its last rounds.

    A GPU fails if its loss exceeds that of the other GPUs of its model by the limit, or if its own loss is too large.
    GPUs with too few rounds have no observation. `rates` has the speed of each GPU in each round. The first round is
    warm-up and does not count. `model` has the model of each GPU by number; GPUs of one model are compared.
    """
    lost: dict[int, float] = {}
    noise: dict[int, float] = {}
    for gpu, values in rates.items():
        if len(values) < _LEAST_ROUNDS:
            continue
        third = (len(values) - 1) // 3
        early, late = values[1 : 1 + third], values[-third:]
        before, after = (median(rate.value for rate in section) for section in (early, late))
        lost[gpu] = 1 - after / before
        noise[gpu] = min(UNUSABLE, DEVIATIONS * noise_of_median((rate.spread, rate.steps) for rate in early) / before)
    observations = []
    for gpu, share in lost.items():
        others = [loss for number, loss in lost.items() if number != gpu and model[number] == model[gpu]]
        usual = median(others) if others else 0.0
        limit = max(_LOSS if len(others) > 1 else _LOSS_ALONE, noise[gpu])
        subject, evidence = Subject("gpu", (gpu,)), {"lost": share, "others": usual, "limit": limit}
        message = ""
        if share - max(0.0, usual) > limit:
            message = f"became slower by {share:.0%} under load, the others by {max(0.0, usual):.0%}"
        elif share > max(_LOSS_ALONE, noise[gpu]):
            message = f"became slower by {share:.0%} under load, as the others did"
        outcome: Outcome = "failed" if message else "passed"
        case = "last rounds beside the first"
        observations.append(Observation("soak", subject, outcome, message, case, evidence=evidence))
    return observations


def _cut(trained: Mapping[int, Trained | None]) -> dict[int, Trained]:
    """Cut all trainings to the number of steps of the shortest, and drop None."""
    several = {key: training for key, training in trained.items() if training is not None}
    steps = min(len(training.digests) for training in several.values())
    return {key: replace(training, digests=training.digests[:steps]) for key, training in several.items()}


def _voted(alike: Mapping[int, Loaded], case: SoakCase) -> list[Observation]:
    gone, divided = departures({gpu: load.trained for gpu, load in alike.items()})
    undecided = divided.gpus if divided else ()
    observations = []
    for gpu, load in alike.items():
        if gpu in gone:
            value_names, step = gone[gpu].value_names, gone[gpu].step * case.every
            message = f"departs from the other GPUs by step {step}, in {value_names[0]}"
            observations.append(_noted(gpu, load, case, message, {"step": step, "names": list(value_names[:8])}))
        elif gpu not in undecided:
            observations.append(_noted(gpu, load, case))
    if divided is not None:
        message = f"do not train alike, without a majority: step {divided.step * case.every}, {divided.value_names[0]}"
        group, evidence = Subject("group", undecided), {EXCHANGED: False}
        observations.append(Observation("soak", group, "failed", message, str(case), evidence=evidence))
    return observations


def _noted(gpu: int, load: Loaded, case: SoakCase, message: str = "", evidence: Any = None) -> Observation:
    work = Work(load.bytes, len(load.steps), load.seconds)
    outcome: Outcome = "failed" if message else "passed"
    return Observation("soak", Subject("gpu", (gpu,)), outcome, message, str(case), work, evidence or {})


def _of_groups(loaded: Mapping[int, Loaded], case: SoakCase) -> list[Observation]:
    observations, gpus = [], tuple(loaded)
    wrong_gpus = tuple(gpu for gpu, load in loaded.items() if load.reduced)
    if wrong_gpus:
        counts = {str(gpu): loaded[gpu].reduced for gpu in wrong_gpus}
        message = f"sums under load have {max(counts.values())} wrong elements on GPU {', '.join(counts)}"
        group, suspects = Subject("group", gpus), wrong_gpus if 2 * len(wrong_gpus) < len(gpus) else ()
        sums = Observation("soak", group, "failed", message, str(case), evidence=counts, suspects=suspects)
        observations.append(sums)
    for gpu, load in loaded.items():
        for rank, count in load.exchanged.items():
            pair = Subject("group", (gpus[rank], gpu)) if gpus[rank] != gpu else Subject("gpu", (gpu,))
            message = f"{count} elements that GPU {gpus[rank]} gave GPU {gpu} in all_to_all are wrong under load"
            observations.append(Observation("soak", pair, "failed", message, str(case)))
    return observations


def test_gpus_stay_right_under_load(node: Node) -> None:
    """Training, memory, collectives and copies stay right when they run at once, round after round."""
    if node.plan.soak is None:
        pytest.skip("no soak was requested; give --for=2h")
    Soak(node, node.plan.soak).run()
