"""Measurements of healthy and slow nodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from mgpu_check.acceptance.references import Floors
from mgpu_check.acceptance.run_report import Gpu, Host, RunReport, Verdict
from mgpu_check.devices.observations import Measurement, Observation, Subject

NONE = Floors("none.json", ())
SIZE = 1 << 26
KINDS: dict[str, tuple[str, Any, float]] = {
    "gpu": ("matrix product, float16", "FLOP/s", 3e14),
    "copy": ("copy bandwidth", "B/s", 2e11),
    "upload": ("upload bandwidth", "B/s", 4e10),
    "download": ("download bandwidth", "B/s", 4e10),
    "latency": ("copy latency", "s", 1e-5),
}
SUBJECTS: dict[str, Any] = {"latency": "copy"}


def gpus(count: int, name: str = "Model", **facts: str) -> list[Gpu]:
    return [Gpu(n, 0, n, name, f"GPU-{n}", 80 << 30, facts=facts) for n in range(count)]


def measurement(kind: str, members: tuple[int, ...], value: float, repeats: int = 5, **more: Any) -> Measurement:
    quantity, unit, _ = KINDS[kind]
    named: Any = SUBJECTS.get(kind, kind)
    subject = Subject(named, members)
    return Measurement("x", subject, quantity, unit, value, repeats, SIZE, **more)


def all_of(kind: str, count: int) -> list[Any]:
    pairs = SUBJECTS.get(kind, kind) == "copy"
    return list(itertools.permutations(range(count), 2)) if pairs else [(n,) for n in range(count)]


def node(kind: str, count: int, speed: Callable[[tuple[int, ...]], float]) -> list[Measurement]:
    """Measurements of one kind over a node; `speed` is 1 of what is right."""
    unit, right = KINDS[kind][1:]
    values = {
        members: right / speed(members) if unit == "s" else right * speed(members) for members in all_of(kind, count)
    }
    return [measurement(kind, members, value) for members, value in values.items()]


def failed(observations: Iterable[Observation]) -> set[tuple[int, ...]]:
    return {o.subject.members for o in observations if o.outcome == "failed"}


def of_measurements(observations: Iterable[Observation]) -> list[Observation]:
    return [o for o in observations if "comparisons" in o.evidence]


def differing(observations: Iterable[Observation]) -> list[Observation]:
    return [o for o in observations if {"differ", "differ to the host"} & set(o.evidence)]


def report(name: str, factor: float, torch: str = "2.13") -> RunReport:
    verdict = Verdict("ACCEPTED")
    made = tuple(node("gpu", 4, lambda m: factor) + node("copy", 4, lambda m: factor))
    return RunReport(
        "2026-01-01T00:00:00+00:00", 1.0, "", "quick", verdict, {0: verdict}, (Host(0, name, {"torch": torch}),),
        tuple(gpus(4)), (), (), made,
    )  # fmt: skip
