"""The telemetry of four simulated GPUs in a run, without a process and without waiting: tests move the
time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from mgpu_check.acceptance.inventory.checks import Reference
from mgpu_check.acceptance.references import packaged_floors
from mgpu_check.devices.telemetry import sources
from mgpu_check.devices.telemetry.fields import Kind, asked, field_of
from mgpu_check.devices.telemetry.sampler import Snapshot, TelemetrySample, Trouble
from mgpu_check.devices.telemetry.sources import GpuLost, Override, QueryError, SimulatedSource, SimulatedTelemetry

GPUS = (0, 1, 2, 3)
SLOTS = {gpu: f"00000000:{gpu:02X}:00.0" for gpu in GPUS}
"""The slots as torch reports them."""


def nominal(gpus: int) -> Reference:
    """Return the facts that a node with `gpus` simulated GPUs should have."""
    (sku,) = (sku for sku in packaged_floors().skus if sku.names == ("SIMULATED (*",))
    return Reference("the data sheet", sku.facts(gpus), nominal=True)


NOMINAL = nominal(len(GPUS))


@dataclass
class Run:
    """A run with these records of telemetry."""

    snapshots: list[tuple[str, Snapshot]] = field(default_factory=list)
    samples: list[TelemetrySample] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)

    @property
    def first(self) -> Snapshot:
        return self.snapshots[0][1]


def watched(
    monkeypatch: pytest.MonkeyPatch,
    overrides: Sequence[Override] = (),
    profile: Mapping[str, Any] | None = None,
    gpus: Sequence[int] = GPUS,
) -> Run:
    """Three tests of ten seconds each, with ten samples."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None)
    monkeypatch.setattr(sources, "time", clock)
    source = SimulatedSource({gpu: f"uuid-{gpu}" for gpu in gpus}, SimulatedTelemetry(profile or {}, overrides))
    run = Run()
    lost: dict[int, str] = {}

    def read(gpu: int, *kinds: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name in asked(kinds, gpu, gpus):
            try:
                values[name] = None if gpu in lost else source.query(gpu, name)
            except GpuLost as error:
                lost[gpu] = str(error)
                run.troubles.append(Trouble("lost", gpu, name, str(error), now[0], error.code))
            except QueryError as error:
                values[name] = None
                if not any((t.gpu, t.field) == (gpu, name) for t in run.troubles):
                    run.troubles.append(Trouble("error", gpu, name, str(error), now[0], error.code))
        return values

    def snapshot() -> Snapshot:
        every = {gpu: read(gpu, *get_args(Kind)) for gpu in gpus}
        every = {gpu: values for gpu, values in every.items() if gpu not in lost}

        def of(*kinds: str) -> dict[int, Any]:
            return {g: {n: v for n, v in vs.items() if field_of(n).kind in kinds} for g, vs in every.items()}

        return Snapshot(
            now[0],
            of("identity", "fact", "pair", "limit", "state"),
            of("counter"),
            of("gauge"),
            unknown={gpu: {} for gpu in every},
            missing=dict(lost),
            identity=of("identity"),
        )

    for test in ("", "test_a", "test_b", "test_c"):
        run.snapshots.append((test, snapshot()))
        for _ in range(10):
            now[0] += 1.0
            for gpu in gpus:
                values = read(gpu, "gauge", "counter")
                if gpu not in lost:
                    run.samples.append(TelemetrySample(now[0], gpu, values))
            run.troubles += [Trouble("xid", event.gpu, "", "", now[0], event.xid) for event in source.events(0.0)]
    return run
