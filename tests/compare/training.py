"""A run of plain gradient descent, changed as a test says, and the verdict on its traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch

from mgpu_check.compare.alignment import Aligned
from mgpu_check.compare.in_script.summaries import summaries
from mgpu_check.compare.rounding import Rounding
from mgpu_check.compare.trace import Parameter, Step, TensorSummary, Trace
from mgpu_check.compare.verdict import verdict_of

NAMES = ("net.weight", "net.bias")

RATE = 0.1


def summary(tensor: torch.Tensor) -> TensorSummary:
    (numbers,) = summaries([tensor])
    assert numbers is not None
    return TensorSummary.of(numbers)


def start(seed: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 5, generator=generator), torch.randn(6, generator=generator)]


def gradients(number: int) -> list[torch.Tensor]:
    return start(100 + number)


class Training:
    """A run of plain gradient descent on gradients that depend on the step alone, and what is changed of it."""

    def __init__(self, rank: int = 0, world: int = 1, steps: int = 3) -> None:
        self.rank, self.world, self.steps = rank, world, steps
        self.begin = start()
        self.rate = RATE
        self.samples = lambda number: [8 * number + i for i in range(rank, 8, world)]
        self.columns: Callable[[int], list[int]] = lambda number: []
        self.loss = lambda number: 1.0 / (1 + number)
        self.gradient = gradients
        self.reduced: Callable[[int], list[torch.Tensor]] = lambda number: self.gradient(number)
        self.events: list[dict[str, Any]] = []
        self.micro = 1
        self.labels: tuple[float, ...] = ()
        self.change = lambda made: None

    def trace(self) -> Trace:
        made = Trace(self.rank, self.world, events=self.events)
        values = [value.clone() for value in self.begin]
        for order, (name, value) in enumerate(zip(NAMES, values, strict=True)):
            made.parameters[name] = Parameter(name, tuple(value.shape), "float32", "cpu", order)
        for number in range(self.steps):
            before = {n: summary(v) for n, v in zip(NAMES, values, strict=True)} if not number else {}
            found = self.gradient(number)
            values = [v - self.rate * g for v, g in zip(values, self.reduced(number), strict=True)]
            made.steps.append(
                Step(
                    0,
                    [self.loss(number) / self.micro] * self.micro,
                    [self.samples(number)],
                    [self.columns(number)],
                    before,
                    {n: summary(g) for n, g in zip(NAMES, found, strict=True)},
                    {n: summary(v) for n, v in zip(NAMES, values, strict=True)},
                    labels=self.labels,
                )
            )
        self.change(made)
        return made


def verdict(change=lambda training: None, world: int = 2, one=lambda training: None, unjudged=MappingProxyType({})):
    """Of a training whose ranks are as `change` makes them."""
    single, moved = Training(), Training()
    one(single), one(moved)
    moved.gradient = lambda number: [g * (1 + 4e-7) for g in single.gradient(number)]
    ranks = [Training(rank, world) for rank in range(world)]
    for training in ranks:
        one(training)
        change(training)
    reference = single.trace()
    rounding = Rounding(reference, [moved.trace()])
    return verdict_of(Aligned(reference, [t.trace() for t in ranks]), rounding, None, unjudged)


def mistakes(change, **options) -> tuple[str, ...]:
    return verdict(change, **options).report.mistakes


Change = Callable[[Training], object]


def unchanged(training: Training) -> None: ...


def case(change=unchanged, kind="differs", *mistakes, headline="", remark="", first="", said="", remarks=None,
         one=unchanged, world=2, unjudged=MappingProxyType({}), **fields) -> Callable[[], None]:  # fmt: skip
    """Return a check of the verdict on ranks as `change` makes them, and of its `fields`; empty texts do not count."""

    def check() -> None:
        found = verdict(change, world, one, unjudged)
        report = found.report
        assert (found.kind, report.mistakes) == (kind, mistakes), report
        assert {name: getattr(found, name) for name in fields} == fields
        assert first in ("", *report.remarks[:1])
        assert headline in report.headline and said in str(report) and remarks in (None, report.remarks)
        assert not remark or any(remark in line for line in report.remarks), report.remarks

    return check


def checks(**cases: Callable[[], None]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("check", cases.values(), ids=list(cases))


def times(factor):
    """A training whose gradients are multiplied by a number, or by that of each step."""

    def change(training):
        training.gradient = lambda n: [g * (factor(n) if callable(factor) else factor) for g in gradients(n)]

    return change


def own(**made: Callable[[Training], Any]) -> Change:
    """A training with attributes that are made of it."""

    def change(training: Training) -> None:
        for name, make in made.items():
            setattr(training, name, make(training))

    return change


def having(*changes, **attributes):
    """A training with several changes."""

    def change(training):
        for part in changes:
            part(training)
        for name, value in attributes.items():
            setattr(training, name, value)

    return change


def elsewhere(training):
    """Another start, on all ranks but the first."""
    training.begin = [value + min(training.rank, 1) for value in start()]


def other(training):
    training.gradient = lambda number: [g + 0.1 * g.flip(0) for g in gradients(number)]


def whole_batch(training):
    training.samples = lambda number: [8 * number + i for i in range(8)]


def one_part(training):
    def flatten(made):
        made.parameters["net.weight"] = dataclasses.replace(made.parameters["net.weight"], shape=(15,))

    training.change = flatten


def with_a_third(made: Trace) -> None:
    made.parameters["net.third"] = dataclasses.replace(made.parameters["net.weight"], name="net.third", order=2)
    for step in made.steps:
        for part in (step.before, step.gradients, step.parameters):
            if part:
                part["net.third"] = part["net.weight"]


def module(norms=(), dropouts=()):
    return [
        {"event": "module", "after": 0, "model": "Net", "wrapper": None, "batch_norms": norms, "dropouts": dropouts}
    ]
